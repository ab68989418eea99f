"""Searches for better prompts with GEPA, which evaluates them by rollouts of the agent, all recorded in one run folder."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import inspect
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import art_core as art
from art_core import Group, Report, Run, Trajectory
from art_core.errors import ArtError, CaptureError, ConfigError, RewardError, ServingDied
from art_core.plugin_api import (
    Display,
    check_tasks,
    describe_error,
    display,
    plural,
    reward_name,
    task_id,
    without_keys,
)
from art_core.types import Engine, Reward, Sampling
from art_gepa.components import Component, components
from art_gepa.plugins import WithCandidate
from art_gepa.prompts import Change, write
from art_gepa.reflection import Reflector, records, shows

PROMPTS = "prompts.json"
"""The best texts, written when a search ends."""
CANDIDATE = "candidate.json"
"""The texts of the candidate that is being evaluated."""
MINIBATCH = 3
"""Number of tasks that the reflector sees at a time."""
FEW = 8
"""With fewer validation tasks, constant texts are found from all tasks."""
FAILED = 0.0
"""The score of a rollout without a reward."""
FEWEST_TASKS = 2


@dataclass(frozen=True)
class Result:
    """The result of a search."""

    components: tuple[Component, ...]
    changes: tuple[Change, ...]
    """The best texts that differ from the agent's own."""
    before: float
    """The mean score on the validation tasks with the agent's own texts."""
    after: float
    """The mean score with ``changes``."""
    held_out: tuple[Report, Report] | None
    """Reports on the held-out tasks, with the agent's own texts and with ``changes``."""
    rollouts: int
    """Number of rollouts, including those of held-out tasks."""
    reflections: int
    cost: float
    """Cost of the reflections, in US dollars."""
    file: Path = field(repr=False)
    """Holds all texts, for ``WithPrompts``."""

    def patch(self) -> str:
        """Return a diff of each changed text, for the owner of the prompts."""
        parts = []
        for change in self.changes:
            old, new = change.find.splitlines(), change.replace.splitlines()
            parts.append("\n".join(difflib.unified_diff(old, new, change.component, "better", lineterm="", n=100)))
        return "\n\n".join(parts)


async def optimize(
    agent: object,
    tasks: Sequence[Any],
    *,
    model: str | Path,
    reward: str | Reward,
    reflector: str | Callable[[Any], str],
    rollouts: int = 200,
    max_cost: float | None = None,
    perfect: float = 1.0,
    held_out: Sequence[Any] | None = None,
    run_dir: str | Path,
    engine: str | Engine = "embedded",
    seed: int = 0,
    progress: bool | Display = True,
    **settings: Any,
) -> Result:
    """Search for prompts with which an unchanged agent gets better rewards.

    ``model`` is as in ``art.evaluate``, but no run folder: a name, a model folder, or ``"live"`` for the agent's own providers.
    ``rollouts`` is the budget, beside which each held-out task costs two; ``max_cost`` ends the search once the reflector, a
    LiteLLM string or a function ``(prompt) -> text``, has cost so many US dollars, and ``perfect`` once a mean reward can't be
    better. Half of the tasks, or fewer if they are many, choose the best texts; the reflector sees rollouts of the others. The
    same call with the ``run_dir`` of an interrupted search continues it. ``settings`` are fields of ``TrainConfig``.
    """
    for name, some in (("tasks", tasks), ("held_out", held_out)):
        if some is not None:
            check_tasks(some, name)
    if len(tasks) < FEWEST_TASKS:
        raise ConfigError(
            f"{plural(len(tasks), 'task')} can't show which prompt is better; pass at least {FEWEST_TASKS}"
        )
    limits = Limits(rollouts, max_cost, perfect)
    if rollouts < (fewest := limits.fewest(tasks)):
        raise ConfigError(
            f"rollouts={rollouts} is too few for a single step on {len(tasks)} tasks; pass {fewest} or more"
        )
    parts: dict[str, Any] = {"engine": "live" if model == "live" else engine, "seed": seed}
    parts["plugins"] = WithCandidate(Path(run_dir).expanduser() / CANDIDATE)
    screen = display(progress)
    with screen:
        screen.phase("starting the gateway" if model == "live" else "starting the engine", None)
        async with art.open_run(run_dir, model=str(model), **parts, **settings) as run:
            resolved = run.reward(reward)
            check_same(run, {"agent": agent, "reward": resolved, "tasks": sorted(map(task_id, tasks))})
            run.on_rollout = screen.advance
            search = _Search(run, agent, resolved, screen, asyncio.get_running_loop())
            return await search.best(list(tasks), Reflector(reflector, run.store), limits, held_out, seed)


