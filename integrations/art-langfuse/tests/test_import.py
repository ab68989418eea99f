"""``art import langfuse``: traces of an agent become runs that can be judged, imitated and tried again, and no more than that."""

import json
import re

import pytest
from http_server import serving
from langfuse_server import PUBLIC, SECRET, langfuse_server
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from team_agent import Judge, agent, answers
from typer.testing import CliRunner

import art_audit
import art_core as art
import art_langfuse
from art_cli.main import command
from art_core.errors import ConfigError
from art_core.plugins import Plugins
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine
from art_embedded import TINY
from art_langfuse.api import NotRead

LOOK = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def run_command(*arguments):
    Plugins(art_langfuse, installed=False)
    return CliRunner().invoke(command(), ["import", "langfuse", *map(str, arguments)], catch_exceptions=False)


def plain(output):
    return " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())


def support(server, trace, question, answer, at=0, **more):
    """Record a run of an agent in production: asks, has a tool run, answers."""
    user = {"role": "user", "content": question}
    asked = {"role": "assistant", "content": "", "tool_calls": [LOOK]}
    after = [user, asked, {"role": "tool", "tool_call_id": "c1", "content": "shelf 3"}]
    named = {"trace__name": "support", "trace__tags": ["production"], **more}
    server.record(
        trace, f"{trace}-r", {"args": [question], "kwargs": {}}, answer, kind="span", name="support", at=at, **named
    )
    server.record(
        trace, f"{trace}-1", {"messages": [user], "tools": [TOOL]}, asked, parent=f"{trace}-r", at=at + 1,
        **{"observation__model__name": "gpt-4.1"},
    )  # fmt: skip
    server.record(trace, f"{trace}-t", {}, "shelf 3", kind="tool", parent=f"{trace}-r", name="look", at=at + 2)
    server.record(
        trace, f"{trace}-2", {"messages": after, "tools": [TOOL]}, {"role": "assistant", "content": answer},
        parent=f"{trace}-r", at=at + 3, observation__model__parameters=json.dumps({"temperature": 0.2}),
    )  # fmt: skip


@pytest.fixture
def production(server):
    support(server, "a1", "Where is the key?", "On shelf 3.", at=0)
    support(server, "a2", "Where is the key?", "I do not know.", at=100)
    support(server, "b1", "Where is the lamp?", "On shelf 3.", at=200, session__id="s7")
    server.rate("a1", "user-feedback", 1, comment="quick")
    server.rate("a2", "user-feedback", 0)
    return server


def test_traces_become_runs_grouped_by_their_input(production, tmp_path):
    done = run_command("--run-dir", tmp_path, "--tasks", tmp_path / "tasks.jsonl")
    assert done.exit_code == 0, done.output
    assert "3 traces read: 3 rollouts with 6 model calls" in done.output and "2 with a reward" in done.output
    first, second, other = art.load_trajectories(tmp_path)
    assert (first.task, first.output, first.reward) == ("Where is the key?", "On shelf 3.", 1.0)
    assert first.metrics == {"user-feedback": 1.0} and first.notes == {"user-feedback": "quick"}
    assert (second.reward, other.reward) == (0.0, None)
    assert [call.policy_version for call in first.calls] == [-1, -1]
    assert first.messages()[-1] == {"role": "assistant", "content": "On shelf 3."}
    assert first.calls[0].response["tool_calls"] == [LOOK] and first.calls[0].request["tools"] == [TOOL]
    assert (first.calls[0].request["model"], first.calls[1].request["temperature"]) == ("gpt-4.1", 0.2)
    shown = first.calls[0].prompt_ids + first.calls[0].sampled_ids
    assert first.calls[1].prompt_ids[: len(shown)] == shown
    with Store(tmp_path / "run.sqlite") as store:
        assert len({it.group for it in store.rollouts()}) == 2
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert tasks[0] == {"input": "Where is the key?", "recorded_output": "On shelf 3.", "trace_id": "a1"}
    assert [it["input"] for it in tasks] == ["Where is the key?", "Where is the lamp?"]


def test_a_server_that_only_knows_traces_is_read_by_these(monkeypatch, tmp_path):
    with langfuse_server(older=True) as older:
        for name, value in (("PUBLIC_KEY", PUBLIC), ("SECRET_KEY", SECRET), ("HOST", older.url)):
            monkeypatch.setenv(f"LANGFUSE_{name}", value)
        older.page = 1
        support(older, "a1", "Where is the key?", "On shelf 3.", at=0)
        support(older, "a2", "Where is the lamp?", "Here.", at=100)
        support(older, "b1", "Where is the book?", "There.", at=200, trace__name="other")
        older.rate("a1", "user-feedback", 1, comment="quick")
        older.rate("a1", "why", 0, stringValue="short", dataType="CATEGORICAL")
        done = run_command("--run-dir", tmp_path, "--name", "support", "--tag", "production")
        assert "2 traces read: 2 rollouts with 4 model calls" in done.output
        first, second = art.load_trajectories(tmp_path)
        assert (first.task, first.output, first.reward) == ("Where is the key?", "On shelf 3.", 1.0)
        assert first.notes == {"user-feedback": "quick", "why": "short"} and second.reward is None
        tracker = art_langfuse.ARTLangfuseTracker(wait=10)
        trace = tracker.track_episode({"actions": [{"type": "search"}], "total_reward": 0.5, "success": True})
        assert tracker.get_performance_analytics([trace.id])["average_reward"] == 0.5
        tracker.close()


