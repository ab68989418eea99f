"""AgentDojo's own pipeline and its own workspace suite are an agent as they are, without this package's tasks."""

import itertools
from functools import cache

import pytest

from scripted_training import call_of, two_steps

pytestmark = pytest.mark.engines
TASK = "user_task_0"
TURNS = itertools.count()


@cache
def workspace():
    from agentdojo.task_suite.load_suites import get_suite

    return get_suite("v1.2.2", "workspace")


def agent(name):
    """Run a task of the suite, and return whether the suite says that it succeeded."""
    from agentdojo.agent_pipeline import AgentPipeline, PipelineConfig

    config = PipelineConfig(
        llm="gpt-4o-2024-05-13", model_id=None, defense=None, system_message_name=None, system_message=None
    )
    useful, _ = workspace().run_task_with_pipeline(
        AgentPipeline.from_config(config), workspace().user_tasks[name], None, {}
    )
    return useful


def reply(request):
    """Do what the suite says is right, and forget every other time what it was for."""
    messages, task = request["messages"], workspace().user_tasks[TASK]
    calls = task.ground_truth(workspace().load_and_inject_default_environment({}))
    done = sum(message["role"] == "tool" for message in messages)
    if done < len(calls):
        return call_of(calls[done].function, **calls[done].args)
    return {"content": task.GROUND_TRUTH_OUTPUT if next(TURNS) % 2 else "I forgot."}


def test_two_steps_train_agentdojos_own_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    rollouts = two_steps(agent, TASK, reply, tmp_path, reward=lambda it: float(it.output))
    assert {rollout.output for rollout in rollouts} == {True, False}
    assert all(rollout.calls[-1].request["messages"][-1]["role"] == "tool" for rollout in rollouts)
