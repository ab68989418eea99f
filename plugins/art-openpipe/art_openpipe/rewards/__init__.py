"""``art.rewards``: RULER, implemented by art_ruler. Scores are matched to trajectories by id, never by position."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from art_core.errors import ConfigError
from art_openpipe.histories import messages_of
from art_openpipe.trajectories import TrajectoryGroup
from art_openpipe.types import Messages, Tools

log = logging.getLogger("art_openpipe")


class TrajectoryScore(BaseModel):
    """The judge's score, in [0, 1], of the trajectory at this position of the list, from 1."""

    trajectory_id: str
    explanation: str
    score: float


async def ruler(
    message_lists: Sequence[Messages],
    judge_model: Any = "openai/gpt-6.1-sol",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = None,
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
        print([score.model_dump() for score in scores])  # noqa: T201 - debug output
    return scores


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: Any = "openai/gpt-6.1-sol",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = None,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
) -> TrajectoryGroup | None:
    """Return a copy of the group with the judge's scores as rewards.

    The previous reward becomes the metric ``independent_reward``, the score is also the metric ``ruler_score``, and the judge's
    explanation is added to the logs. With ``swallow_exceptions``, returns None if the judge fails.
    """
    tools = next((history.tools for trajectory in group for history in trajectory.histories() if history.tools), None)
    try:
        histories = [[history.messages_and_choices for history in trajectory.histories()] for trajectory in group]
        conversations = [[message for each in own for message in messages_of(each)] for own in histories]
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


def _ruler(judge: Any, params: Mapping[str, Any] | None, rubric: str | None, tools: Tools | None) -> Any:
    try:
        from art_ruler import RUBRIC, Ruler
    except ImportError as error:
        install = "in the checkout of art, run: pip install -e integrations/art-ruler"
        raise ConfigError(f"RULER needs the integration art-ruler; {install}") from error
    if tools:
        names = ", ".join(tool.get("function", tool).get("name", "?") for tool in tools)
        rubric = f"{rubric or RUBRIC}\nThe agent had these tools: {names}"
    return Ruler(judge, rubric=rubric, params=dict(params) if params else None)


sys.modules[f"{__name__}.ruler"] = sys.modules[__name__]  # a module of its own in OpenPipe ART