def check_same(run: Run, parts: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run folder belongs to another search, whose rollouts would be reused for this one."""
    now = {name: identity(part) for name, part in parts.items()}
    begun = run.store.meta("search") or now
    if different := [name for name in now if begun[name] != now[name]]:
        raise ConfigError(
            f"{run.run_dir} belongs to another search (different: {', '.join(different)}); pass another run_dir, or what it was "
            "started with"
        )
    run.store.set_meta("search", now)


def identity(part: Any) -> str:
    """Return a name and, if there is source code, its hash."""
    if isinstance(part, list):
        return _digest(part)
    named = part if hasattr(part, "__qualname__") else type(part)
    try:
        source = _digest(inspect.getsource(named))[:12]
    except (OSError, TypeError):
        source = "no source"
    return f"{named.__module__}.{named.__qualname__} ({source})"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass(frozen=True)
class Limits:
    """When a search ends."""

    rollouts: int
    cost: float | None = None
    """Maximum cost of the reflector, in US dollars."""
    perfect: float = 1.0
    """A mean reward that can't be better."""

    def validation(self, tasks: Sequence[Any]) -> int:
        """Return the number of validation tasks: half of all, but at most a fifth of the budget."""
        return max(1, min(len(tasks) // 2, self.rollouts // 5))

    def first(self, tasks: Sequence[Any]) -> int:
        """Return how many tasks are rolled out before the first step: more than those to choose by if they are few, because a
        prompt that contains the task would look constant."""
        validation = self.validation(tasks)
        return len(tasks) if validation < FEW else validation

    def fewest(self, tasks: Sequence[Any]) -> int:
        """Return the rollouts of a search with a single step."""
        return self.first(tasks) + self.step(self.validation(tasks))

    def step(self, validation: int) -> int:
        """Return the maximum of rollouts in a step: a minibatch with the old and the new text, then the validation tasks."""
        return 2 * MINIBATCH + validation


class _Search:
    """One search, and GEPA's adapter. GEPA runs in a thread."""

    propose_new_texts = None  # GEPA reads this attribute; the reflector proposes

    def __init__(self, run: Run, agent: object, reward: Any, screen: Display, loop: asyncio.AbstractEventLoop) -> None:
        self.run, self.agent, self.reward, self.screen = run, agent, reward, screen
        self._loop = loop
        self._stop = threading.Event()
        self._rolling: asyncio.Task[Any] | None = None
        self.components: dict[str, Component] = {}
        self._collected: dict[str, int] = {}
        """Key -> number of rollouts."""

    async def best(
        self, tasks: list[Any], reflector: Reflector, limits: Limits, held_out: Sequence[Any] | None, seed: int
    ) -> Result:
        """Return the best texts, and measure them on the held-out tasks."""
        shuffled = random.Random(seed).sample(tasks, len(tasks))
        validation, training = shuffled[: (half := limits.validation(tasks))], shuffled[half:]
        self.screen.say(
            f"{plural(len(validation), 'validation task')}, {len(training)} for {reflector.name}; at most "
            f"{plural(limits.rollouts, 'rollout')}"
        )
        seen = await self._groups(validation, {})
        if more := limits.first(tasks) - len(validation):
            seen = [*seen, *await self._groups(training, {})]
            limits = replace(limits, rollouts=limits.rollouts - more)
        found = self._found([t for group in seen for t in group.trajectories])
        if not found:
            raise ConfigError(
                "nothing to optimise: the agent's calls share no system prompt, tool description or example; see them in "
                f"{self.run.run_dir}"
            )
        self.components = {it.name: it for it in found}
        for it in found:
            self.screen.say(f"{it.name}: {it.text[:100]!r}{' ...' if it.text[100:] else ''}")
        outcome = await self._in_thread(lambda: self._gepa(training, validation, reflector, limits, seed), reflector)
        if reflector.failure:
            raise ArtError(
                f"the reflector {reflector.name} failed: {describe_error(reflector.failure)}; to continue, repeat the call with "
                f"run_dir={str(self.run.run_dir)!r}"
            ) from reflector.failure
        texts, scores = self._texts(outcome.best_candidate), outcome.val_aggregate_scores
        reports = None
        if held_out:
            reports = await self._report(held_out, {}), await self._report(held_out, outcome.best_candidate)
        write(self.run.run_dir / PROMPTS, texts)
        return Result(
            tuple(found), tuple(it for it in texts if it.find != it.replace), scores[0], scores[outcome.best_idx], reports,
            sum(self._collected.values()), reflector.answers, reflector.total_cost, self.run.run_dir / PROMPTS,
        )  # fmt: skip

    def _found(self, rolled: Sequence[Trajectory]) -> list[Component]:
        """Return the components that more than one task has; a change of the others would help a single task."""
        found = components(call for t in rolled for call in t.calls)
        shown = {it.name: len({task_id(t.task) for t in rolled if shows(t, it, it.text)}) for it in found}
        common = [it for it in found if shown[it.name] > 1 or len({task_id(t.task) for t in rolled}) == 1]
        if rare := [it.name for it in found if it not in common]:
            self.screen.say(f"not optimised, because only one task has them: {', '.join(rare)}")
        return common

    async def _in_thread(self, work: Callable[[], Any], reflector: Reflector) -> Any:
        """Run ``work`` in a thread and return its result. The thread has ended even if this raises."""
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        finally:
            self._stop.set()
            if not thread.done():
                if reflector.asking:
                    self.screen.say(f"waiting for the answer of {reflector.name}, which is stored")
                running = {thread}
                if self._rolling is not None:
                    self._rolling.cancel()
                    running.add(self._rolling)
                await asyncio.wait(running)
                if not thread.cancelled():
                    thread.exception()  # retrieved, so that asyncio doesn't log it

    def _gepa(self, training: list[Any], validation: list[Any], reflector: Reflector, limits: Limits, seed: int) -> Any:
        import gepa
        from gepa.utils import ScoreThresholdStopper

        def ends(state: Any) -> bool:
            left = limits.rollouts - state.total_num_evals
            return self._stop.is_set() or bool(reflector.failure) or left < limits.step(len(validation))

        # Without GEPA's cache, which confuses training and validation tasks of the same index; the store caches rollouts.
        return gepa.optimize(
            {it.name: it.text for it in self.components.values()}, training, validation, adapter=self,
            reflection_lm=reflector, max_metric_calls=limits.rollouts, max_reflection_cost=limits.cost,
            perfect_score=limits.perfect, reflection_minibatch_size=MINIBATCH, logger=self, seed=seed,
            stop_callbacks=[ScoreThresholdStopper(limits.perfect), ends],
        )  # fmt: skip

    def log(self, message: str) -> None:
        """Show the first line of GEPA's message, unless it is a traceback, whose error the line before it names."""
        line = message.splitlines()[0]
        if not line.startswith("Traceback"):
            self.screen.say(without_keys(line))

    def evaluate(self, batch: list[Any], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Roll out each task once with the candidate's texts, and return the scores."""
        from gepa import EvaluationBatch

        if self._stop.is_set():
            raise CancelledError
        rolled = asyncio.run_coroutine_threadsafe(self._rolled(batch, candidate), self._loop).result()
        scores = [FAILED if t.reward is None else t.reward for t in rolled]
        return EvaluationBatch([t.output for t in rolled], scores, rolled if capture_traces else None)

    async def _rolled(self, tasks: Sequence[Any], candidate: Mapping[str, str]) -> list[Trajectory]:
        """Return a rollout of each task. If all of them fail, the candidate is bad, and the search continues."""
        if self._stop.is_set():  # it ended before this began
            raise CancelledError
        self._rolling = asyncio.current_task()
        try:
            return [group.trajectories[0] for group in await self._groups(tasks, candidate)]
        except (RewardError, CaptureError) as error:
            if isinstance(error, ServingDied):
                raise
            return [Trajectory(task=task, calls=(), error=describe_error(error)) for task in tasks]

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], evaluated: Any, names: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the reflector's records by component."""
        rolled: Sequence[Trajectory] = evaluated.trajectories
        shown = {name: records(self.components[name], candidate[name], rolled) for name in names}
        return {name: those for name, those in shown.items() if those}

    def _texts(self, candidate: Mapping[str, str]) -> tuple[Change, ...]:
        """Return the candidate's texts. Unchanged ones are included, so that no other change replaces a part of them."""
        return tuple(
            Change(it.name, it.text, candidate.get(it.name, it.text), it.tool, it.role)
            for it in self.components.values()
        )

    async def _groups(self, tasks: Sequence[Any], candidate: Mapping[str, str], split: str = "prompts") -> list[Group]:
        """Roll out and score each task with a candidate's texts, or read the rollouts of an earlier start."""
        texts = self._texts(candidate)
        write(self.run.run_dir / CANDIDATE, texts)
        changed = [[it.component, it.replace] for it in texts if it.find != it.replace]
        key = f"{split} {_digest([changed, [task_id(task) for task in tasks]])}"
        groups = await self.run.collect(
            self.agent, tasks, group_size=1, split=split, sampling=Sampling(), key=key,
            scored_by=reward_name(self.reward),
        )  # fmt: skip
        self._collected[key] = len(groups)
        unscored = [group for group in groups if group.trajectories[0].reward is None]
        try:
            scored = iter(await self.run.score(unscored, self.reward) if unscored else ())
        except RewardError:
            if len(unscored) == len(groups):
                raise
            scored = iter(unscored)  # their reward fails again
        return [next(scored) if group.trajectories[0].reward is None else group for group in groups]

    async def _report(self, tasks: Sequence[Any], candidate: Mapping[str, str]) -> Report:
        self.screen.phase("held-out tasks", len(tasks))
        groups = await self._groups(tasks, candidate, "eval")
        report = Report(tuple(group.trajectories[0] for group in groups), None, self.run.run_dir)
        self.screen.say(f"held out, {'the agent as it is' if not candidate else 'with the best prompts'}: {report}")
        return report
