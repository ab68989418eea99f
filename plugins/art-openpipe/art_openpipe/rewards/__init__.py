"""``art.rewards``: RULER, implemented by art_ruler. Scores are matched to trajectories by id, never by position."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from art_core.errors import ConfigError
from art_openpipe.trajectories import Trajectory, TrajectoryGroup
from art_openpipe.types import Messages, Tools

log = logging.getLogger("art_openpipe")
DEFAULT_RUBRIC = None
"""None: art_ruler's rubric."""


class TrajectoryScore(BaseModel):
    """The judge's score of one trajectory."""

    trajectory_id: str
    """Its position in the list, from 1."""
    explanation: str
    score: float
    """In [0, 1]."""


class Response(BaseModel):
    """The judge's scores of all trajectories."""

    scores: list[TrajectoryScore]


async def ruler(
    message_lists: Sequence[Messages],
    judge_model: Any = "openai/gpt-6.1-sol",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
) -> list[TrajectoryScore]:
    """Return a score for each conversation, in order; all are attempts at one task and are compared with each other.

    ``judge_model`` is a LiteLLM model string, or anything else that ``art_ruler.Ruler`` accepts. The names of ``tools`` are shown
    to the judge with the rubric. Raises art_ruler's JudgeError if the judge gives no usable answer, even when asked again.
    """
    judge = _ruler(judge_model, extra_litellm_params, rubric, tools)
    verdicts = await judge.compare([list(messages) for messages in message_lists])
    scores = [
        TrajectoryScore(trajectory_id=str(number), explanation=verdict.explanation, score=verdict.score)
        for number, verdict in enumerate(verdicts, 1)
    ]
    if debug:
        print(Response(scores=scores).model_dump_json(indent=2))  # noqa: T201 - debug output
    return scores


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: Any = "openai/gpt-6.1-sol",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
) -> TrajectoryGroup | None:
    """Return a copy of the group with the judge's scores as rewards.

    The previous reward becomes the metric ``independent_reward``, the score is also the metric ``ruler_score``, and the judge's
    explanation is added to the logs. Additional histories are shown to the judge after the main one. With
    ``swallow_exceptions``, returns None if the judge fails.
    """
    tools = next((trajectory.tools for trajectory in group if trajectory.tools), None)
    try:
        conversations = [_shown(trajectory) for trajectory in group]
        scores = await ruler(conversations, judge_model, extra_litellm_params, rubric, tools, debug=debug)
    except Exception as error:
        # Compared by name, because art_ruler may not be installed. Errors of the set-up are always raised.
        if not swallow_exceptions or "JudgeError" not in {kind.__name__ for kind in type(error).__mro__}:
            raise
        log.warning("dropping a group of %d trajectories that could not be scored: %s", len(group), error)
        return None
    scored = group.model_copy(deep=True)
    for trajectory, score in zip(scored, scores, strict=True):
        trajectory.metrics["independent_reward"] = trajectory.reward
        trajectory.metrics["ruler_score"] = trajectory.reward = score.score
        trajectory.log(f"RULER explanation: {score.explanation}")
    return scored


def _shown(trajectory: Trajectory) -> Messages:
    histories = [trajectory.messages(), *(history.messages() for history in trajectory.additional_histories)]
    return [message for history in histories for message in history]


def _ruler(judge: Any, params: Mapping[str, Any] | None, rubric: str | None, tools: Tools | None) -> Any:
    try:
        from art_ruler import RUBRIC, Ruler
    except ImportError as error:
        raise ConfigError(
            "RULER needs the integration art-ruler; in the checkout of art, run: pip install -e integrations/art-ruler"
        ) from error
    if tools:
        names = ", ".join(tool.get("function", tool).get("name", "?") for tool in tools)
        rubric = f"{rubric or RUBRIC}\nThe agent had these tools: {names}"
    return Ruler(judge, rubric=rubric, params=dict(params) if params else None)
