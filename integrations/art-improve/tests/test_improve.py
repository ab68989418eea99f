"""One budget for three levers, on the unchanged mailbox agent with a system prompt that says nothing of its task."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import art_audit
import art_core as art
from art_cli.main import command
from art_core.errors import ConfigError
from art_improve import improve
from examples.email_search import agent as mailbox
from examples.email_search.reward import reward
from examples.email_search.tasks import SYSTEM_PROMPT, held_out_tasks, training_tasks

SMALL = {"tasks_per_step": 4, "group_size": 2, "learning_rate": 1e-3, "max_tokens": 64}
PARTS = ("held-out-0", "forecast-teacher", "forecast-weights", "prompts", "held-out-1")
REST = ("teacher 1", "held-out-2", "weights", "held-out-3")


@pytest.fixture
def plain(monkeypatch):
    """The agent with its own prompt."""
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    return mailbox.build_agent()


@pytest.fixture
def poet(monkeypatch):
    """The agent with a useless prompt."""
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setattr(mailbox, "SYSTEM_PROMPT", "You are a poet. " * 30)
    return mailbox.build_agent()


def knows(prompt):
    old = prompt.split("```")[1].strip()
    return f"```\n{SYSTEM_PROMPT if 'poet' in old else old}\n```"


def journal(run_dir):
    return json.loads((Path(run_dir) / "improve.json").read_text())["parts"]


@pytest.mark.system
async def test_an_interrupted_call_continues_and_each_lever_is_measured_within_the_budget(poet, tmp_path):
    said = []
    call = {
        "tasks": training_tasks(8), "model": "tiny", "reward": reward, "held_out": held_out_tasks(4), "rollouts": 92,
        "reflector": knows, "teacher": "tiny", "run_dir": tmp_path / "run", "progress": False, **SMALL,
    }  # fmt: skip

    def interrupt(text):
        said.append(text)
        if text.startswith("forecast with the new prompts"):
            task.cancel()

    task = asyncio.ensure_future(improve(poet, say=interrupt, **call))
    with pytest.raises(asyncio.CancelledError):
        await task
    said = [text.partition(":")[0] for text in said]
    assert said == ["held out", "forecast", "held out, after prompts", "forecast with the new prompts"]
    before = journal(tmp_path / "run")
    assert tuple(before) == PARTS

    result = await improve(poet, say=said.append, **call)
    after = journal(tmp_path / "run")
    assert {name: after[name] for name in before} == before and tuple(after) == PARTS + REST
    assert [it.lever for it in result.contributions] == ["prompts", "teacher", "weights"]
    assert result.before == after["held-out-0"]["report"] and result.after == after["held-out-3"]["report"]
    assert 85 <= result.rollouts <= 92 and result.stopped is None
    assert result.rollouts == sum(part.get("rollouts", 0) for part in after.values())
    trained = art.load_trajectories(result.weights, split="train")
    assert len(trained) == after["teacher 1"]["rollouts"] + after["weights"]["rollouts"]
    assert {it.request["messages"][0]["content"].strip() for t in trained for it in t.calls} == {SYSTEM_PROMPT}
    assert result.prompts.exists() and art_audit.audit(result.weights).clean
    for name, other in (
        ("rollouts", 300),
        ("reward", lambda trajectory: 1.0),
        ("teacher", None),
        ("tasks", ["a", "b"]),
    ):
        with pytest.raises(ConfigError, match=rf"was begun with different arguments \({name}\)"):
            await improve(poet, say=said.append, **{**call, name: other})


@pytest.mark.system
async def test_the_contributions_add_up_and_are_paired_by_tasks(plain, tmp_path):
    calls = []

    def counting(trajectory):
        calls.append(trajectory)
        return float(len(calls) > 4 + 16 + 8)  # the evaluation and the forecast fail, and everything later succeeds

    result = await improve(
        plain, training_tasks(8), model="tiny", reward=counting, held_out=held_out_tasks(4), rollouts=72, teacher="tiny",
        run_dir=tmp_path / "run", progress=False, say=lambda _: None, max_flat_groups=None, **SMALL,
    )  # fmt: skip
    teacher, weights = result.contributions
    assert (teacher.difference.value, weights.difference.value) == (1.0, 0.0)
    low, high = teacher.difference.interval
    assert 0 < low < 1.0 == high


@pytest.mark.system
async def test_a_training_that_ended_early_is_continued_with_other_settings(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    call = {
        "tasks": training_tasks(8), "model": "tiny", "reward": lambda trajectory: 0.0, "held_out": held_out_tasks(2),
        "rollouts": 40, "run_dir": "~/run", "progress": False, "say": lambda _: None, **SMALL,
    }  # fmt: skip
    stopped = await improve(plain, **call, max_flat_groups=8)
    assert "groups" in str(stopped.stopped) and not stopped.contributions
    result = await improve(plain, **call, max_flat_groups=None)
    assert result.stopped is None and [it.rollouts for it in result.contributions] == [32]
    assert journal(tmp_path / "run")
    assert len(art.load_trajectories(result.weights, split="train")) == 32


@pytest.mark.system
def test_the_command_says_what_it_will_cost_and_then_what_grpo_alone_contributed(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    (tmp_path / "app.py").write_text(
        "from examples.email_search.agent import build_agent\nfrom examples.email_search.reward import reward\n"
        "from examples.email_search.tasks import held_out_tasks, training_tasks\n\n"
        "agent, tasks, held_out = build_agent(), training_tasks(8), held_out_tasks(4)\n"
    )
    monkeypatch.chdir(tmp_path)
    given = "improve app.py:agent app.py:tasks --held-out app.py:held_out --reward app.py:reward --rollouts 24 --run-dir run"
    arguments = [*given.split(), *(f"--set={name}={value}" for name, value in SMALL.items())]
    ended = CliRunner().invoke(command(), [*arguments, "--forecast"])
    assert ended.exit_code == 0, ended.output
    assert re.search(r"forecast: 24 rollouts and 8 of held-out tasks, in about \d", ended.stdout)
    assert list(journal("run")) == ["held-out-0", "forecast-weights"] and "--run-dir run" in ended.stdout
    ended = CliRunner().invoke(command(), arguments)
    assert ended.exit_code == 0, ended.output
    assert re.search(r"weights +│ [+-]\d+\.\d points", ended.stdout)
    assert re.search(r"held out: .* -> .* \(24 rollouts, ", ended.stdout)
    assert "next: art gateway --model run/weights\n" in ended.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollouts": 100}, r"rollouts=100 is too few for two steps of each lever; pass 288 or more"),
        ({"rollouts": 300, "reflector": knows}, r"rollouts=300 is too few .* pass 361 or more"),
        ({"tasks": ["a"], "reflector": knows}, "one task can't show which prompt is better"),
        ({"model": "live"}, "art optimize searches for better prompts alone"),
        ({"model": "no-such-folder"}, "no-such-folder"),
        ({"teacher": "no-such-folder"}, "no-such-folder"),
        ({"steps": 4}, "decides steps itself"),
        ({"dynamic_sampling": True}, "the budget could not be kept"),
        ({"engine": "http://127.0.0.1:1/v1"}, "engine must be a registered name"),
        ({"learnin_rate": 1}, "did you mean 'learning_rate'"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_spent(changed, said, tmp_path):
    call = {
        "tasks": ["a", "b", "c", "d"],
        "model": "tiny",
        "held_out": ["e"],
        "teacher": "tiny",
        "run_dir": tmp_path / "run",
    }
    with pytest.raises(ConfigError, match=said):
        await improve(lambda task: task, reward=reward, **{**call, **changed})
    assert not (tmp_path / "run").exists()
