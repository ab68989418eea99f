"""Rounds of training on traffic: what is trained on, which weights count, and what becomes of them in production."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import art_core as art
from art_cli.main import command
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import ScriptedAgent
from art_improve import retrain
from art_improve.history import History, Round

WORDS = [
    "river",
    "stone",
    "candle",
    "window",
    "garden",
    "bridge",
    "mirror",
    "ladder",
    "pocket",
    "basket",
    "hammer",
    "button",
]
SMALL = {"tasks_per_step": 8, "group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, "warmup_steps": 0}
CALL = {"model": "tiny", "steps": 1, "at_least": 4, "progress": False, "say": lambda _: None, **SMALL}


NUMBERS = itertools.count(2)


def rising(trajectory):
    """A reward that differs within every group, and is higher later."""
    return float(next(NUMBERS))


def write(file, *questions):
    """Traffic: one conversation for each question."""
    rows = [{"input": it, "conversation": it, "time": f"2026-11-{day:02}"} for day, it in enumerate(questions, 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def traffic(tmp_path):
    """``traffic(1)``: what was asked until week 1: six questions a week, of words of its own."""

    def traffic(weeks):
        return write(tmp_path / "traffic.jsonl", *(f"Where is the {word}?" for word in WORDS[: 6 * weeks]))

    return traffic


def inputs(run, split, step=None):
    return {t.task["input"] for t in art.load_trajectories(run, split=split)}


def rounds(folder):
    return [it.state for it in History(folder).rounds]


@pytest.mark.system
async def test_each_round_trains_on_what_is_new_from_the_weights_that_were_accepted_last(traffic, tmp_path):
    folder, said = tmp_path / "rounds", []
    call = {**CALL, "run_dir": folder, "held_out": [{"input": "Where is the river?"}]}
    first = await retrain(ScriptedAgent(), traffic(1), reward=rising, **call)
    assert (first.state, first.new, first.older, first.held_out, first.held_out_new) == ("accepted", 4, 0, 2, 1)
    assert first.rollouts == 16 and first.before["n"] == 2 == first.after["n"]
    assert first.measure == "reward" and first.difference > 0
    assert (folder / "current").resolve() == (folder / "round-001").resolve()
    held_out = {"Where is the river?", "Where is the bridge?"}
    assert inputs(folder / "round-001", "eval") == held_out
    assert await retrain(ScriptedAgent(), traffic(1), reward=rising, **{**call, "say": said.append}) is None
    assert said[-1] == "0 new tasks to train on, fewer than 4: nothing to do yet"

    # What was held out stays so, also if it is passed as a training task now, and isn't passed as held out any more.
    passed = [{"input": "where is the BRIDGE"}, {"input": "Where is the river?"}]
    second = await retrain(ScriptedAgent(), traffic(2), reward=rising, **{**call, "held_out": (), "tasks": passed})
    assert (second.start, second.held_out) == (str((folder / "round-001").resolve()), 3)
    assert (second.new, second.older) == (4, 4), "no more than a step of 8 tasks reaches"
    tasks = {json.loads(line)["input"] for line in (folder / "round-002" / "tasks.jsonl").read_text().splitlines()}
    assert len(tasks) == 8 and tasks == inputs(folder / "round-002", "train")
    assert not tasks & (held_out | {"Where is the button?", "where is the BRIDGE"})
    with Store(folder / "round-002" / "run.sqlite") as store:
        start = store.meta("model")
    assert start == str(folder / "round-001" / "checkpoints" / "step-000001")
    assert (folder / "current").resolve() == (folder / "round-002").resolve()


@pytest.mark.system
async def test_weights_that_do_not_meet_the_gate_do_not_count_and_their_tasks_stay_new(traffic, tmp_path):
    folder = tmp_path / "rounds"
    call = {**CALL, "run_dir": folder, "reward": rising}
    rejected = await retrain(ScriptedAgent(), traffic(1), **{**call, "gate": "failed >= 1"})
    assert (rejected.state, rejected.why, rejected.new) == ("rejected", "fails: failed >= 1", 5)
    assert not (folder / "current").exists()
    lower = await retrain(ScriptedAgent(), traffic(1), **{**call, "gate": "reward >= 1000000"})
    assert (lower.state, lower.why, lower.new) == ("rejected", "not met: reward >= 1000000", 5)
    unsure = await retrain(ScriptedAgent(), traffic(1), **{**call, "gate": "failed <= 0.5", "strict": True})
    assert (unsure.state, unsure.why, unsure.start) == ("rejected", "met, not shown: failed <= 0.5", "tiny")
    assert [each.name for each in History(folder).rounds] == ["round-001", "round-002", "round-003"]


async def interrupted(traffic, folder, reward, **call):
    """Begin a round, and cancel it once something is scored."""
    begun = asyncio.Event()

    def first(trajectory):
        begun.set()
        return reward(trajectory)

    task = asyncio.ensure_future(
        retrain(ScriptedAgent(), traffic, **{**CALL, "run_dir": folder, "reward": first, **call})
    )
    await begun.wait()
    with pytest.raises(ConfigError, match="another art retrain is at work"):
        await retrain(ScriptedAgent(), traffic, **{**CALL, "run_dir": folder, "reward": first})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rounds(folder) == ["training"]
    return {**CALL, "run_dir": folder, "reward": first, **call}


@pytest.mark.system
async def test_a_round_that_was_interrupted_continues_with_its_tasks(traffic, tmp_path):
    said = []
    call = await interrupted(traffic(1), tmp_path / "rounds", rising, steps=3)
    round_ = await retrain(ScriptedAgent(), traffic(2), **{**call, "say": said.append})
    assert said == ["continuing round-001 with its tasks, from tiny"]
    assert (round_.name, round_.new, round_.state, round_.rollouts) == ("round-001", 5, "accepted", 48)


@pytest.mark.system
async def test_an_interrupted_round_of_another_reward_can_be_given_up(traffic, tmp_path):
    folder = tmp_path / "rounds"
    call = await interrupted(traffic(1), folder, rising, steps=3)
    changed = {**call, "reward": rising}
    with pytest.raises(ConfigError, match=r"(?s)round-001 can't be trained: .* pass --restart"):
        await retrain(ScriptedAgent(), traffic(1), **changed)
    round_ = await retrain(ScriptedAgent(), traffic(1), **{**changed, "restart": True})
    assert (round_.name, round_.new, round_.state) == ("round-002", 5, "accepted")
    assert rounds(folder) == ["stopped", "accepted"]


class Away:
    """A judge that can't be reached for the first ``times``."""

    def __init__(self, times):
        self.times = times

    async def score(self, group):
        self.times -= 1
        return [None if self.times >= 0 else rising(trajectory) for trajectory in group.trajectories]


