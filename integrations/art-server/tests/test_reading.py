"""What a run folder tells over HTTP, whoever is writing it."""

import json
import shutil
import time

import httpx
import pytest
from recorded_runs import call, encoded, record

import art_core as art
from art_core import scoring
from art_core.store import Store
from art_server.folders import OneFolder, RunFolders
from art_server.view import view_app


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("runs") / "first")


def client(folder, host="127.0.0.1"):
    folders = folder if isinstance(folder, OneFolder) else RunFolders(folder)
    return httpx.AsyncClient(transport=httpx.ASGITransport(view_app(folders)), base_url=f"http://{host}:8200")


async def asked(folder, path, status=200, **parameters):
    async with client(folder) as http:
        response = await http.get(path, params=parameters or None)
    assert response.status_code == status, response.text
    return response.json()


def store_in(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return Store(folder / "run.sqlite")


async def test_a_folder_of_runs_lists_them_and_a_run_is_a_list_of_one(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "b")
    shutil.copytree(recorded, tmp_path / "a")
    (tmp_path / "no run").mkdir()
    found = await asked(tmp_path, "/api/runs")
    assert [it["name"] for it in found["items"]] == ["a", "b"]
    assert [it["name"] for it in (await asked(tmp_path, "/api/runs", limit=1, offset=1))["items"]] == ["b"]
    [only] = (await asked(recorded, "/api/runs"))["items"]
    assert (only["name"], only["steps"], only["planned_steps"], only["open"]) == ("first", 3, 3, False)
    assert (only["before"]["success"], only["after"]["success"]) == (0.25, 0.75)


async def test_what_a_folder_is_is_told_also_of_one_that_does_not_say_it(tmp_path):
    config = {"steps": 20, "tasks_per_step": 8, "group_size": 8}
    folders = {
        "a training": {"reward": "right", "learner": "TorchLearner", "planned_steps": 7},
        "an older training": {"reward": "right", "learner": "TorchLearner"},
        "a program of its own": {"learner": "TorchLearner"},
        "an evaluation": {"reward": "right", "evaluations": [{"name": "evaluation", "success": 0.5}]},
        "one under way": {"reward": "right"},
        "a training under way": {"reward": "right", "planned_steps": 7},
        "a dry run that failed": {"reward": "right", "planned_steps": None, "dry_run": True, "ended": "KeyError: 'a'"},
    }
    for name, meta in folders.items():
        with store_in(tmp_path / name) as store:
            for key, value in {"config": config, **meta}.items():
                store.set_meta(key, value)
    with store_in(tmp_path / "a gateway's calls") as store:
        store.add_rollout("one", task="t", split="train")
    found = {it["name"]: it for it in (await asked(tmp_path, "/api/runs"))["items"]}
    assert {name: (it["kind"], it["planned_steps"]) for name, it in found.items()} == {
        "a training": ("training", 7),
        "an older training": ("training", 20),
        "a program of its own": ("training", None),
        "an evaluation": ("evaluation", None),
        "one under way": ("evaluation", None),
        "a training under way": ("training", 7),
        "a dry run that failed": ("dry run", None),
        "a gateway's calls": ("recording", None),
    }
    assert found["an evaluation"]["measured"] == {"name": "evaluation", "success": 0.5}


async def test_a_run_tells_what_it_was_begun_with_and_what_it_gained(recorded):
    run = await asked(recorded, "/api/runs/first")
    assert (run["loss"], run["reward"], run["config"]["group_size"], run["report"]) == (
        "grpo",
        "right",
        4,
        {"steps": 3},
    )
    assert run["splits"] == [{"split": "train", "rollouts": 24, "last_step": 3}]
    assert [it["name"] for it in run["evaluations"]] == ["before", "after"]
    assert "rollout_ids" not in run["evaluations"][0]


async def test_steps_are_told_after_the_last_that_is_known(recorded):
    found = await asked(recorded, "/api/runs/first/metrics")
    assert [it["step"] for it in found["items"]] == [1, 2, 3]
    assert found["items"][2]["metrics"]["reward"] == 1.0
    rest = await asked(recorded, "/api/runs/first/metrics", after=2)
    assert [it["step"] for it in rest["items"]] == [3]
    assert [it["step"] for it in (await asked(recorded, "/api/runs/first/metrics", limit=2))["items"]] == [1, 2]


async def test_groups_tell_rewards_and_spread_and_leave_lost_attempts_out(tmp_path):
    with store_in(tmp_path / "run") as store:
        for name, error in [("a", None), ("b", "RolloutLost: gone"), ("c", "ValueError: no"), ("d", "CancelledError")]:
            store.add_rollout(name, task="t", step=1, split="train", group="g")
            store.finish_rollout(name, error=error)
        store.add_rollout("e", task="t", step=1, split="train", group="g")
        store.add_scores(["a", "c"], [1.0, 0.0], advantages=[0.5, -0.5])
    [group] = (await asked(tmp_path / "run", "/api/runs/run/groups", step=1, split="train"))["items"]
    states = {it["rollout_id"]: it["state"] for it in group["members"]}
    assert states == {"a": "finished", "b": "lost", "c": "failed", "d": "lost", "e": "running"}
    assert (group["size"], group["lost"], group["running"], group["failed"]) == (3, 2, 1, 1)
    assert (group["rewards"], group["mean"]) == ([1.0, 0.0], 0.5)
    assert group["spread"] == pytest.approx(0.7071, abs=1e-4)
    assert (await asked(tmp_path / "run", "/api/runs/run/groups", step=2))["items"] == []


async def test_trajectories_are_found_by_group_task_step_and_split(recorded):
    async def ids(**wanted):
        page = await asked(recorded, "/api/runs/first/trajectories", **wanted)
        return page["total"], [it["rollout_id"] for it in page["items"]]

    assert await ids(group="1/2", order="oldest") == (4, [f"s1-t2-{it}" for it in range(4)])
    assert (await ids(step=2))[0] == 8
    assert (await ids(split="eval")) == (0, [])
    total, first = await ids(task_id="task2", order="oldest", limit=2)
    assert first == ["s1-t2-0", "s1-t2-1"] and total == 4
    assert (await ids(task_id="task2", order="oldest", limit=2, offset=2))[1] == ["s1-t2-2", "s1-t2-3"]


async def test_a_trajectory_tells_every_message_once_and_why_it_was_rewarded(recorded):
    with Store(recorded / "run.sqlite") as store:
        store.add_scores(["s1-t2-1"], [0.25], notes=[{"other": "less"}], by="other", aside=True)
    it = await asked(recorded, "/api/runs/first/trajectories/s1-t2-1")
    assert (it["reward"], it["advantage"], it["notes"]) == (1.0, 0.5, {"ruler": "scored 1.0: because"})
    assert [(score["by"], score["aside"]) for score in it["scores"]] == [("ruler", False), ("other", True)]
    first, second = it["call_list"]
    assert len(it["messages"]) == 4
    assert [it["messages"][place]["role"] for place in second["messages"]] == ["user", "assistant", "user"]
    assert it["messages"][second["answer"]]["content"] == "answer 1 of s1-t2-1"
    assert first["messages"] == second["messages"][:1] and first["answer"] == second["messages"][1]
    assert (second["agent"], second["policy_version"], second["sampled_tokens"]) == ("team/writer", 0, 12)
    assert (second["parent"], second["continues"]) == (0, True)
    assert second["shared_tokens"] == first["prompt_tokens"] + first["sampled_tokens"]
    assert second["request"] == {"model": "policy", "temperature": 1.0}


async def test_a_call_that_begins_otherwise_branches_where_it_does(tmp_path):
    with store_in(tmp_path / "run") as store:
        store.add_rollout("r", task="t")
        for number, prompt in enumerate([(1, 2, 3), (1, 2, 3, 7, 8), (1, 2, 9), (5, 5)]):
            store.record("r", call(prompt, (7,), request_id=str(number)))
    calls = (await asked(tmp_path / "run", "/api/runs/run/trajectories/r"))["call_list"]
    assert [(it["parent"], it["shared_tokens"], it["continues"]) for it in calls] == [
        (None, 0, False), (0, 4, True), (1, 2, False), (None, 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["mean", "mean_std", "leave_one_out", "branch"])
async def test_calls_with_advantages_of_their_own_tell_the_advantages_that_were_trained(tmp_path, how):
    rewards, own = [1.0, 0.0, 0.5], [[0.3, None], [0.9, 0.1], [None, None]]
    runs = [
        art.Trajectory(
            task="t", reward=reward, rollout_id=f"r{number}",
            calls=tuple(
                call((1, number % 2)[: at + 1], (2,), agent=f"n{at}", reward=it, request_id=str(at))
                for at, it in enumerate(of)
            ),
        )
        for number, (reward, of) in enumerate(zip(rewards, own, strict=True))
    ]  # fmt: skip
    trained = scoring.advantages(art.Group(task="t", trajectories=tuple(runs)), how)
    with store_in(tmp_path / "run") as store:
        store.set_meta("config", {"advantage": how})
        store.add_rollout("lost", task="t", group="g")
        store.finish_rollout("lost", error="RolloutLost: gone")
        for run in runs:
            store.add_rollout(run.rollout_id, task="t", group="g")
            for it in run.calls:
                store.record(run.rollout_id, it)
            store.finish_rollout(run.rollout_id)
        store.add_scores([it.rollout_id for it in runs], rewards, advantages=trained.advantages)
    for run, expected in zip(runs, trained.call_advantages, strict=True):
        told = await asked(tmp_path / "run", f"/api/runs/run/trajectories/{run.rollout_id}")
        assert [it["advantage"] for it in told["call_list"]] == pytest.approx(expected)
        tokens = await asked(tmp_path / "run", f"/api/runs/run/trajectories/{run.rollout_id}/calls/1/tokens")
        assert tokens["advantage"] == pytest.approx(expected[1])


async def test_tokens_are_told_as_texts_that_join_to_what_was_said(tmp_path):
    said = "Grüße 🎉 <|im_end|> ok"
    prompt, sampled = encoded("Find the cost."), encoded(said)
    with store_in(tmp_path / "run") as store:
        store.set_meta("model", "tiny")
        store.add_rollout("r", task="t", group="g")
        store.record("r", call(prompt, sampled, forced=(1,)))
    path = "/api/runs/run/trajectories/r/calls/0/tokens"
    found = await asked(tmp_path / "run", path, prompt=3)
    assert "".join(it["text"] for it in found["sampled"]) == said
    assert [it["id"] for it in found["sampled"]] == list(sampled)
    assert [it["forced"] for it in found["sampled"]][:3] == [False, True, False]
    assert found["sampled"][2]["logprob"] == pytest.approx(-0.2)
    assert [it["id"] for it in found["prompt"]] == list(prompt[-3:]) and found["prompt_total"] == len(prompt)
    halves = [await asked(tmp_path / "run", path, limit=11, offset=at) for at in (0, 11)]
    assert "".join(it["text"] for half in halves for it in half["sampled"]) == said


async def test_without_a_tokenizer_the_ids_are_told(tmp_path):
    with store_in(tmp_path / "run") as store:
        store.set_meta("model", "nobody/has-this-model")
        store.add_rollout("r", task="t")
        store.record("r", call((1, 2), (3, 4)))
    found = await asked(tmp_path / "run", "/api/runs/run/trajectories/r/calls/0/tokens")
    assert [(it["id"], it["text"]) for it in found["sampled"]] == [(3, None), (4, None)] and not found["tokenizer"]


async def test_checkpoints_tell_their_files_with_sizes_and_sums(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    for step in (2, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06}"
        (folder / "adapter").mkdir(parents=True)
        (folder / "adapter" / "weights").write_bytes(b"x" * step)
        files = {"adapter/weights": "ab" * 32, "../../../report.json": "cd" * 32}
        (folder / "learner.json").write_text(json.dumps({"version": step, "base_model": "tiny", "files": files}))
    (tmp_path / "run" / "checkpoints" / ".step-000011.unfinished").mkdir()
    page = await asked(tmp_path / "run", "/api/runs/run/checkpoints")
    assert [(it["name"], it["version"]) for it in page["items"]] == [("step-000010", 10), ("step-000002", 2)]
    one = await asked(tmp_path / "run", "/api/runs/run/checkpoints/step-000002")
    assert one["files"][0] == {"name": "adapter/weights", "size": 2, "sha256": "ab" * 32}
    assert [it["name"] for it in one["files"]] == ["adapter/weights", "learner.json"]


NAMES = ["..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd", "step-000001%2f..", "%00", ".", "a" * 400, "%ff%fe", "~"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["{}", "{}/metrics", "first/trajectories/{}", "first/checkpoints/{}"])
async def test_a_name_never_leads_out_of_its_folder(recorded, name, path):
    async with client(recorded.parent) as http:
        response = await http.get(f"/api/runs/{path.format(name)}")
    # A client, or the router, takes "." and ".." for steps of the path: then another list may be the answer.
    assert response.status_code in (200, 404, 422), response.text
    assert "root:" not in response.text
    if response.status_code == 200:
        assert name in (".", "..", "%2e%2e") and response.json().keys() & {"items", "config"}


@pytest.mark.parametrize(
    "path",
    ["metrics?after=x", "metrics?limit=0", "groups?limit=9999", "groups?step=-1", "groups?step=99999999999999999999",
     "trajectories?offset=-1", "trajectories?order=sideways", "trajectories/r/calls/-1/tokens"],
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused(recorded, path):
    await asked(recorded, f"/api/runs/first/{path}", status=422)


async def test_what_is_not_there_is_said_to_be_missing(recorded):
    for path in (
        "other",
        "first/trajectories/x",
        "first/trajectories/s1-t2-1/calls/9/tokens",
        "first/checkpoints/step-9",
    ):
        assert "no " in (await asked(recorded, f"/api/runs/{path}", status=404))["detail"]


async def test_strange_values_are_told_as_far_as_json_can_say_them(tmp_path):
    deep = current = []
    for _ in range(300):
        current.append([])
        current = current[0]
    with store_in(tmp_path / "run") as store:
        store.set_meta("config", {"nan": float("nan"), "group_size": "eight"})
        store.set_meta("evaluations", [None, 3, {"name": "before", "success": float("inf")}])
        store.add_step(1, {"reward": float("nan"), "loss": float("inf")})
        store.add_rollout("r", task={"half": "\ud83c", "deep": deep, "big": 2**70}, split="s", group="g")
        store.record(
            "r", call((1,), (2,), answer="\ud83c <script>alert(1)</script>", messages=[{"content": None}, "x"])
        )
        store.finish_rollout("r", output=float("-inf"), error="\udfff broken")
        store.add_scores(["r"], [None], metrics=[{"success": float("nan")}], notes=[{"why": "\ud83c"}])
    step = (await asked(tmp_path / "run", "/api/runs/run/metrics"))["items"][0]
    assert step["metrics"] == {"reward": None, "loss": None}
    it = await asked(tmp_path / "run", "/api/runs/run/trajectories/r")
    assert it["task"]["half"] == "?" and it["output"] is None and it["task"]["big"] == str(2**70)
    for path in ("", "/groups", "/trajectories", "/tasks", "/trajectories/r/calls/0/tokens", "/checkpoints"):
        await asked(tmp_path / "run", f"/api/runs/run{path}")


async def test_a_store_that_cannot_be_read_says_why_and_leaves_the_others(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.sqlite").write_text("not a database, at all" * 50)
    bad, good = (await asked(tmp_path, "/api/runs"))["items"]
    assert "damaged" in bad["problem"] and good["problem"] is None
    for path in ("", "/metrics", "/groups", "/trajectories", "/trajectories/r", "/tasks"):
        assert "damaged" in (await asked(tmp_path, f"/api/runs/bad{path}", status=409))["detail"]


async def test_a_run_that_is_being_written_is_told_as_it_is_now(tmp_path):
    """Two stores on one file, as in a run that trains while it is viewed."""
    folder = OneFolder(tmp_path / "run")
    await asked(folder, "/api/runs/run", status=409)
    with store_in(tmp_path / "run") as store:
        store.set_meta("config", {"steps": 5, "tasks_per_step": 1, "group_size": 4})
        store.set_meta("planned_steps", 5)
        store.add_rollout("r1", task="t", step=1, split="train", group="g")
        store.add_rollout("r2", task="t", step=1, split="train", group="g")
        store.finish_rollout("r1")
        store.flush()
        run = await asked(folder, "/api/runs/run")
        assert run["open"] and run["progress"] == {"step": 1, "begun": 2, "finished": 1, "expected": 4}
        for step in range(1, 4):
            store.add_step(step, {"reward": float(step)})
            store.flush()
            steps = await asked(folder, "/api/runs/run/metrics", after=step - 1)
            assert [it["metrics"]["reward"] for it in steps["items"]] == [float(step)]
        assert (await asked(folder, "/api/runs/run"))["progress"] is None


async def test_reading_everything_leaves_the_folder_as_it_was(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")}
    rollout = "/trajectories/s1-t2-1"
    for path in ("", "/metrics", "/groups", "/trajectories", rollout, f"{rollout}/calls/0/tokens", "/tasks"):
        await asked(tmp_path / "run", f"/api/runs/run{path}")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")} == before


async def seconds_to_tell(folder, place):
    """The least of three."""
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        await asked(folder, f"/api/runs/run{place}")
        took.append(time.perf_counter() - begun)
    return min(took)


@pytest.mark.long
async def test_fifty_thousand_rollouts_are_told_about_as_quickly_as_a_few_thousand(tmp_path):
    few, many = 50, 1000
    small, large = (
        record(tmp_path / f"{steps}" / "run", steps=steps, tasks=10, group_size=5, calls=3) for steps in (few, many)
    )
    for place in (
        "",
        "/metrics",
        "/groups",
        "/groups?step={half}",
        "/tasks",
        "/trajectories",
        "/trajectories?offset={late}",
    ):
        brief = await seconds_to_tell(small, place.format(half=few // 2, late=45 * few))
        long = await seconds_to_tell(large, place.format(half=many // 2, late=45 * many))
        print(f"{place or 'the run'}: {brief:.4f} s, and {long:.4f} s with {many // few} times the rollouts")
        assert long < 5 * brief, place