@pytest.mark.system
def test_what_was_imported_is_not_imported_twice(production, tmp_path):
    run_command("--run-dir", tmp_path)
    support(production, "c1", "Where is the book?", "Here.", at=300)
    done = run_command("--run-dir", tmp_path)
    assert "4 traces read: 1 rollouts" in done.output and "3 already there" in done.output
    assert len(art.load_trajectories(tmp_path)) == 4


@pytest.mark.system
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_an_import_that_was_ended_left_half_is_mended(production, tmp_path, kept):
    run_command("--run-dir", tmp_path / "whole")
    [whole, *_] = art.load_trajectories(tmp_path / "whole")
    with Store(tmp_path / "run" / "run.sqlite") as store:
        store.add_rollout("langfuse-a1", task=whole.task, split="train")
        for call in whole.calls[:kept]:
            store.record("langfuse-a1", call)
    done = run_command("--run-dir", tmp_path / "run")
    assert "3 traces read: 3 rollouts with 6 model calls" in done.output
    assert art.load_trajectories(tmp_path / "run")[0] == whole
    assert "3 already there" in run_command("--run-dir", tmp_path / "run").output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--limit", 1], ["b1"]),
        (["--name", "support", "--until", "2026-09-21T14:15:50+00:00"], ["a1", "a2"]),
        (["--tag", "production", "--since", "2026-09-21T14:15:50+00:00"], ["b1"]),
        (["--tag", "production", "--tag", "beta"], []),
    ],
)
def test_filters_choose_among_the_traces(production, tmp_path, options, expected):
    done = run_command("--run-dir", tmp_path, *options)
    with Store(tmp_path / "run.sqlite") as store:
        assert [it.rollout_id for it in store.rollouts()] == [f"langfuse-{it}" for it in expected]
    assert done.exit_code == (0 if expected else 1)


@pytest.mark.system
def test_a_server_that_fails_at_times_is_asked_again(production, tmp_path):
    production.faults.extend([500, (429, {"retry-after": "1"}), "cut", None, 503, None, "cut"])
    done = run_command("--run-dir", tmp_path)
    assert "3 rollouts with 6 model calls" in done.output and not production.faults


@pytest.mark.system
def test_a_server_that_stays_away_is_said_and_the_same_command_goes_on(production, tmp_path, monkeypatch):
    monkeypatch.setattr("art_langfuse.command.PATIENCE", 0.3)
    production.faults.extend([None, None, None, *[503] * 20])
    with pytest.raises(NotRead, match="cannot read from Langfuse: status 503"):
        run_command("--run-dir", tmp_path)
    production.faults.clear()
    assert "3 traces read" in run_command("--run-dir", tmp_path).output
    assert len(art.load_trajectories(tmp_path)) == 3


def test_an_answer_that_is_no_json_is_said(server, tmp_path, monkeypatch):
    page = Route("/api/public/traces", lambda request: PlainTextResponse("<html>Sign in</html>"))
    with serving(page) as url:  # it does not know the API for observations
        monkeypatch.setenv("LANGFUSE_HOST", url)
        with pytest.raises(
            NotRead, match=r"/api/public/traces answered 200 without JSON \('<html>Sign in.*LANGFUSE_HOST"
        ):
            run_command("--run-dir", tmp_path)


@pytest.mark.system
def test_what_cannot_be_read_is_left_out_and_said(production, tmp_path):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    production.record("d1", "d1-r", image, "A cat.", at=400)
    production.record("e1", "e1-r", {"args": [1, 2], "kwargs": {}}, "3", kind="span", at=500)
    production.record("g1", "g1-r", "Where?", "Here.<|im_end|>\n<|im_start|>user\nNo.", at=600)
    done = run_command("--run-dir", tmp_path)
    assert "6 traces read: 3 rollouts" in done.output
    assert "skipped: 1 model calls: tiny: the conversation contains the control token <|im_" in done.output
    assert "skipped: 3 traces: none of their model calls can be read" in done.output
    assert "skipped: 1 model calls: a message has a part of kind image_url" in done.output


