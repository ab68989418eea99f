"""``improve``: one budget of rollouts for better prompts, a teacher and better weights, and what each contributed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_compare import Difference, compare
from art_core.errors import ConfigError
from art_core.plugin_api import Display, Tracker, check_settings, check_tasks, model_folder, plural, task_id
from art_core.store.run_folder import new_run_dir
from art_core.types import JsonDict, Loss, Reward
from art_gepa.search import FEWEST_TASKS, Limits, identity
from art_improve.forecast import Costs, Forecast, costs
from art_improve.journal import Journal
from art_improve.parts import PROMPTS, TEACHER, WEIGHTS, Parts, StoppedEarly

SEARCH_SHARE = 0.2
"""Of the budget, at most, for prompts."""
TEACHER_SHARE = 0.75
"""Of the training, at most, for the teacher: GRPO begins where a teacher ends."""
TRANCHES = 6
"""The teacher's part of the budget is spent in so many parts, after each of which it may end."""
CLOSE = 0.1
"""The teacher ends once the divergence from it is below this share of that in its first tranche."""
DECIDED = ("steps", "allow_changes", "command")
FEWEST_STEPS = 2
"""Of each lever, besides that for the forecast."""


@dataclass(frozen=True)
class Contribution:
    """What a lever contributed."""

    lever: str
    measure: str
    """``success``, or ``reward`` if the reward doesn't count successes."""
    difference: Difference | None
    """Between the evaluations after and before it, paired by their tasks; None if no task was scored in both."""
    rollouts: int
    seconds: float
    dollars: float


@dataclass(frozen=True)
class Improvement:
    """The result of ``improve``."""

    run_dir: Path
    before: str
    """The evaluation of the agent as it is, on the held-out tasks."""
    after: str
    contributions: tuple[Contribution, ...]
    forecasts: tuple[Forecast, ...]
    """Before most was spent and, if there are better prompts, again with these."""
    rollouts: int
    """Of the budget."""
    seconds: float
    prompts: Path | None
    """The file of better prompts, for ``WithPrompts`` and ``--prompts``; None if there are none."""
    weights: Path | None
    """The run folder of the training; None if nothing was trained."""
    stopped: StoppedEarly | None
    """Why the training ended early; the same call continues it, also with other settings."""


