"""The result of an evaluation, the ``report.json`` of a run, and the report of a dry run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.loop.display import Display
from art_core.loop.metrics import Z, wilson_interval
from art_core.loop.run import Run
from art_core.redaction import without_access
from art_core.runtime.threads import in_thread
from art_core.scoring import of_nodes, why_unscored
from art_core.store.run_folder import write_whole
from art_core.types import Group, Trajectory


@dataclass(frozen=True)
class Report:
    """The result of an evaluation."""

    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """One per task, in order."""
    temperature: float | None
    """Imposed on the agent; None: the agent's own sampling."""
    run_dir: Path | None = None
    """The run folder that records the rollouts."""

    @property
    def mean_reward(self) -> float:
        """The mean over the scored rollouts; NaN if none is scored."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else math.nan

    @property
    def counts_successes(self) -> bool:
        """Whether ``success`` is a rate: a reward set ``metrics["success"]``, or all rewards are 0 or 1."""
        return self._sets_success or set(self._rewards) <= {0.0, 1.0}

    @property
    def successes(self) -> list[float]:
        """Of each rollout ``metrics["success"]``, or its reward if no rollout has that metric; 0 if missing."""
        if self._sets_success:
            return [t.metrics.get("success", 0.0) for t in self.trajectories]
        return [t.reward or 0.0 for t in self.trajectories]

    @property
    def success(self) -> float:
        """The mean of ``successes``: a success rate if ``counts_successes``, else a mean reward."""
        return sum(self.successes) / len(self.trajectories)

    @property
    def stderr(self) -> float:
        """The standard error of ``success`` over the tasks; 0 for a single task."""
        values, mean = self.successes, self.success
        variance = sum((x - mean) ** 2 for x in values) / max(1, len(values) - 1)
        return math.sqrt(variance / len(values))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of ``success``: Wilson's if every value is 0 or 1, else the normal one."""
        values, mean = self.successes, self.success
        if set(values) <= {0.0, 1.0}:
            return wilson_interval(mean, len(values))
        return mean - Z * self.stderr, mean + Z * self.stderr

    @property
    def unscored(self) -> int:
        """The number of rollouts without a reward."""
        return len(self.trajectories) - len(self._rewards)

    @property
    def _rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]

    @property
    def _sets_success(self) -> bool:
        return any("success" in t.metrics for t in self.trajectories)

    def __str__(self) -> str:
        low, high = self.interval
        if not self.counts_successes:
            return f"mean reward {self.success:.3g} (95 %: {low:.3g} to {high:.3g})"
        graded = "" if set(self._rewards) <= {0.0, 1.0} else f", mean reward {self.mean_reward:.3g}"
        return f"success {self.success:.1%} (95 %: {low:.1%} to {high:.1%}){graded}"

    def as_json(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "counts_successes": self.counts_successes,
            "n": len(self.trajectories),
            "stderr": self.stderr,
            "interval": self.interval,
            "mean_reward": self.mean_reward if self._rewards else None,
            "temperature": self.temperature,
            "unscored": self.unscored,
        }


TRAINING_ENTRIES = ("seconds", "seed", "model", "loss", "learner", "reward", "config")
"""Entries of ``report.json`` that no evaluation changes."""


@dataclass(frozen=True)
class TrainResult:
    """What ``train`` did; everything in it can be read again from ``run_dir``."""

    run_dir: Path
    report: Mapping[str, Any]
    """The content of ``report.json``."""
    before: Report | None
    after: Report | None


def write_report(run: Run) -> dict[str, Any]:
    """Write ``report.json`` from the store and return it.

    If no step was taken since it was last written, it keeps its entries about training; if nothing was evaluated either,
    it stays unchanged.
    """
    file, report = run.run_dir / "report.json", json.loads(json.dumps(_report(run)))
    written = json.loads(file.read_text()) if file.is_file() else {}
    if written.get("steps") == run.step:
        report |= {name: written[name] for name in TRAINING_ENTRIES if name in written}
        if all(written.get(name) == report[name] for name in ("evaluations", "stopped")):
            return written
    write_whole(file, json.dumps(report, indent=2) + "\n")
    return report


def _report(run: Run) -> dict[str, Any]:
    meta = run.store.meta
    evaluations = [
        {name: value for name, value in evaluation.items() if name != "rollout_ids"}
        for evaluation in meta("evaluations", [])
    ]
    # Reversed, so that the first of several temperatures stays.
    by_name = {evaluation["name"]: evaluation for evaluation in reversed(evaluations)}
    stopped = meta("stopped", {})
    return {
        "before": by_name.get("before"),
        "after": by_name.get("after"),
        "evaluations": evaluations,
        "seconds": sum(metrics.get("seconds", 0.0) for _, metrics in run.history()),
        "steps": run.step,
        "seed": run.config.seed,
        "model": run.config.model,
        **{name: meta(name) for name in ("start_weights", "loss", "learner", "reward")},
        "account": run.rewards.account(),
        "exhausted": run.rewards.exhausted(),
        "stopped": stopped if stopped.get("step") == run.step else None,
        "calls_elsewhere": meta("calls_elsewhere", {"refused": {}, "passed": {}}),
        "changes": meta("changes", []),
        "config": without_access(dataclasses.asdict(run.config)),
    }


async def dry_run_report(run: Run, group: Group, screen: Display) -> dict[str, Any]:
    """Return, and show, what a step on a scored group would train on. Does the work of the step, but keeps the weights."""
    tree, learner = run.tree(group), await run.learner()
    seconds = await in_thread(learner.measure, [tree]) if tree.weights.any() else 0.0
    calls = [call for t in of_nodes(group, run.config.train_nodes).trajectories for call in t.calls]
    report = {
        "calls": len(calls),
        "tokens_call_by_call": sum(len(c.prompt_ids) + len(c.sampled_ids) for c in calls),
        "tokens": tree.num_tokens,
        "targets": int((tree.weights != 0).sum()),
        "rewards": [t.reward for t in group.trajectories],
        "errors": [t.error for t in group.trajectories if t.error],
        "unscored": why_unscored([group]),
        "has_contrast": bool(run.teachable([group])),
        "rollout_seconds": max(t.seconds for t in group.trajectories),
        "learn_seconds": seconds,
        "learn_seconds_per_step": seconds * run.config.tasks_per_step,
    }
    for name, value in report.items():
        screen.say(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    return report | {"account": run.rewards.account()}
