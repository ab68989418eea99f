"""``improve``: one budget of rollouts for better prompts, a teacher and better weights, and what each contributed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import art_core as art
from art_core.errors import ConfigError
from art_core.plugin_api import check_tasks, plural, task_id
from art_core.store.run_folder import new_run_dir
from art_core.types import JsonDict, Reward
from art_gepa import WithPrompts, optimize
from art_improve.forecast import Costs, Forecast, costs
from art_improve.journal import Journal
from art_improve.levers import PROMPTS, TEACHER, WEIGHTS, Tranche, next_lever

SEARCH_SHARE = 0.2
"""Of the budget, at most, for prompts."""
TRANCHES = 8
"""With a teacher, the training's budget is spent in at most so many parts, each followed by a choice of the lever."""
SWITCHES = 2
"""Changes of the lever that the forecast expects with a teacher."""
Z_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Contribution:
    """What a lever contributed."""

    lever: str
    value: float
    """Rise of the success on the held-out tasks."""
    margin: float
    """Of its 95 % interval, over the tasks: ``value`` ± ``margin``."""
    rollouts: int
    seconds: float
    dollars: float


@dataclass(frozen=True)
class Improvement:
    """The result of ``improve``."""

    run_dir: Path
    before: float
    """Success on the held-out tasks, as ``Report.success``."""
    after: float
    contributions: tuple[Contribution, ...]
    forecasts: tuple[Forecast, ...]
    """Before anything was spent and, if there are better prompts, again with these."""
    rollouts: int
    """Of the budget."""
    seconds: float
    prompts: Path | None
    """The file of better prompts, for ``WithPrompts`` and ``--prompts``; None if there are none."""
    weights: Path | None
    """The run folder of the training; None if nothing was trained."""
    stopped: str | None
    """Why the training ended early."""


async def improve(
    agent: object,
    tasks: Sequence[Any],
    *,
    model: str,
    reward: str | Reward,
    held_out: Sequence[Any],
    rollouts: int = 2000,
    reflector: str | Callable[[Any], str] | None = None,
    teacher: str | None = None,
    forecast_only: bool = False,
    run_dir: str | Path | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Improvement:
    """Improve an unchanged agent on a budget of ``rollouts``, and measure each lever on the ``held_out`` tasks.

    First a ``reflector``, as of ``art_gepa.optimize``, writes better prompts; then a ``teacher``, as of ``loss="distill"``, and
    GRPO train the weights in turns: the lever whose reward rises faster per rollout goes on. Without a reflector or a teacher,
    their lever is left out. ``settings`` are further keywords of ``art.train``. Before most of the budget is spent, ``say`` is
    told what everything will cost, and ``forecast_only`` ends there. The same call with the ``run_dir`` of an interrupted one
    continues it.
    """
    check_tasks(tasks)
    check_tasks(held_out, "held_out")
    folder = Path(run_dir or new_run_dir(f"improve-{Path(model).name}"))
    asked = {
        "model": model, "rollouts": rollouts, "teacher": teacher, "seed": seed,
        "reflector": _name(reflector), "settings": {name: _name(value) for name, value in settings.items()},
        "tasks": _identity(tasks), "held-out tasks": _identity(held_out),
    }  # fmt: skip
    parts = _Parts(
        agent, tasks, held_out, model, reward, reflector, teacher, folder, seed, settings, Journal(folder, asked)
    )
    return await _Course(parts, rollouts, say).run(forecast_only)


def _name(part: Any) -> Any:
    """Return a plain value as it is, and the name of an object's class or of a function."""
    if part is None or isinstance(part, str | int | float | dict | list):
        return part
    return list(part) if isinstance(part, tuple) else getattr(part, "__qualname__", type(part).__qualname__)


def _identity(tasks: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(map(task_id, tasks))).encode()).hexdigest()


