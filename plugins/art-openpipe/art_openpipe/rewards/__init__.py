"""``art.rewards``: RULER, by art_ruler. Scores belong to runs by the ids that the judge names, never by their place."""

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
"""art_ruler's own rubric."""


class TrajectoryScore(BaseModel):
    """What the judge says of one run."""

    trajectory_id: str
    """Its place in the list that was given, from 1."""
    explanation: str
    score: float
    """In [0, 1]."""


class Response(BaseModel):
    """What the judge says of all."""

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
    """Return a score for each conversation, in order: all are attempts at one task, and are compared with each other.

    ``judge_model`` is a LiteLLM model string, or whatever ``art_ruler.Ruler`` takes. ``tools`` are shown to the judge with the
    rubric. Raises art_ruler's JudgeError where the judge gave no answer that can be used, also when asked again.
    """
    judge = _ruler(judge_model, extra_litellm_params, rubric, tools)
    verdicts = await judge.compare([list(messages) for messages in message_lists])
    scores = [
        TrajectoryScore(trajectory_id=str(place), explanation=it.explanation, score=it.score)
        for place, it in enumerate(verdicts, 1)
    ]
    if debug:
        print(Response(scores=scores).model_dump_json(indent=2))  # noqa: T201 - what debug asks for
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
    """Return a copy of the group with the judge's scores as rewards; all else of it is kept.

    The reward before is the metric ``independent_reward``, the score ``ruler_score``, and what the judge said a line of the logs.
    Additional histories are shown to the judge after the main one. With ``swallow_exceptions``, None where the judge failed.
    """
    tools = next((it.tools for it in group if it.tools), None)
    try:
        scores = await ruler(
            [_shown(it) for it in group], judge_model, extra_litellm_params, rubric, tools, debug=debug
        )
    except Exception as error:
        # By its name: art_ruler is only there where it is installed. What is wrong with the set-up is always raised.
        if not swallow_exceptions or "JudgeError" not in {kind.__name__ for kind in type(error).__mro__}:
            raise
        log.warning("a group of %d runs was not scored, and is left out: %s", len(group), error)
        return None
    scored = group.model_copy(deep=True)
    for trajectory, it in zip(scored, scores, strict=True):
        trajectory.metrics["independent_reward"] = trajectory.reward
        trajectory.metrics["ruler_score"] = trajectory.reward = it.score
        trajectory.log(f"RULER explanation: {it.explanation}")
    return scored


def _shown(trajectory: Trajectory) -> Messages:
    histories = [trajectory.messages(), *(it.messages() for it in trajectory.additional_histories)]
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