@pytest.mark.system
async def test_held_out_tasks_that_could_not_be_scored_decide_nothing(traffic, tmp_path):
    call = {**CALL, "run_dir": tmp_path / "rounds", "held_out": [{"input": f"Who has {n} stones?"} for n in range(9)]}
    round_ = await retrain(ScriptedAgent(), traffic(1), reward=Away(10), **call)
    assert (round_.state, round_.why) == ("stopped", "no held-out task was scored both before and after")
    assert round_.before["unscored"] == 10


@pytest.mark.system
async def test_tasks_that_were_trained_on_are_not_taken_as_held_out_later(traffic, tmp_path):
    said = []
    call = {**CALL, "run_dir": tmp_path / "rounds", "reward": rising, "say": said.append}
    await retrain(ScriptedAgent(), traffic(1), **call)
    late = [{"input": f"where is the {word}"} for word in WORDS[:2]] + [{"input": "Who was it?"}]
    second = await retrain(ScriptedAgent(), traffic(2), **call, held_out=late)
    assert "2 of the held-out tasks that were passed are left out: earlier rounds trained on them" in "\n".join(said)
    assert inputs(tmp_path / "rounds" / second.name, "eval") == {
        "Where is the bridge?",
        "Where is the button?",
        "Who was it?",
    }


