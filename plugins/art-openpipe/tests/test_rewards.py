"""RULER: a score belongs to the run that the judge names."""

import json

import pytest
from judging import runs

import art_openpipe as art
from art_core.errors import ConfigError
from art_openpipe.rewards import ruler, ruler_score_group
from art_openpipe.trajectories import LegacyHistory
from art_ruler.judge import JudgeError


def worth(text):
    return float(text.rpartition("worth ")[2].split()[0])


def judge_of(answer=None):
    """A judge that grades by the number in a run, and answers in another order than it was asked."""
    asked = []

    async def judge(messages):
        asked.append(messages)
        scores = [
            {"trajectory_id": label, "explanation": f"worth {worth(text)}", "score": worth(text)}
            for label, text in runs(messages).items()
        ]
        return json.dumps({"scores": scores[::-1]}) if answer is None else answer

    judge.asked = asked
    return judge


def run_of(number, **fields):
    messages = [{"role": "user", "content": "find it"}, {"role": "assistant", "content": f"worth {number}"}]
    return art.Trajectory(messages_and_choices=messages, **fields)


async def test_scores_are_matched_by_id_and_the_group_keeps_everything():
    group = art.TrajectoryGroup(
        [run_of(0.9, reward=3.0, initial_policy_version=4), run_of(0.1), run_of(0.5, metadata={"scenario": 7})],
        exceptions=[ValueError("broken")],
        metadata={"scenario_id": 7},
        metrics={"x": 1.0},
        logs=["line"],
    )
    scored = await ruler_score_group(group, judge_of())
    assert [it.reward for it in scored] == [0.9, 0.1, 0.5]
    first = scored.trajectories[0]
    assert first.metrics == {"independent_reward": 3.0, "ruler_score": 0.9}
    assert first.logs == ["RULER explanation: worth 0.9"]
    assert first.initial_policy_version == 4 and scored.trajectories[2].metadata == {"scenario": 7}
    assert (scored.metadata, scored.metrics, scored.logs) == ({"scenario_id": 7}, {"x": 1.0}, ["line"])
    assert [it.type for it in scored.exceptions] == ["ValueError"]
    assert group.trajectories[0].reward == 3.0  # the script's own group is left alone


async def test_further_histories_and_tools_are_shown_to_the_judge():
    judge = judge_of()
    look = {"type": "function", "function": {"name": "look_up"}}
    history = LegacyHistory(messages_and_choices=[{"role": "assistant", "content": "sub-agent, worth 0.7"}])
    group = art.TrajectoryGroup([run_of(0.2, additional_histories=[history], tools=[look]), run_of(0.4)])
    assert [it.reward for it in await ruler_score_group(group, judge)] == [0.7, 0.4]
    assert "look_up" in judge.asked[0][0]["content"] and "sub-agent" in judge.asked[0][1]["content"]


async def test_a_score_out_of_range_is_never_a_reward():
    judge = judge_of('{"scores": [{"trajectory_id": "1", "explanation": "", "score": 7.5}]}')
    group = art.TrajectoryGroup([run_of(0.2), run_of(0.4)])
    with pytest.raises(JudgeError):
        await ruler_score_group(group, judge)
    assert len(judge.asked) == 2  # it was asked again
    assert await ruler_score_group(group, judge, swallow_exceptions=True) is None


async def test_plain_conversations_are_scored_in_order(capsys):
    lists = [run_of(number).messages() for number in (0.3, 0.8)]
    scores = await ruler(lists, judge_of(), rubric="Be strict.", debug=True)
    assert [(it.trajectory_id, it.score) for it in scores] == [("1", 0.3), ("2", 0.8)]
    assert "worth 0.8" in capsys.readouterr().out


async def test_ruler_scores_groups_as_they_are_gathered():
    async def rollout(number):
        return run_of(number)

    judge = judge_of()
    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(number) for number in (0.1, 0.6)) for _ in range(2)),
        after_each=lambda group: ruler_score_group(group, judge),
        pbar_desc=None,
    )
    assert [[it.reward for it in group] for group in groups] == [[0.1, 0.6]] * 2


async def test_a_judge_that_cannot_be_is_always_an_error():
    with pytest.raises(ConfigError):
        await ruler_score_group(art.TrajectoryGroup([run_of(1)]), 3, swallow_exceptions=True)
