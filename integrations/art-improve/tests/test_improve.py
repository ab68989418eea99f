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

SMALL = {"tasks_per_step": 4, "group_size": 2, "learning_rate": 1e-3}
PARTS = ("held-out-0", "forecast-teacher", "forecast-weights", "prompts", "held-out-1", "tranche 1")


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
        "tasks": training_tasks(8),
        "model": "tiny",
        "reward": reward,
        "held_out": held_out_tasks(4),
        "rollouts": 90,
    }
    call |= {"reflector": knows, "teacher": "tiny", "run_dir": tmp_path / "run", "progress": False, **SMALL}

    def interrupt(text):
        said.append(text)
        if text.startswith("held out, after prompts"):
            task.cancel()

    task = asyncio.ensure_future(improve(poet, say=interrupt, **call))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [text.split(":")[0] for text in said[:2]] == ["held out", "forecast"] and len(said) == 4
    before = journal(tmp_path / "run")
    assert tuple(before) == PARTS[:-1]

    result = await improve(poet, say=said.append, **call)
    after = journal(tmp_path / "run")
    assert {name: after[name] for name in before} == before and tuple(after)[: len(PARTS)] == PARTS
    assert [it.lever for it in result.contributions][:2] == ["prompts", "teacher"]
    assert sum(it.value for it in result.contributions) == pytest.approx(result.after - result.before)
    assert 74 < result.rollouts <= 90 and result.stopped is None
    tranches = [part for name, part in after.items() if name.startswith("tranche")]
    assert result.rollouts == sum(part.get("rollouts", 0) for part in after.values())
    trained = art.load_trajectories(result.weights, split="train")
    assert len(trained) == sum(part["rollouts"] for part in tranches)
    prompts = {call.request["messages"][0]["content"] for t in trained for call in t.calls}
    assert {prompt.strip() for prompt in prompts} == {SYSTEM_PROMPT} and result.prompts.exists()
    assert art_audit.audit(result.weights).clean
    with pytest.raises(ConfigError, match="was begun with another rollouts; pass another run_dir"):
        await improve(poet, say=said.append, **{**call, "rollouts": 300})


@pytest.mark.system
def test_the_command_says_what_it_will_cost_and_then_what_grpo_alone_contributed(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    (tmp_path / "app.py").write_text(
        "from examples.email_search.agent import build_agent\nfrom examples.email_search.reward import reward\n"
        "from examples.email_search.tasks import held_out_tasks, training_tasks\n\n"
        "agent, tasks, held_out = build_agent(), training_tasks(8), held_out_tasks(4)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = [
        "improve",
        "app.py:agent",
        "app.py:tasks",
        "--held-out",
        "app.py:held_out",
        "--reward",
        "app.py:reward",
    ]
    arguments += ["--rollouts", "24", "--run-dir", "run", *(f"--set={name}={value}" for name, value in SMALL.items())]
    ended = CliRunner().invoke(command(), [*arguments, "--forecast"])
    assert ended.exit_code == 0, ended.output
    assert re.search(r"forecast: 24 rollouts and 8 of held-out tasks, in about \d+ s", ended.stdout)
    assert list(journal("run")) == ["held-out-0", "forecast-weights"] and "--run-dir run" in ended.stdout
    ended = CliRunner().invoke(command(), arguments)
    assert ended.exit_code == 0, ended.output
    assert re.search(r"weights +│ [+-]\d+\.\d ± \d+\.\d points", ended.stdout)
    assert re.search(r"held out: \d+\.\d% -> \d+\.\d% \(24 rollouts, ", ended.stdout)
    assert "art gateway --run-dir run/weights" in ended.stdout


async def test_a_budget_that_is_too_small_for_two_steps_of_each_lever_is_refused(poet, tmp_path):
    with pytest.raises(ConfigError, match="rollouts=100 is too few for two steps of each lever; pass 192 or more"):
        await improve(
            poet, ["a"], model="tiny", reward=reward, held_out=["b"], rollouts=100, teacher="tiny", run_dir=tmp_path / "run",
        )  # fmt: skip