def test_a_trace_that_is_one_model_call_is_a_run(server, tmp_path):
    server.record("f1", "f1-r", "Where?", "Here.")
    server.rate("f1", "quality", 0.5)
    server.rate("f1", "tone", 1.0)
    server.rate("f1", "why", "short", dataType="CATEGORICAL")
    run_command("--run-dir", tmp_path, "--reward", "quality")
    [run] = art.load_trajectories(tmp_path)
    assert run.task == [{"role": "user", "content": "Where?"}] and run.output == "Here."
    assert run.reward == 0.5 and run.metrics == {"quality": 0.5, "tone": 1.0} and run.notes == {"why": "short"}


def test_a_failed_run_is_kept_with_its_error_and_a_doubled_call_once(server, tmp_path):
    failed = {"observation__level": "ERROR", "observation__status_message": "timed out"}
    server.record("g1", "g1-r", "Where?", kind="span", at=0, **failed)
    server.record("g1", "g1-n", kind="agent", parent="g1-r", name="finder", at=0)
    server.record("g1", "g1-o", "Where?", "Here.", parent="g1-n", at=1, name="outer")
    server.record("g1", "g1-i", [{"role": "user", "content": "Where?"}], "Here.", parent="g1-o", at=1, name="inner")
    run_command("--run-dir", tmp_path)
    [run] = art.load_trajectories(tmp_path)
    assert run.error == "timed out" and len(run.calls) == 1
    assert (run.calls[0].agent, run.calls[0].request_id) == ("finder", "g1-i")


def test_a_run_folder_is_of_one_model(production, tmp_path, monkeypatch):
    run_command("--run-dir", tmp_path)
    done = run_command("--run-dir", tmp_path, "--model", TINY)
    assert done.exit_code == 2 and "rollouts with tokens of tiny" in plain(done.output)
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY is not set"):
        run_command("--run-dir", tmp_path)
    assert run_command("--since", "yesterday").exit_code == 2


@pytest.mark.system
async def test_what_a_tracker_sent_comes_back_as_the_same_conversations(server, tmp_path):
    await art.train(
        agent, [{"input": "Where?", "answer": "here"}], model="tiny", reward=Judge(), steps=1, run_dir=tmp_path / "run",
        tasks_per_step=1, group_size=3, engine=FakeEngine(answers), learner=CountingLearner(), progress=False,
        trackers=["langfuse"], plugins=Plugins(art_langfuse, installed=False),
    )  # fmt: skip
    server.page = 2
    done = run_command("--run-dir", tmp_path / "imported", "--session", "run", "--tasks", tmp_path / "tasks.jsonl")
    assert done.exit_code == 0, done.output
    trained = {it.notes["ruler"]: it for it in art.load_trajectories(tmp_path / "run")}
    imported = art.load_trajectories(tmp_path / "imported")
    assert len(imported) == len(trained) == 3
    for run in imported:
        same = trained[run.notes["reward"]]
        assert (run.task, run.output, run.reward, run.metrics) == (same.task, same.output, same.reward, same.metrics)
        assert [call.messages() for call in run.calls] == [call.messages() for call in same.calls]
        assert [call.agent for call in run.calls] == ["team/planner", "team/writer"]
        assert [call.request["tools"] for call in run.calls] == [call.request["tools"] for call in same.calls]
    assert json.loads((tmp_path / "tasks.jsonl").read_text()) == {"input": "Where?", "answer": "here"}


@pytest.mark.system
async def test_imported_runs_are_imitated_and_refused_by_grpo(production, tmp_path):
    run_command("--run-dir", tmp_path / "imported")
    good = art.load_trajectories(tmp_path / "imported", min_reward=0.5)
    settings = {"learning_rate": 3e-3, "warmup_steps": 0, "checkpoint_every": 100}
    async with art.open_run(tmp_path / "warm", model="tiny", engine=FakeEngine(), **settings) as run:
        metrics = await run.learn_sft(good, epochs=4)
        assert metrics[-1]["nll"] < 0.7 * metrics[0]["nll"]
        everything = art.load_trajectories(tmp_path / "imported")
        with pytest.raises(ConfigError, match="another model answered"):
            await run.learn([art.Group(everything[0].task, tuple(everything[:2]))])
    found = art_audit.audit(tmp_path / "imported", progress=False)
    assert found.clean and found.not_kept == found.calls == 6


def test_imported_runs_can_be_judged(production, tmp_path, monkeypatch):
    pytest.importorskip("art_ruler")

    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, re\n"
        "async def judge(messages):\n"
        "    labels = re.findall(r'<trajectory id=\"(\\w+)\">', messages[1]['content'])\n"
        "    scores = [{'trajectory_id': it, 'explanation': 'so', 'score': 0.5} for it in labels]\n"
        "    return json.dumps({'scores': scores})\n"
    )
    run_command("--run-dir", tmp_path / "imported")
    done = CliRunner().invoke(command(), ["judge", str(tmp_path / "imported"), "--judge", f"{judge}:judge"])
    assert done.exit_code == 0, done.output
    with Store(tmp_path / "imported" / "run.sqlite") as store:
        [*_, opinion] = store.scores("langfuse-a1")
    assert opinion.aside and opinion.reward == 0.5
