"""An open run folder: the training loop's arrows one by one, with their state kept on disk.

Knows nothing about when to do what: ``training.py`` puts the pieces in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from art_core import scoring
from art_core.attribution import exempt
from art_core.capture import Door
from art_core.config import TrainConfig, model_folder, weights_hash
from art_core.errors import ConfigError, StoreError
from art_core.folder import checkpoint_step, checkpoints, last_checkpoint, new_run_dir
from art_core.plugins import Plugins
from art_core.rollout import Rollout, check_captured, gather_limited, run_once, task_input
from art_core.store import Store
from art_core.token_tree import build_tree
from art_core.types import Engine, Group, GroupReward, Learner, Loss, Reward, RunAgent, Sampling, Weights

T = TypeVar("T")
RESERVED = frozenset({"seconds", "reward", "success", "step"})
"""Metrics of the whole step; a learner's own of these names get its prefix."""


class Run:
    """Collect, score, learn; opened by ``open_run`` and closed by leaving its ``async with`` block."""

    def __init__(
        self,
        run_dir: str | Path | None,
        config: TrainConfig,
        *,
        engine: str | Engine = "embedded",
        learner: str | Learner = "auto",
        loss: str | Loss = "grpo",
        executor: str | object | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        self.config = config
        self.run_dir = Path(run_dir) if run_dir else new_run_dir(config.model)
        self.plugins = plugins or Plugins()
        self.folder = model_folder(config.model)
        """Where the start weights are."""
        self._engine, self._learner_choice, self._loss, self._executor = engine, learner, loss, executor
        self._learner: Learner | None = None
        self._checkpointed = -1
        self.step = 0
        """Steps done, those that taught nothing included."""
        self.on_rollout: Callable[[], None] = lambda: None
        """Called after every finished rollout, for progress displays."""
        self._spent: dict[str, float] = {}
        """Seconds of the step that is under way, by arrow."""

    async def __aenter__(self) -> Run:
        self._claim_folder()
        self.store = Store(self.run_dir / "run.sqlite")
        try:
            self._check_model()
            self.plugins.call("redirect_clients")
            self.door = await self._open_door()
        except BaseException:
            self.store.close()
            raise
        try:
            await self._resume()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._learner is not None and self._checkpointed != self.step:
                await self.checkpoint()
        finally:
            await self._close()

    async def _close(self) -> None:
        await self.door.stop()
        self.store.close()

    def _claim_folder(self) -> None:
        try:
            (self.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the run folder {self.run_dir} cannot be made: {error}; give another run_dir=") from error

    def _check_model(self) -> None:
        """Refuse a run folder that was begun with other start weights."""
        mine = weights_hash(self.folder)
        theirs = self.store.meta("start_weights")
        if theirs is None:
            self.store.set_meta("start_weights", mine)
            self.store.set_meta("model", self.config.model)
            self.store.set_meta("config", dataclasses.asdict(self.config))
        elif theirs != mine:
            raise ConfigError(
                f"the run folder {self.run_dir} belongs to another model: it was begun with {self.store.meta('model')!r} "
                f"(weights {theirs[:12]}), this is {self.config.model!r} (weights {mine[:12]}); "
                "give another run_dir=, or the model that it was begun with"
            )

    async def _open_door(self) -> Door:
        engine, factory = self._engine, None
        if isinstance(engine, str):
            factory = functools.partial(self.plugins.choose("register_engines", engine), self.folder, self.config)
        return await Door.start(
            factory or (lambda: engine),
            functools.partial(Store, self.run_dir / "run.sqlite"),
            host=self.config.host,
            port=self.config.port,
            # An object is in this process already, so capture runs in a thread beside it.
            process=factory is not None,
            dialects=self.plugins.registered("register_dialects"),
        )

    async def _resume(self) -> None:
        newest = last_checkpoint(self.run_dir)
        if newest is None:
            return
        self.step = self._checkpointed = checkpoint_step(newest)
        learner = await self.learner()
        learner.restore(newest)
        await self.door.load(learner.weights())

    async def learner(self) -> Learner:
        """Return the learner, loaded at the first call."""
        if self._learner is None:
            if isinstance(self._learner_choice, str):
                factory = self.plugins.choose("register_learners", self._learner_choice)
                self._learner = await in_thread(factory, self.folder, self.config, self._loss_function())
            else:
                self._learner = self._learner_choice
        return self._learner

    def _loss_function(self) -> Loss:
        loss = self._loss
        return self.plugins.choose("register_losses", loss) if isinstance(loss, str) else loss

    def adapt(self, agent: object) -> RunAgent:
        """Return the function that runs ``agent`` once."""
        return self.plugins.adapt(agent)

    def rollout(
        self, task: Any, *, split: str = "train", sampling: Sampling | None = None, group_id: str = ""
    ) -> Rollout:
        """Return a rollout to open with ``async with``; every call to its address is recorded."""
        return Rollout(
            task,
            self.door,
            self.store,
            sampling=self.training_sampling if sampling is None else sampling,
            split=split,
            step=self.step,
            group_id=group_id or uuid.uuid4().hex,
            passthrough=frozenset(self.config.passthrough),
        )

    @property
    def training_sampling(self) -> Sampling:
        """What every training rollout samples with, whatever the agent asks for."""
        return Sampling(self.config.temperature, top_p=1.0, top_k=0)

    async def collect(
        self,
        agent: object,
        tasks: Sequence[Any],
        *,
        group_size: int | None = None,
        split: str = "train",
        sampling: Sampling | None = None,
        to_input: Callable[[Any], Any] = task_input,
        to_output: Callable[[Any], Any] | None = None,
    ) -> list[Group]:
        """Run ``agent`` ``group_size`` times on every task and return a group per task, in order.

        A run that fails is a trajectory with ``error``. Raises CaptureError where no run made a recorded call.
        """
        check_tasks(tasks)
        widen_default_executor(self.config.max_concurrent)
        run, size = self.adapt(agent), group_size or self.config.group_size
        rollouts = [
            self.rollout(task, split=split, sampling=sampling, group_id=group_id)
            for task, group_id in ((task, uuid.uuid4().hex) for task in tasks)
            for _ in range(size)
        ]

        async def one(rollout: Rollout) -> Any:
            trajectory = await run_once(rollout, run, to_input(rollout.task), timeout=self.config.rollout_timeout)
            self.on_rollout()
            return dataclasses.replace(trajectory, output=to_output(trajectory.output)) if to_output else trajectory

        with self._timed("rollout_seconds"):
            trajectories = await self._execute([functools.partial(one, rollout) for rollout in rollouts])
        groups = [Group(task, tuple(trajectories[i * size : (i + 1) * size])) for i, task in enumerate(tasks)]
        check_captured(groups)
        return groups

    async def _execute(self, jobs: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
        executor = self._executor
        if executor is None:
            return await gather_limited(jobs, self.config.max_concurrent)
        if isinstance(executor, str):
            executor = self.plugins.choose("register_executors", executor)()
        return await executor.run(jobs)

    async def score(self, groups: Sequence[Group], reward: str | Reward | GroupReward) -> list[Group]:
        """Return the groups with rewards and advantages; what was scored is stored."""
        judge = self.plugins.choose("register_rewards", reward)() if isinstance(reward, str) else reward
        with exempt(), self._timed("score_seconds"):
            scored = await asyncio.gather(*(scoring.score(group, judge) for group in groups))
        scored = [scoring.advantages(group, self.config.advantage) for group in scored]
        by = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        for group in scored:
            runs = group.trajectories
            self.store.add_scores(
                [t.rollout_id for t in runs],
                [t.reward for t in runs],
                metrics=[t.metrics for t in runs],
                advantages=group.advantages,
                by=by,
            )
        return scored

    async def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take one optimizer step on the groups that have contrast, serve the new weights, and return metrics.

        Counts as a step, and is written to the run folder as one, even where no group had contrast. Once begun it is
        finished, also where the caller is cancelled meanwhile.
        """
        return await finished(self._learn(groups))

    async def _learn(self, groups: Sequence[Group]) -> dict[str, float]:
        teachable = [group for group in groups if scoring.has_contrast(group)]
        metrics = {**summary(groups), "groups_with_contrast": float(len(teachable))}
        with self._timed("learn_seconds"):
            if teachable:
                metrics |= await self._update(teachable)
        metrics |= {**self._spent, "seconds": sum(self._spent.values())}
        self._spent.clear()
        self.step += 1
        self.store.add_step(self.step, metrics)
        if self._learner is not None and self.step % self.config.checkpoint_every == 0:
            await self.checkpoint()
        return metrics

    async def _update(self, teachable: Sequence[Group]) -> dict[str, float]:
        """One optimizer step, while the engine holds new calls back, and the swap to the new weights."""
        learner = await self.learner()
        await self.door.pause()
        try:
            trees = await in_thread(lambda: [build_tree(g.trajectories, g.advantages) for g in teachable])
            metrics = await in_thread(learner.step, trees)
            weights = await in_thread(learner.weights)
            if weights.live is None:
                weights = await self._save_for_engine(learner, weights)
        finally:
            await self.door.resume()
        await self.door.load(weights)
        return {f"learner/{name}" if name in RESERVED else name: value for name, value in metrics.items()}

    def forget_timings(self) -> None:
        """Leave what was done since the last step out of the next step's seconds: it was an evaluation."""
        self._spent.clear()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - started

    async def _save_for_engine(self, learner: Learner, weights: Weights) -> Weights:
        folder = self.run_dir / "serving"
        await in_thread(learner.save, folder)
        return dataclasses.replace(weights, path=folder)

    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) of the steps done; of a step that was done again after an interruption, the last."""
        newest = dict(self.store.steps())
        return [(step, newest[step]) for step in sorted(newest) if step <= self.step]

    async def checkpoint(self) -> Path:
        """Save weights, optimizer and random state under ``checkpoints/``, and drop the oldest over the limit."""
        learner = await self.learner()
        self.store.flush()
        folder = self.run_dir / "checkpoints" / f"step-{self.step:06d}"
        await in_thread(learner.save, folder)
        self._checkpointed = self.step
        if self.config.keep_checkpoints is not None:
            for old in checkpoints(self.run_dir)[: -self.config.keep_checkpoints]:
                shutil.rmtree(old)
        return folder


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; when cancelled, wait for its end first, so that nothing is left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread to its end, also where the caller is cancelled meanwhile."""
    return await finished(asyncio.to_thread(function, *arguments))


def summary(groups: Sequence[Group]) -> dict[str, float]:
    """Return the means over all trajectories: reward, every metric that a reward function set, calls, failures."""
    trajectories = [t for g in groups for t in g.trajectories]
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        numbers: Mapping[str, float | None] = {**trajectory.metrics, "reward": trajectory.reward}
        for name, value in numbers.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    means = {name: sum(them) / len(them) for name, them in values.items()}
    return means | {
        "trajectories": float(len(trajectories)),
        "failed": float(sum(t.error is not None for t in trajectories)),
        "unscored": float(sum(t.reward is None for t in trajectories)),
        "calls": float(sum(len(t.calls) for t in trajectories)),
        "sampled_tokens": float(sum(len(c.sampled_ids) for t in trajectories for c in t.calls)),
    }


def widen_default_executor(threads: int) -> None:
    """Let the running loop's default executor have a thread per rollout.

    Frameworks run sync nodes and tools there; with asyncio's default, a few threads for each core, most rollouts would wait.
    """
    loop = asyncio.get_running_loop()
    if loop not in _widened:
        loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="asyncio"))
        _widened.add(loop)


_widened: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def check_tasks(tasks: Sequence[Any]) -> None:
    """Raise ConfigError where there is nothing to run."""
    if len(tasks) == 0:
        raise ConfigError("the task list is empty: give at least one task (any JSON-able value)")
