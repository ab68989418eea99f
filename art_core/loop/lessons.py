"""What the steps of a run have taught, and what to say where they taught little. Knows nothing about how steps are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art_core.attribution import TO_DO
from art_core.loop.display import Display
from art_core.loop.metrics import of_learner
from art_core.loop.rollout import why_elsewhere
from art_core.scoring import is_scored, why_unscored
from art_core.types import Group

FLAT_STEPS = 3
"""Steps in a row without any contrast, after which advice is given, once in a row."""

NOTHING_LEFT = (
    "step {} trained nothing: every call of its groups was cut off at its token limit, or aborted; give a larger max_tokens, "
    "or overlong='train' (the loss dapo drops calls that were cut off)"
)
NOTHING_CHOSEN = (
    "step {} trained nothing: a grammar (tool_choice, response_format) left one legal token everywhere in its groups' calls, "
    "so the model chose nothing; leave it a choice: a tool with arguments, a schema with more than one answer"
)
MOSTLY_UNTRAINED = (
    "step {}: {:.0%} of the tokens that the model chose in groups with contrast are not trained, because their calls were cut "
    "off at their token limit, or aborted; give a larger max_tokens, or overlong='train' (the loss dapo drops calls that were "
    "cut off)"
)

UNSCORED = (
    "no run of the last {blind} steps could be scored ({why}); mend what scores them, wait until it is back, or give a larger "
    "max_unscored_steps= (None: never end for this)"
)

FRESH = (
    "the engine served the new weights after every step ({untold} of {swaps} changed too little to tell); it differs from the "
    "learner by {mismatch:.2g} nats over a fixed text"
)
UNTOLD = "none of {swaps} steps changed enough to tell whether the engine served the new weights"


@dataclass
class Lessons:
    """What the steps have taught."""

    most_unscored: int | None = None
    """Steps in a row in which nothing could be scored, after which there is no use in going on; None: there always is."""
    taught: int = 0
    """Steps that changed the weights."""
    flat: int = 0
    """Steps in a row without contrast."""
    blind: int = 0
    """Steps in a row in which no run had a reward, nor any of its calls."""
    why: str = ""
    """Why they have none."""
    swaps: int = 0
    """Steps after which the sentinel has looked at the engine."""
    untold: int = 0
    """Those of them that changed too little to tell."""
    mismatch: float = 0.0
    """At the last, in nats."""

    def add(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        idle = metrics.get("skipped") or metrics.get("dropped")
        self.taught += bool(metrics["groups_with_contrast"]) and not idle
        self.flat = 0 if metrics["groups_with_contrast"] else self.flat + 1
        self.blind = 0 if any(is_scored(t) for g in groups for t in g.trajectories) else self.blind + 1
        self.why = ", ".join(why_unscored(groups))
        if "mismatch" in metrics:
            self.swaps, self.untold = self.swaps + 1, self.untold + int(metrics["cannot_tell"])
            self.mismatch = metrics["mismatch"]

    def hopeless(self) -> str | None:
        """Return why there is no use in going on; None where there is."""
        if self.most_unscored is None or self.blind < self.most_unscored:
            return None
        return UNSCORED.format(**vars(self))

    def freshness(self) -> str | None:
        """Return whether the engine served what was learnt; None where nobody has looked."""
        if not self.swaps:
            return None
        return (UNTOLD if self.untold == self.swaps else FRESH).format(**vars(self))


def say_untrained(step: int, metrics: Mapping[str, float], screen: Display) -> None:
    """Say, once, where a step trained little or nothing of what the model chose. Forced tokens are no choice: there is nothing
    to mend where they are many."""
    untrained, forced = of_learner(metrics, "untrained"), of_learner(metrics, "forced")
    if metrics.get("skipped"):
        screen.say_once((NOTHING_CHOSEN if forced == 1 else NOTHING_LEFT).format(step), about="skipped")
    elif forced < 1 and (share := (untrained - forced) / (1 - forced)) > 0.5:
        screen.say_once(MOSTLY_UNTRAINED.format(step, share), about="untrained")


def say_elsewhere(when: str, groups: Sequence[Group], screen: Display) -> None:
    """Say how many model calls did not reach the policy: each time if they were refused, once if they were meant to pass."""
    if refused := why_elsewhere(groups, "refused"):
        screen.say(f"{when}: {refused}")
        screen.say_once(f"to capture such calls, {TO_DO}")
    if passed := why_elsewhere(groups, "passed"):
        screen.say_once(f"{when}: {passed}", about="passed")


def flat_advice(steps: int, groups: Sequence[Group]) -> str:
    """Say what to do about rewards that are all equal within their groups, or missing."""
    row = "this step" if steps == 1 else f"{steps} steps in a row"
    rewards = sorted({t.reward for g in groups for t in g.trajectories if t.reward is not None})
    if not rewards:
        return (
            f"{row} taught nothing: in the last no run could be scored ({', '.join(why_unscored(groups))}). "
            "Mend what scores them"
        )
    seen = f"rewards seen: {', '.join(f'{r:g}' for r in rewards[:5])}"
    return (
        f"{row} taught nothing: within every group all rewards were equal ({seen}). "
        "If all are low, take easier tasks, reward partial progress, or start from a model that sometimes succeeds; "
        "if all are high, take harder tasks; a larger group_size or a higher temperature gives more contrast"
    )