@pytest.mark.system
async def test_an_adapter_is_merged_before_the_next_round_trains(traffic, tmp_path):
    folder = tmp_path / "rounds"
    call = {**CALL, "run_dir": folder, "reward": rising, "lora_rank": 4}
    await retrain(ScriptedAgent(), traffic(1), **call)
    second = await retrain(ScriptedAgent(), traffic(2), **call)
    with Store(folder / "round-002" / "run.sqlite") as store:
        assert store.meta("model") == str(folder / "round-002" / "start" / "merged")
    assert second.start == str(folder / "round-001")


def rolls_back(production, run, why="its scores are lower"):
    """Let the recording say that a gateway gave a run a share, and then took it away."""
    with Store(production / "run.sqlite") as store:
        for share, reason in ((0.1, "it is new"), (0.0, why)):
            change = {"candidate": f"mine the embedded engine with {run}/checkpoints/step-000001", "share": share}
            store.set_meta("routes", [*store.meta("routes", []), {**change, "why": reason}])


@pytest.mark.system
async def test_what_production_rolled_back_does_not_count_any_more(traffic, tmp_path):
    folder, production, said = tmp_path / "rounds", tmp_path / "production", []
    call = {**CALL, "run_dir": folder, "reward": rising}
    await retrain(ScriptedAgent(), traffic(1), **call)
    first = tmp_path / "first"
    (folder / "round-001").rename(first)
    (folder / "rounds.json").unlink()
    call |= {"model": str(first)}
    for _ in range(2):
        assert (await retrain(ScriptedAgent(), traffic(1), **{**call, "at_least": 1})).state == "accepted"
        (folder / "round-001" / "tasks.jsonl").write_text("")  # so that the second round has new tasks, too
    rolls_back(production, "elsewhere/round-002")
    assert await retrain(ScriptedAgent(), production, **{**call, "say": said.append}) is None
    assert said[:2] == [
        "round-002 was rolled back in production: its scores are lower",
        f"{folder}/current leads to {folder}/round-001",
    ]
    assert rounds(folder) == ["accepted", "rolled back"]
    assert (folder / "current").resolve() == (folder / "round-001").resolve()
    # A person took the share away, so the earlier round starts without one. It was not rolled back.
    with Store(production / "run.sqlite") as store:
        change = {
            "candidate": f"mine the embedded engine with {folder}/round-001/checkpoints/step-000001",
            "share": 0.0,
        }
        store.set_meta("routes", [*store.meta("routes", []), {**change, "why": "it is new, and a person set 0%"}])
    assert await retrain(ScriptedAgent(), production, **call) is None
    assert rounds(folder) == ["accepted", "rolled back"]
    rolls_back(production, folder / "round-001", "rolled back by hand")
    assert await retrain(ScriptedAgent(), production, **call) is None
    assert rounds(folder) == ["rolled back", "rolled back"]
    assert (folder / "current").resolve() == first.resolve(), "the run that the first round began with"


async def test_a_first_round_that_production_rolled_back_leaves_no_link(tmp_path):
    """The first round began with a model's name, so the link has no earlier run to go back to."""
    folder, production, said = tmp_path / "rounds", tmp_path / "production", []
    run = folder / "round-001"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    Store(run / "run.sqlite").close()
    with History.opened(folder) as history:
        history.put(Round("round-001", 0.0, "tiny", 4, 0, 1, 1, state="accepted"))
    assert (folder / "current").resolve() == run.resolve()
    rolls_back(production, run)
    call = {**CALL, "run_dir": folder, "reward": rising, "held_out": [{"input": "Who was it?"}], "say": said.append}
    assert await retrain(ScriptedAgent(), production, **call) is None
    assert said[:2] == [
        "round-001 was rolled back in production: its scores are lower",
        f"no accepted round is left, so {folder}/current is removed; start gateways without it until a round is accepted",
    ]
    assert not (folder / "current").is_symlink()
    (folder / "current").symlink_to("elsewhere")
    with History.opened(folder):
        assert (folder / "current").is_symlink(), "only a link to what was rolled back is removed"


