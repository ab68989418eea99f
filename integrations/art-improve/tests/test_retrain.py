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
from art_improve.history import History

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
SMALL = {"tasks_per_step": 2, "group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, "warmup_steps": 0}
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
    assert (
        first.rollouts == 4
        and first.before["n"] == 2 == first.after["n"]
        and first.measure == "reward"
        and first.difference > 0
    )
    assert (folder / "current").resolve() == (folder / "round-001").resolve()
    held_out = {"Where is the river?", "Where is the bridge?"}
    assert inputs(folder / "round-001", "eval") == held_out
    assert await retrain(ScriptedAgent(), traffic(1), reward=rising, **{**call, "say": said.append}) is None
    assert said[-1] == "0 new tasks to train on, fewer than 4: nothing to do yet"

    second = await retrain(ScriptedAgent(), traffic(2), reward=rising, **call)
    assert (second.start, second.new, second.older, second.held_out) == (str(folder / "round-001"), 5, 4, 3)
    assert not inputs(folder / "round-002", "train") & (held_out | {"Where is the button?"})
    tasks = {json.loads(line)["input"] for line in (folder / "round-002" / "tasks.jsonl").read_text().splitlines()}
    assert tasks == {f"Where is the {word}?" for word in WORDS} - held_out - {"Where is the button?"}
    with Store(folder / "round-002" / "run.sqlite") as store:
        start = store.meta("model")
    assert start == str(folder / "round-001" / "checkpoints" / "step-000001")
    assert (folder / "current").resolve() == (folder / "round-002").resolve()


@pytest.mark.system
async def test_weights_that_fail_the_gate_do_not_count(traffic, tmp_path):
    folder = tmp_path / "rounds"
    call = {**CALL, "run_dir": folder, "reward": rising}
    rejected = await retrain(ScriptedAgent(), traffic(1), **{**call, "gate": "failed >= 1"})
    assert rejected.state == "rejected" and rejected.why == "fails: failed >= 1"
    assert not (folder / "current").exists()
    lower = await retrain(
        ScriptedAgent(), traffic(1), **{**call, "run_dir": tmp_path / "other", "gate": "reward >= 1000000"}
    )
    assert (lower.state, lower.why) == ("rejected", "not met: reward >= 1000000")
    unsure = await retrain(ScriptedAgent(), traffic(2), **{**call, "gate": "failed <= 0.5", "strict": True})
    assert (unsure.state, unsure.why, unsure.start) == ("rejected", "met, not shown: failed <= 0.5", "tiny")


@pytest.mark.system
async def test_a_round_that_was_interrupted_continues_with_its_tasks(traffic, tmp_path):
    folder, begun = tmp_path / "rounds", asyncio.Event()

    def reward(trajectory):
        begun.set()
        return rising(trajectory)

    call = {**CALL, "run_dir": folder, "reward": reward, "steps": 3}
    task = asyncio.ensure_future(retrain(ScriptedAgent(), traffic(1), **call))
    await begun.wait()
    with pytest.raises(ConfigError, match="another art retrain is at work"):
        await retrain(ScriptedAgent(), traffic(1), **call)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rounds(folder) == ["training"]
    round_ = await retrain(ScriptedAgent(), traffic(2), **call)
    assert (round_.name, round_.new, round_.state) == ("round-001", 5, "accepted") and round_.rollouts == 12


@pytest.mark.system
async def test_an_adapter_is_merged_before_the_next_round_trains(traffic, tmp_path):
    folder = tmp_path / "rounds"
    call = {**CALL, "run_dir": folder, "reward": rising, "lora_rank": 4}
    await retrain(ScriptedAgent(), traffic(1), **call)
    second = await retrain(ScriptedAgent(), traffic(2), **call)
    with Store(folder / "round-002" / "run.sqlite") as store:
        assert store.meta("model") == str(folder / "round-002" / "start" / "merged")
    assert second.start == str(folder / "round-001")


@pytest.mark.system
async def test_what_production_rolled_back_does_not_count_any_more(traffic, tmp_path):
    folder, production = tmp_path / "rounds", tmp_path / "production"
    call = {**CALL, "run_dir": folder, "reward": rising}
    for weeks in (1, 2):
        await retrain(ScriptedAgent(), traffic(weeks), **call)
    newest = (folder / "round-002" / "checkpoints" / "step-000001").resolve()
    with Store(production / "run.sqlite") as store:
        for share, why in ((0.1, "it is new"), (0.0, "its scores are lower")):
            change = {"candidate": f"mine the embedded engine with {newest}", "share": share, "why": why}
            store.set_meta("routes", [*store.meta("routes", []), change])
    said = []
    assert await retrain(ScriptedAgent(), production, **{**call, "say": said.append}) is None
    assert said[0] == "round-002 was rolled back in production: its scores are lower"
    assert rounds(folder) == ["accepted", "rolled back"]
    assert (folder / "current").resolve() == (folder / "round-001").resolve()


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
    assert "rounds/current leads to round-001; a gateway with --upstream mine=rounds/current" in ended.stdout
    assert "met, not shown: reward >= current" in ended.stdout and "next: art view rounds" in ended.stdout
    traffic(2)
    ended = CliRunner().invoke(command(), [*given.split(), *settings, "--gate", "failed >= 1"])
    assert ended.exit_code == 1, ended.output
    assert "  rejected\n" in ended.stdout and "fails: failed >= 1" in ended.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gate": "cost <= current"}, "sampled_tokens"),
        ({"gate": "success >= live"}, "The sides are current, new"),
        ({"model": "no-such-folder"}, "no-such-folder"),
        ({"learnin_rate": 1}, "did you mean 'learning_rate'"),
        ({"eval_tasks": ["a"]}, "decides eval_tasks itself"),
        ({"share": 0}, "no task is held out"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_trained(changed, said, traffic, tmp_path):
    call = {**CALL, "run_dir": tmp_path / "rounds", "reward": rising, **changed}
    with pytest.raises(ConfigError, match=said):
        await retrain(ScriptedAgent(), traffic(1), **call)
    assert not Path(tmp_path / "rounds" / "rounds.json").exists()


async def test_rounds_need_a_folder_of_their_own(traffic, tmp_path):
    Store(tmp_path / "run.sqlite").close()
    with pytest.raises(ConfigError, match="rounds need one of their own"):
        await retrain(ScriptedAgent(), traffic(1), **CALL, run_dir=tmp_path, reward=rising)