@dataclass
class _Parts:
    """The calls that an improvement consists of. Each is made once, also if the whole is interrupted and repeated."""

    agent: object
    tasks: Sequence[Any]
    held_out: Sequence[Any]
    model: str
    reward: str | Reward
    reflector: str | Callable[[Any], str] | None
    teacher: str | None
    run_dir: Path
    seed: int
    settings: dict[str, Any]
    journal: Journal
    prompts: Path | None = None
    """The file of better prompts, once they are found."""

    @property
    def weights(self) -> Path:
        """The run folder of the training."""
        return self.run_dir / "weights"

    @cached_property
    def _elsewhere(self) -> dict[str, Any]:
        """The settings that evaluations and searches take."""
        only_train = ("loss", "learner", "executor", "temperature", "trackers", "max_temperature")
        return {name: value for name, value in self.settings.items() if name not in only_train}

    @property
    def _plugins(self) -> WithPrompts | None:
        return WithPrompts(self.prompts) if self.prompts else None

    def config(self, lever: str) -> dict[str, Any]:
        """Return the settings of a lever's training."""
        if lever != TEACHER:
            return self.settings
        # Nothing is compared within a group: more tasks, fewer rollouts of each, and smaller steps.
        tasks = 2 * self.settings.get("tasks_per_step", 8)
        return {**self.settings, "loss": "distill", "teacher": self.teacher, "group_size": 2, "tasks_per_step": tasks}

    def per_step(self, lever: str) -> int:
        """Return the rollouts of a lever's step."""
        config = self.config(lever)
        return config.get("tasks_per_step", 8) * config.get("group_size", 8)

    async def measure(self, number: int) -> JsonDict:
        """Evaluate the agent, with the prompts and weights so far, on the held-out tasks."""
        name = f"held-out-{number}"

        async def work() -> JsonDict:
            report = await art.evaluate(
                self.agent, self.held_out, model=self.weights if self.weights.exists() else self.model, reward=self.reward,
                run_dir=self.run_dir / name, plugins=self._plugins, seed=self.seed, **self._elsewhere,
            )  # fmt: skip
            return {"success": report.success, "successes": report.successes}

        return await self.journal.once(name, work)

    async def one_step(self, lever: str) -> JsonDict:
        """Take one step in a folder of its own, to see what a step costs."""

        async def work() -> JsonDict:
            _, [row] = await self._train(self.run_dir / f"forecast-{lever}", 1, self.config(lever))
            return {"rollouts": self.per_step(lever), "step_seconds": row["seconds"]}

        return await self.journal.once(f"forecast-{lever}", work)

    async def search(self, rollouts: int) -> JsonDict:
        """Search for better prompts, which everything that follows then uses."""

        async def work() -> JsonDict:
            result = await optimize(
                self.agent, self.tasks, model=self.model, reward=self.reward, reflector=self.reflector, rollouts=rollouts,
                run_dir=self.run_dir / PROMPTS, seed=self.seed, **self._elsewhere,
            )  # fmt: skip
            file = str(result.file) if result.changes else None
            return {"rollouts": result.rollouts, "dollars": result.cost, "file": file}

        found = await self.journal.once(PROMPTS, work)
        self.prompts = Path(found["file"]) if found["file"] else None
        return found

    async def tranche(self, number: int, lever: str, begun: int, rollouts: int, last: bool) -> JsonDict:
        """Train a lever for so many rollouts, after the step ``begun``. Only in the ``last`` tranche the learning rate falls."""
        until = begun + rollouts // self.per_step(lever)

        async def work() -> JsonDict:
            settings = self.config(lever) | ({} if last else {"decay_steps": 0})
            result, rows = await self._train(self.weights, until, settings)
            taken = [row for row in rows if row["step"] > begun]
            return {
                "lever": lever, "steps": len(taken), "rollouts": len(taken) * self.per_step(lever), "dollars": 0.0,
                "rewards": [row["reward"] for row in taken if "reward" in row],
                "stopped": (result.report["stopped"] or {}).get("reason"),
            }  # fmt: skip

        return await self.journal.once(f"tranche {number}", work)

    async def _train(
        self, folder: Path, steps: int, settings: dict[str, Any]
    ) -> tuple[art.TrainResult, list[JsonDict]]:
        """Train until the run has taken so many steps; return also the metrics of each."""
        result = await art.train(
            self.agent, self.tasks, model=self.model, reward=self.reward, steps=steps, run_dir=folder, seed=self.seed,
            plugins=self._plugins, allow_changes=True, **settings,
        )  # fmt: skip
        return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class _Course:
    """The order of the parts, and what each contributes."""

    def __init__(self, parts: _Parts, budget: int, say: Callable[[str], None]) -> None:
        self.parts, self.budget, self.say = parts, budget, say
        self.levers = [TEACHER, WEIGHTS] if parts.teacher else [WEIGHTS]
        self.search_budget = int(SEARCH_SHARE * budget) if parts.reflector else 0
        self.spent: list[tuple[str, JsonDict]] = []
        """Each part's lever, and its entry in the journal."""
        self.measured: list[tuple[str, JsonDict]] = []
        """The evaluations, each with the lever that the rollouts since the one before it went into."""
        fewest = self.search_budget + sum(2 * parts.per_step(lever) for lever in self.levers)
        if budget < fewest:
            raise ConfigError(f"rollouts={budget} is too few for two steps of each lever; pass {fewest} or more")

    async def run(self, forecast_only: bool) -> Improvement:
        """Do everything."""
        await self._measure("")
        steps = {lever: await self.parts.one_step(lever) for lever in self.levers}
        self.spent += [("forecast", step) for step in steps.values()]
        known = costs(self.measured[0][1], steps.values())
        forecasts = [self._forecast(known)]
        self.say(f"forecast: {forecasts[0]}")
        stopped = None
        if not forecast_only:
            if self.parts.reflector:
                self.spent.append((PROMPTS, await self.parts.search(self.search_budget)))
            if self.parts.prompts:
                await self._measure(PROMPTS)
                forecasts.append(self._forecast(known.with_evaluation(self.measured[-1][1]["seconds"])))
                self.say(f"forecast with the new prompts: {forecasts[-1]}")
            stopped = await self._train()
        return self._result(tuple(forecasts), stopped)

    def _forecast(self, known: Costs) -> Forecast:
        measured = [part for _, part in self.measured]
        searched = 0 if PROMPTS in dict(self.spent) else self.search_budget
        evaluations = bool(searched) + 1 + SWITCHES * (len(self.levers) > 1)
        seconds = sum(part["seconds"] for part in (*measured, *(part for _, part in self.spent)))
        seconds += known.to_come(searched, self._left, -(-self._left // self._tranche), evaluations)
        return Forecast(self.budget, (len(measured) + evaluations) * len(self.parts.held_out), seconds)

    @property
    def _left(self) -> int:
        """What is left of the budget for training."""
        search = 0 if PROMPTS in dict(self.spent) else self.search_budget
        return self.budget - search - sum(part["rollouts"] for _, part in self.spent)

    @property
    def _tranche(self) -> int:
        """Rollouts of a tranche: all without a choice; else at least two steps of each lever, because one shows no gain."""
        return (
            self._left
            if len(self.levers) == 1
            else max(self._left // TRANCHES, 2 * max(map(self.parts.per_step, self.levers)))
        )

    async def _measure(self, lever: str) -> None:
        measured = await self.parts.measure(len(self.measured))
        self.measured.append((lever, measured))
        self.say(f"held out{f', after {lever}' if lever else ''}: {measured['success']:.1%}")

    async def _train(self) -> str | None:
        """Spend the rest of the budget on the levers that train; return why it ended early, if it did."""
        size, step = self._tranche, 0
        done: list[Tranche] = []
        stopped = None
        for number in itertools.count(1):
            lever = next_lever(done, self.levers)
            if stopped or self._left < self.parts.per_step(lever):
                break
            if done and lever != done[-1].lever:
                await self._measure(done[-1].lever)
            last = self._left < size + 2 * self.parts.per_step(WEIGHTS)
            part = await self.parts.tranche(number, lever, step, self._left if last else size, last)
            self.spent.append((lever, part))
            done.append(Tranche(lever, part["rollouts"], tuple(part["rewards"])))
            self.say(
                f"{lever}: {plural(part['rollouts'], 'rollout')}, mean reward {fmean(part['rewards'] or [0.0]):.3f}"
            )
            step, stopped = step + part["steps"], part["stopped"]
            if last:
                break
        if done:
            await self._measure(done[-1].lever)
        return stopped

    def _result(self, forecasts: tuple[Forecast, ...], stopped: str | None) -> Improvement:
        used = [name for name, _ in self.spent if name != "forecast"]
        every = [part for _, part in (*self.spent, *self.measured)]
        return Improvement(
            self.parts.run_dir, self.measured[0][1]["success"], self.measured[-1][1]["success"],
            tuple(self._contribution(lever) for lever in dict.fromkeys(used)), forecasts,
            sum(part["rollouts"] for _, part in self.spent), sum(part["seconds"] for part in every), self.parts.prompts,
            self.parts.weights if self.parts.weights.exists() else None, stopped,
        )  # fmt: skip

    def _contribution(self, lever: str) -> Contribution:
        """Return a lever's contribution: the mean over the tasks of the changes of success for which it was used."""
        changes = [0.0] * len(self.parts.held_out)
        for (_, before), (used, after) in itertools.pairwise(self.measured):
            if used == lever:
                changes = [c + b - a for c, a, b in zip(changes, before["successes"], after["successes"], strict=True)]
        margin = Z_95 * stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
        parts = [part for name, part in self.spent if name == lever]
        return Contribution(
            lever, fmean(changes), margin, *(sum(part[name] for part in parts) for name in ("rollouts", "seconds", "dollars"))
        )  # fmt: skip