@pytest.mark.system
async def test_a_round_that_began_with_weights_that_were_rolled_back_is_not_accepted(traffic, tmp_path):
    folder, production = tmp_path / "rounds", tmp_path / "production"
    call = {**CALL, "run_dir": folder, "reward": rising}
    await retrain(ScriptedAgent(), traffic(1), **call)
    (folder / "traffic.jsonl").write_text(traffic(2).read_text())
    rolled_back = []

    def reward(trajectory):
        if not rolled_back:
            rolled_back.append(rolls_back(traffic_store, folder / "round-001"))
        return rising(trajectory)

    traffic_store = production
    with Store(production / "run.sqlite") as store:
        for number, word in enumerate(WORDS[6:]):
            store.add_rollout(f"r{number}", task={"input": f"Where is the {word}?"}, split="live")
            store.finish_rollout(f"r{number}", output="there")
    round_ = await retrain(ScriptedAgent(), production, **{**call, "reward": reward})
    assert round_.state == "stopped" and round_.why.endswith("round-001, which it began with, was rolled back")
    assert rounds(folder) == ["rolled back", "stopped"]


@pytest.mark.system
def test_the_command_shows_all_rounds_and_its_exit_code_says_what_became_of_the_last(traffic, tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(
        "from art_core.testing import ScriptedAgent\n\nagent = ScriptedAgent()\n\n\n"
        "def reward(trajectory, seen=[]):\n    seen.append(trajectory)\n    return 1.0 + len(seen)\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    given = f"retrain app.py:agent {traffic(1).name} --reward app.py:reward --steps 1 --at-least 4 --run-dir rounds"
    ended = CliRunner().invoke(command(), [*given.split(), *settings])
    assert ended.exit_code == 0, ended.output
    assert "rounds/current leads to it; a gateway with --upstream mine=rounds/current" in ended.stdout
    assert "met, not shown: reward >= current" in ended.stdout and "next: art view rounds" in ended.stdout
    traffic(2)
    ended = CliRunner().invoke(command(), [*given.split(), *settings, "--gate", "failed >= 1"])
    assert ended.exit_code == 1, ended.output
    assert "  rejected\n" in ended.stdout and "fails: failed >= 1" in ended.stdout
    assert "rounds/current still leads to rounds/round-001" in ended.stdout
    assert "next: art compare rounds/round-002 --transcripts 3" in ended.stdout and "round-001  " not in ended.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gate": "cost <= current"}, "sampled_tokens"),
        ({"gate": "success >= live"}, "The sides are current, new"),
        ({"model": "no-such-folder"}, "no-such-folder"),
        ({"learnin_rate": 1}, "did you mean 'learning_rate'"),
        ({"eval_tasks": ["a"]}, "decides eval_tasks itself"),
        ({"share": 0}, "no task is held out"),
        ({"model": "begun"}, "the run .*begun has no checkpoint yet"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_trained(changed, said, traffic, tmp_path):
    call = {**CALL, "run_dir": tmp_path / "rounds", "reward": rising, **changed}
    if changed.get("model") == "begun":
        Store(tmp_path / "begun" / "run.sqlite").close()
        call["model"] = str(tmp_path / "begun")
    with pytest.raises(ConfigError, match=said):
        await retrain(ScriptedAgent(), traffic(1), **call)
    assert not Path(tmp_path / "rounds" / "rounds.json").exists()


async def test_rounds_need_a_folder_of_their_own(traffic, tmp_path):
    Store(tmp_path / "run.sqlite").close()
    with pytest.raises(ConfigError, match="rounds need one of their own"):
        await retrain(ScriptedAgent(), traffic(1), **CALL, run_dir=tmp_path, reward=rising)
