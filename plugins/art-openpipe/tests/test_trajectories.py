"""What scripts build: trajectories and groups."""

import asyncio
import copy

import pytest
from openai.types.chat.chat_completion import Choice

import art_openpipe as art

SAID = Choice.model_validate(
    {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
    }
)


def test_a_trajectory_is_worth_nothing_until_it_is_said():
    trajectory = art.Trajectory()
    assert trajectory.reward == 0.0
    assert (trajectory.messages_and_choices, trajectory.additional_histories, trajectory.logs) == ([], [], [])


def test_messages_show_a_choice_once_with_its_tool_calls_and_its_thinking():
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "look"}, SAID])
    asked, said = trajectory.messages()
    assert asked == {"role": "user", "content": "look"}
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert said["reasoning_content"] == "hm"
    shown = trajectory.for_logging()
    assert [message["trainable"] for message in shown["messages"]] == [False, True]
    assert shown["reward"] == 0.0


async def test_durations_are_metrics_however_a_block_ends():
    trajectory = art.Trajectory()
    with pytest.raises(KeyError):
        async with trajectory.track_duration("tool"):
            raise KeyError
    async with trajectory.track_duration("tool"):
        pass
    assert trajectory.finish() is trajectory
    assert trajectory.metrics["tool_duration"] >= 0 and trajectory.metrics["duration"] >= 0
    trajectory.log("a line")
    assert trajectory.logs == ["a line"]


def test_a_group_is_a_list_with_its_exceptions_beside():
    one, two = art.Trajectory(reward=1.0), art.Trajectory(metadata={"scenario": 3})
    group = art.TrajectoryGroup([one, ValueError("no"), two], metadata={"id": 1}, metrics={"x": 2.0})
    assert list(group) == [one, two] and len(group) == 2
    assert [(it.type, it.message) for it in group.exceptions] == [("ValueError", "no")]
    other = copy.deepcopy(group)
    other.trajectories[0].reward = 5.0
    other.log("line")
    assert one.reward == 1.0 and group.logs == [] and other.metadata == {"id": 1} and other.metrics == {"x": 2.0}
    assert copy.copy(group).trajectories == group.trajectories
    assert art.TrajectoryGroup.model_validate(group.model_dump()).trajectories[1].metadata == {"scenario": 3}


async def test_a_group_of_awaitables_is_awaited_and_keeps_their_order():
    gate = asyncio.Event()

    async def rollout(number):
        if number == 0:
            await gate.wait()
        gate.set()
        return art.Trajectory(reward=number)

    group = await art.TrajectoryGroup((rollout(number) for number in range(3)), metadata={"id": 1})
    assert [it.reward for it in group] == [0, 1, 2]
    assert await group is group  # again changes nothing
    assert group.metadata == {"id": 1}


async def test_a_rollout_that_returns_something_else_says_so():
    async def rollout():
        return {"reward": 1}

    with pytest.raises(TypeError, match=r"returned dict, not an art\.Trajectory"):
        await art.TrajectoryGroup([rollout()])


def test_fields_that_a_trajectory_does_not_have_are_kept_with_a_warning(caplog):
    trajectory = art.Trajectory(reward=1.0, scenario="weather")
    assert trajectory.reward == 1.0 and trajectory.scenario == "weather"
    assert "Trajectory keeps scenario, but does not use it" in caplog.text