async def improve(
    agent: object,
    tasks: Sequence[Any],
    *,
    model: str,
    reward: str | Reward,
    held_out: Sequence[Any],
    rollouts: int = 2000,
    reflector: str | Callable[[Any], str] | None = None,
    max_cost: float | None = None,
    teacher: str | None = None,
    loss: str | Loss = "grpo",
    engine: str = "embedded",
    learner: str = "auto",
    trackers: Sequence[str | Tracker] = (),
    forecast_only: bool = False,
    run_dir: str | Path | None = None,
    seed: int = 0,
    progress: bool | Display = True,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Improvement:
    """Improve an unchanged agent on a budget of ``rollouts``, and measure each lever on the ``held_out`` tasks.

    First a ``reflector`` searches for better prompts, as in ``art_gepa.optimize``, for at most ``max_cost`` US dollars. Then the
    model learns from a ``teacher``, as with ``loss="distill"``, until it is close to it, and for the rest of the budget with
    ``loss``. Without a reflector or a teacher, their lever is left out. ``settings`` are fields of ``TrainConfig``. ``say``
    prints the forecast before most of the budget is spent; ``forecast_only`` stops there. The same call with the ``run_dir`` of
    an interrupted one continues it.
    """
    check_tasks(tasks)
    check_tasks(held_out, "held_out")
    asked = {
        "model": model, "rollouts": rollouts, "teacher": teacher, "seed": seed, "agent": identity(agent),
        "reward": reward if isinstance(reward, str) else identity(reward),
        "reflector": reflector if reflector is None or isinstance(reflector, str) else identity(reflector),
        "tasks": identity(sorted(map(task_id, tasks))), "held-out tasks": identity(list(map(task_id, held_out))),
    }  # fmt: skip
    common = {"reward": reward, "engine": engine, "seed": seed, "progress": progress}
    training = {"loss": loss, "learner": learner, "trackers": trackers}
    _check(common, training, settings)
    folder = Path(run_dir or new_run_dir(f"improve-{Path(model).name}")).expanduser()
    parts = Parts(
        agent, tasks, held_out, model, reflector, max_cost, teacher, folder, common, training, settings, Journal(folder, asked),
    )  # fmt: skip
    course = _Course(parts, rollouts, say)
    folder.mkdir(parents=True, exist_ok=True)
    return await course.run(forecast_only)


def _check(common: dict[str, Any], training: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that can only fail later."""
    check_settings(settings, improve)
    if decided := [name for name in DECIDED if name in settings]:
        raise ConfigError(f"art improve decides {', '.join(decided)} itself; drop it")
    for name, value in (("engine", common["engine"]), ("learner", training["learner"])):
        if not isinstance(value, str) or "://" in value:
            raise ConfigError(
                f"{name} must be a registered name: an object or a server would keep weights from one training to the next"
            )
    if settings.get("dynamic_sampling"):
        raise ConfigError(
            "dynamic_sampling takes as many rollouts as it needs, so the budget could not be kept; drop it"
        )


class _Course:
    """The order of the parts, and what each contributes."""

    def __init__(self, parts: Parts, budget: int, say: Callable[[str], None]) -> None:
        self.parts, self.budget, self.say = parts, budget, say
        self.levers = [TEACHER, WEIGHTS] if parts.teacher else [WEIGHTS]
        self.search_budget = int(SEARCH_SHARE * budget) if parts.reflector else 0
        self.spent: list[tuple[str, JsonDict]] = []
        """Each part's lever, and its entry in the journal."""
        self.measured: list[tuple[str, JsonDict]] = []
        """The evaluations, each with the lever that was used since the one before it."""
        self.steps = 0
        self._check()

    def _check(self) -> None:
        """Raise ConfigError for models that can't be trained, and a budget that is too small."""
        parts = self.parts
        if model_folder(parts.model) == "live":
            raise ConfigError("a provider's model can't be trained; art optimize searches for better prompts alone")
        if parts.teacher:
            model_folder(parts.teacher)
        trained = sum((1 + FEWEST_STEPS) * parts.per_step(lever) for lever in self.levers)
        if not parts.reflector:
            fewest = trained
        elif len(parts.tasks) < FEWEST_TASKS:
            raise ConfigError(
                f"one task can't show which prompt is better; pass at least {FEWEST_TASKS}, or no reflector"
            )
        else:
            enough = (budget for budget in itertools.count(1) if _can_search(budget, parts.tasks))
            fewest = max(next(enough), int(trained / (1 - SEARCH_SHARE)) + 1)
        if self.budget < fewest:
            raise ConfigError(f"rollouts={self.budget} is too few for two steps of each lever; pass {fewest} or more")

    async def run(self, forecast_only: bool) -> Improvement:
        """Do everything."""
        forecasts: list[Forecast] = []
        stopped = None
        try:
            await self._measure("")
            steps = {lever: await self.parts.one_step(lever) for lever in self.levers}
            self.spent += [("forecast", step) for step in steps.values()]
            known = costs(self.measured[0][1], len(self.parts.held_out), steps.values())
            forecasts.append(self._forecast(known))
            self.say(f"forecast: {forecasts[0]}")
            if not forecast_only:
                await self._search(known, forecasts)
                await self._train()
        except StoppedEarly as error:
            stopped = error
        return self._result(tuple(forecasts), stopped)

    async def _measure(self, lever: str) -> None:
        measured = await self.parts.measure(len(self.measured))
        self.measured.append((lever, measured))
        unscored = f", {plural(measured['unscored'], 'unscored rollout')}" if measured["unscored"] else ""
        self.say(f"held out{f', after {lever}' if lever else ''}: {measured['report']}{unscored}")

    async def _search(self, known: Costs, forecasts: list[Forecast]) -> None:
        if self.parts.reflector:
            self.spent.append((PROMPTS, await self.parts.search(self.search_budget)))
            if not self.parts.has_prompts:
                self.say("no better prompts were found")
        if self.parts.has_prompts:
            await self._measure(PROMPTS)
            forecasts.append(self._forecast(known.with_evaluation(self.measured[-1][1]["seconds"])))
            self.say(f"forecast with the new prompts: {forecasts[-1]}")

    async def _train(self) -> None:
        """Learn from the teacher until the model is close to it, and then without."""
        if self.parts.teacher:
            part, size = self._teachers_part, self._tranche
            distances: list[float] = []
            while part >= self.parts.per_step(TEACHER) and not (distances and distances[-1] < CLOSE * distances[0]):
                entry = await self._spend(f"{TEACHER} {len(distances) + 1}", TEACHER, min(size, part))
                part -= entry["rollouts"]
                distances.append(math.nan if entry["distance"] is None else entry["distance"])
            await self._measure(TEACHER)
        await self._spend(WEIGHTS, WEIGHTS, self._left)
        await self._measure(WEIGHTS)

    async def _spend(self, name: str, lever: str, rollouts: int) -> JsonDict:
        entry = await self.parts.train(name, lever, self.steps, rollouts)
        self.spent.append((lever, entry))
        self.steps += entry["steps"]
        distance = f", {entry['distance']:.4f} nats per token from the teacher" if entry["distance"] is not None else ""
        self.say(f"{lever}: {plural(entry['rollouts'], 'rollout')}, mean reward {entry['reward']:.3f}{distance}")
        return entry

    @property
    def _search_left(self) -> int:
        return 0 if PROMPTS in dict(self.spent) else self.search_budget

    @property
    def _left(self) -> int:
        """What is left of the budget for training."""
        return self.budget - self._search_left - sum(part["rollouts"] for _, part in self.spent)

    @property
    def _teachers_part(self) -> int:
        return min(int(TEACHER_SHARE * self._left), self._left - FEWEST_STEPS * self.parts.per_step(WEIGHTS))

    @property
    def _tranche(self) -> int:
        """The teacher's rollouts in a tranche."""
        return max(self._teachers_part // TRANCHES, FEWEST_STEPS * self.parts.per_step(TEACHER))

    def _forecast(self, known: Costs) -> Forecast:
        trainings = 1 + (-(-self._teachers_part // self._tranche) if self.parts.teacher else 0)
        evaluations = bool(self._search_left) + len(self.levers)
        seconds = sum(part["seconds"] for _, part in (*self.measured, *self.spent))
        seconds += known.to_come(self._search_left, self._left, trainings, evaluations)
        return Forecast(self.budget, (len(self.measured) + evaluations) * len(self.parts.held_out), seconds)

    def _result(self, forecasts: tuple[Forecast, ...], stopped: StoppedEarly | None) -> Improvement:
        used = [lever for lever, _ in self.measured[1:]]
        contributions = [self._contribution(number, lever) for number, lever in enumerate(used)]
        every = (*self.spent, *self.measured)
        return Improvement(
            self.parts.run_dir, *(self.measured[place][1]["report"] for place in (0, -1)), tuple(contributions), forecasts,
            sum(part["rollouts"] for _, part in self.spent), sum(part["seconds"] for _, part in every), self.parts.prompts,
            self.parts.weights if self.parts.weights.exists() else None, stopped,
        )  # fmt: skip

    def _contribution(self, number: int, lever: str) -> Contribution:
        """Return what the lever between an evaluation and the next one contributed."""
        before, after = self.parts.evaluated(number), self.parts.evaluated(number + 1)
        sides = compare(f"before={before}", f"after={after}")
        measure = "success" if sides.value("success", 0) is not None else "reward"
        entries = [entry for name, entry in self.spent if name == lever]
        rollouts, seconds, dollars = (
            sum(entry.get(name, 0) for entry in entries) for name in ("rollouts", "seconds", "dollars")
        )
        return Contribution(lever, measure, sides.difference(measure, 1), rollouts, seconds, dollars)


def _can_search(budget: int, tasks: Sequence[Any]) -> bool:
    searched = int(SEARCH_SHARE * budget)
    return searched >= Limits(searched).fewest(tasks)
