"""What to do if steps teach little, model calls go elsewhere, or rollouts fail. Advice never ends training: ``stopping.py`` does.

The hints that ``art train`` prints at its end look at the whole run; they are in the art command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from art_core.attribution import TO_DO
from art_core.loop.capture_checks import why_elsewhere
from art_core.loop.display import Display
from art_core.loop.metrics import of_learner
from art_core.loop.rollout import failure
from art_core.loop.stopping import Metrics, last_steps, sampled_steps
from art_core.scoring import why_unscored
from art_core.types import Group

FLAT_STEPS = 3
"""Steps in a row without contrast after which advice is given."""

SAME_ANSWER, SAME_STEPS = 0.9, 2
"""The share of equal answers, in so many steps in a row, that is a collapse, unless they are right."""

ONE_ANSWER = (
    "{:.0%} of the answers of the last {} steps are the same, whatever the task (mean reward {:.3g}): the policy has collapsed. "
    "Start again, or from an earlier checkpoint, with a lower learning_rate={} or with kl=0.02; a reward with partial credit "
    "also helps, because then more groups have contrast"
)
FRESH = (
    "the engine served the new weights after every step ({} of {} changed too little to tell); it differs from the learner by "
    "{:.2g} nats on a fixed text"
)
CANNOT_TELL = "none of {} steps changed the weights enough to tell whether the engine served the new ones"
NOTHING_TRAINED = (
    "step {} trained nothing: every call of its groups was cut off at its token limit, or aborted; pass a larger max_tokens, "
    "or overlong='train' (the loss dapo drops calls that were cut off)"
)
NOTHING_CHOSEN = (
    "step {} trained nothing: a grammar (tool_choice, response_format) left one legal token everywhere in the calls of its "
    "groups, so the model chose nothing; leave it a choice: a tool with arguments, a schema with more than one answer"
)
MOSTLY_UNTRAINED = (
    "step {}: {:.0%} of the tokens that the model chose in groups with contrast are not trained, because their calls were cut "
    "off at their token limit, or aborted; pass a larger max_tokens, or overlong='train' (the loss dapo drops calls that were "
    "cut off)"
)


def freshness(steps: Sequence[Metrics]) -> str | None:
    """Return whether the engine served what was learned; None if that was never checked."""
    checked = [step for step in steps if "mismatch" in step]
    unclear = sum(int(step["cannot_tell"]) for step in checked)
    if not checked or unclear == len(checked):
        return CANNOT_TELL.format(unclear) if checked else None
    return FRESH.format(unclear, len(checked), checked[-1]["mismatch"])


def untrained_advice(step: int, metrics: Metrics) -> str | None:
    """Return what to do if the step trained little or nothing of what the model chose. Forced tokens are not a choice."""
    untrained, forced = of_learner(metrics, "untrained"), of_learner(metrics, "forced")
    if metrics.get("skipped"):
        return (NOTHING_CHOSEN if forced == 1 else NOTHING_TRAINED).format(step)
    if forced < 1 and (share := (untrained - forced) / (1 - forced)) > 0.5:
        return MOSTLY_UNTRAINED.format(step, share)
    return None


def say_elsewhere(when: str, groups: Sequence[Group], screen: Display) -> None:
    """Print how many model calls did not reach the policy: each time if they were refused, once if they were meant to pass."""
    if refused := why_elsewhere(groups, "refused"):
        screen.say(f"{when}: {refused}")
        screen.say_once(f"to capture such calls: {TO_DO}")
    if passed := why_elsewhere(groups, "passed"):
        screen.say_once(f"{when}: {passed}", about="passed")


def why_failed(groups: Sequence[Group]) -> str | None:
    """Return the most frequent reason why rollouts failed; None if none did."""
    reasons = Counter(failure(t) for g in groups for t in g.trajectories if t.error)
    return next((reason for reason, _ in reasons.most_common(1)), None)


def taught(steps: Sequence[Metrics]) -> bool:
    """Whether any step has changed the weights."""
    return any(
        step["groups_with_contrast"] and not step.get("skipped") and not step.get("dropped")
        for step in sampled_steps(steps)
    )


def one_answer_advice(steps: Sequence[Metrics], learning_rate: float | None) -> str | None:
    """Return what to do about a policy that has learned to answer every task alike; None unless that is new."""
    sampled = [step for step in sampled_steps(steps) if step["groups_sampled"] > 1]
    same = last_steps(sampled, lambda step: step.get("same_answer", 0.0) >= SAME_ANSWER > _success(step))
    if len(same) != SAME_STEPS or len(same) == len(sampled):
        return None
    now = "" if learning_rate is None else f" (now {learning_rate:g})"
    return ONE_ANSWER.format(same[-1]["same_answer"], SAME_STEPS, same[-1].get("reward", 0.0), now)


def _success(step: Metrics) -> float:
    return step.get("success", step.get("reward", 0.0))


def flat_advice(steps: Sequence[Metrics], groups: Sequence[Group], at: Container[int] = (FLAT_STEPS,)) -> str | None:
    """Return what to do about rewards that are all equal within their groups, or missing.

    None unless the number of the last steps in a row without contrast is in ``at``. ``groups`` are those of the last step.
    """
    flat = len(last_steps(sampled_steps(steps), lambda step: not step["groups_with_contrast"]))
    if flat == 0 or flat not in at:
        return None
    these = "this step" if flat == 1 else f"{flat} steps in a row"
    rewards = sorted({t.reward for g in groups for t in g.trajectories if t.reward is not None})
    if not rewards:
        return (
            f"{these} taught nothing: no rollout of the last one could be scored ({', '.join(why_unscored(groups))}). "
            "Fix what scores them"
        )
    seen = f"rewards seen: {', '.join(f'{r:g}' for r in rewards[:5])}"
    return (
        f"{these} taught nothing: within every group all rewards were equal ({seen}). "
        "If all are low, use easier tasks, reward partial progress, or start from a model that sometimes succeeds; "
        "if all are high, use harder tasks; a larger group_size or a higher temperature gives more contrast"
    )
