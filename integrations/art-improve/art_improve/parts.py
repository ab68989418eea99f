"""The evaluations, searches and trainings that an improvement consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import art_core as art
from art_core.errors import ArtError
from art_core.types import JsonDict
from art_gepa import WithPrompts, optimize
from art_improve.journal import Journal

PROMPTS, TEACHER, WEIGHTS = "prompts", "teacher", "weights"
DEFAULTS = art.TrainConfig()


class StoppedEarly(ArtError):
    """A training ended before its last step. ``may_pass``: the reason may be temporary."""

    def __init__(self, reason: str, may_pass: bool) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


@dataclass
class Parts:
    """Makes each call once, also if the whole is interrupted and repeated."""

    agent: object
    tasks: Sequence[Any]
    held_out: Sequence[Any]
    model: str
    reflector: str | Callable[[Any], str] | None
    max_cost: float | None
    teacher: str | None
    run_dir: Path
    common: dict[str, Any]
    """Keywords of every call: reward, engine, seed and progress."""
    training: dict[str, Any]
    """Further keywords of trainings: loss, learner and trackers."""
    settings: dict[str, Any]
    """Fields of ``TrainConfig``."""
    journal: Journal
    has_prompts: bool = False
    """Whether better prompts were found."""

    @property
    def weights(self) -> Path:
        """The run folder of the training."""
        return self.run_dir / "weights"

    @property
    def prompts(self) -> Path | None:
        """The file of better prompts, if there are any."""
        return self.run_dir / PROMPTS / "prompts.json" if self.has_prompts else None

    def evaluated(self, number: int) -> Path:
        """Return the run folder of an evaluation."""
        return self.run_dir / f"held-out-{number}"

    def config(self, lever: str) -> dict[str, Any]:
        """Return the keywords of a lever's training."""
        config = {**self.settings, **self.training}
        if lever == TEACHER:
            # Nothing is compared within a group, so smaller groups of more tasks teach more.
            tasks = 2 * self.settings.get("tasks_per_step", DEFAULTS.tasks_per_step)
            config |= {"loss": "distill", "teacher": self.teacher, "group_size": 2, "tasks_per_step": tasks}
        return config

    def per_step(self, lever: str) -> int:
        """Return the rollouts of a lever's step."""
        config = self.config(lever)
        return config.get("tasks_per_step", DEFAULTS.tasks_per_step) * config.get("group_size", DEFAULTS.group_size)

    async def measure(self, number: int) -> JsonDict:
        """Evaluate the agent, with the prompts and weights so far, on the held-out tasks."""

        async def work() -> JsonDict:
            report = await art.evaluate(
                self.agent, self.held_out, model=self.weights if self.weights.exists() else self.model,
                run_dir=self.evaluated(number), plugins=self._plugins, **self.common, **self._served,
            )  # fmt: skip
            return {"report": str(report), "unscored": report.unscored}

        return await self.journal.once(f"held-out-{number}", work)

    async def one_step(self, lever: str) -> JsonDict:
        """Take one step in a folder of its own, to see what a step costs."""

        async def work() -> JsonDict:
            [row] = await self._train(self.run_dir / f"forecast-{lever}", 1, self.config(lever))
            return {"rollouts": self.per_step(lever), "step_seconds": row["seconds"]}

        return await self.journal.once(f"forecast-{lever}", work)

    async def search(self, rollouts: int) -> JsonDict:
        """Search for better prompts, which everything that follows then uses."""

        async def work() -> JsonDict:
            result = await optimize(
                self.agent, self.tasks, model=self.model, reflector=self.reflector, rollouts=rollouts,
                max_cost=self.max_cost, run_dir=self.run_dir / PROMPTS, **self.common, **self._served,
            )  # fmt: skip
            return {"rollouts": result.rollouts, "dollars": result.cost, "found": bool(result.changes)}

        found = await self.journal.once(PROMPTS, work)
        self.has_prompts = found["found"]
        return found

    async def train(self, name: str, lever: str, begun: int, rollouts: int) -> JsonDict:
        """Train a lever for so many rollouts, after the step ``begun``. Only GRPO's learning rate falls, at the end."""
        until = begun + rollouts // self.per_step(lever)

        async def work() -> JsonDict:
            rates = {"decay_steps": 0} if lever == TEACHER else {}
            rows = await self._train(self.weights, until, self.config(lever) | rates)
            taken = [row for row in rows if row["step"] > begun]
            distances = [row["kl_ref"] for row in taken if "kl_ref" in row]
            return {
                "steps": len(taken), "rollouts": len(taken) * self.per_step(lever),
                "reward": fmean(row.get("reward", 0.0) for row in taken),
                "distance": fmean(distances) if distances else None,
            }  # fmt: skip

        return await self.journal.once(name, work)

    async def _train(self, folder: Path, steps: int, config: dict[str, Any]) -> list[JsonDict]:
        """Train until the run has taken so many steps, and return the metrics of each. Raises StoppedEarly."""
        result = await art.train(
            self.agent, self.tasks, model=self.model, steps=steps, run_dir=folder, plugins=self._plugins, allow_changes=True,
            **self.common, **config,
        )  # fmt: skip
        if stopped := result.report["stopped"]:
            raise StoppedEarly(stopped["reason"], bool(stopped.get("may_pass")))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def _served(self) -> dict[str, Any]:
        """The settings for evaluations and searches, which keep the agent's own temperature."""
        return {name: value for name, value in self.settings.items() if name != "temperature"}

    @property
    def _plugins(self) -> WithPrompts | None:
        return WithPrompts(self.prompts) if self.prompts else None
