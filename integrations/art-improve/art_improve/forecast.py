"""What a budget will cost, from the first evaluation and one step of each lever."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from art_cli.dry_run import duration
from art_core.types import JsonDict


@dataclass(frozen=True)
class Forecast:
    """What everything will cost."""

    rollouts: int
    """The budget."""
    held_out: int
    """Rollouts of held-out tasks, beside the budget."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.rollouts:,} rollouts and {self.held_out:,} of held-out tasks, in about {duration(self.seconds)}"


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts take."""

    start: float
    """Of the engine and the learner, before anything happens."""
    evaluation: float
    searched: float
    """A rollout of the search for prompts."""
    trained: float
    """A rollout of the training, with its share of the step."""

    def to_come(self, searched: int, trained: int, tranches: int, evaluations: int) -> float:
        """Return the seconds for so many rollouts, in so many tranches, and evaluations."""
        search = self.start + searched * self.searched if searched else 0.0
        return search + tranches * self.start + trained * self.trained + evaluations * self.evaluation

    def with_evaluation(self, seconds: float) -> Costs:
        """Return the costs if an evaluation takes so many seconds, because rollouts became longer or shorter."""
        share = seconds / self.evaluation
        return Costs(self.start, seconds, self.searched * share, self.trained * share)


def costs(evaluation: JsonDict, tasks: int, steps: Collection[JsonDict]) -> Costs:
    """Return the costs, from an evaluation of so many tasks and a step of each lever, each measured with its start."""
    start = max(0.0, fmean(step["seconds"] - step["step_seconds"] for step in steps))
    sampled = max(0.0, evaluation["seconds"] - start) / tasks
    return Costs(
        start, evaluation["seconds"], sampled, fmean(step["step_seconds"] / step["rollouts"] for step in steps)
    )
