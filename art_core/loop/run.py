"""An open run folder: the training loop's arrows one by one, with their state kept on disk; ``train.py`` orders them."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core import losses, scoring
from art_core.attribution import exempt, in_child_processes, rollouts_have_threads
from art_core.config import TrainConfig, check_tasks, model_folder
from art_core.loop import resume_checks, sft
from art_core.loop.capture_checks import check_captured, check_sampled, note_elsewhere
from art_core.loop.checkpoints import Checkpoints
from art_core.loop.metrics import Throughput, Timer, joined, left_out, oldest, seconds_of_step, staleness, summary
from art_core.loop.metrics_file import append_metrics, write_metrics
from art_core.loop.rewards import Rewards, keep_scores, name_of, score_all
from art_core.loop.rollout import Rollout, describe, task_input
from art_core.loop.rollout_batch import RolloutBatch, resume_plans
from art_core.loop.update import Updates
from art_core.loop.watchdog import Watchdog
from art_core.plugins import Plugins, redirect_clients
from art_core.runtime.threads import finished, in_thread
from art_core.serving.policy_engine import PolicyEngine, sampling_seed
from art_core.store import Store
from art_core.store.run_folder import checkpoint_of, checkpoints, claimed, new_run_dir, remove_unused
from art_core.token_tree import group_tree
from art_core.types import Engine, Group, GroupReward, Learner, Loss, Reward, RunAgent, Sampling, TokenTree, Trajectory


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
        self._engine = PolicyEngine(engine, functools.partial(self.plugins.choose, "register_engines"))
        self._learner_choice, self._loss, self._executor = learner, loss, executor
        self._learner: Learner | None = None
        self._adapted: tuple[object, RunAgent] | None = None
        self.rewards = Rewards(self.plugins, self.run_dir)
        self.terms = resume_checks.Terms()
        self._checkpointed: int | None = None
        self._used = False
        """Whether there may be rollouts or steps in it."""
        self._error: BaseException | None = None
        self._nodes_seen = False
        """Whether ``train_nodes`` have made a call: a step in which they make none is then no mistake of the set-up."""
        self._counted = 0
        """The learner's version after the last counted step: what it holds at another must not be saved as a checkpoint."""
        self._learning = asyncio.Lock()
        """Held by whoever has the learner: its weights change, and calls are held back meanwhile."""
        self.step = 0
        """Steps done, those that taught nothing included."""
        self.on_rollout: Callable[[], None] = lambda: None
        """Called after every finished rollout, for progress displays."""
        self._timer = Timer()
        self.watch = Watchdog(self.run_dir, config.watchdog_seconds)
        # Shared by all that is under way at a time: steps may overlap.
        self._rollouts = asyncio.Semaphore(config.max_concurrent)
        self._scorings = asyncio.Semaphore(config.max_concurrent_scores)

    async def __aenter__(self) -> Run:
        self._resolve_names()
        async with AsyncExitStack() as stack:
            if stack.enter_context(claimed(self.run_dir)):
                stack.push(self._leave)
            stack.enter_context(self.watch)
            self.store = stack.enter_context(Store(self.run_dir / "run.sqlite"))
            self._checkpoints = Checkpoints(self.run_dir, self.store, self.config.keep_checkpoints)
            self._passed = resume_checks.check_begun_with(
                self.store, self.run_dir, self.config, self.folder, self._loss, self._loss_name, self.terms
            )
            self.rewards.begin()
            self.plugins.call("redirect_clients")
            in_child_processes(redirect_clients)
            dialects = self.plugins.registered("register_dialects")
            # Another process of this run has drawn from its seed: runs of one group must not be the same.
            seed = sampling_seed(self.config.seed, len(self.store.openings()))
            opening = self._engine.start(self.folder, replace(self.config, seed=seed), self.run_dir, dialects)
            opened = await self.watch.during("the engine to start", opening)
            self.door = self.watch.door = await stack.enter_async_context(opened)
            if hasattr(self._executor, "__aenter__"):
                await stack.enter_async_context(self._executor)
            self._throughput = self.throughput()
            await self._resume()
            self._stack = stack.pop_all()
        return self

    def _leave(self, kind: object, error: BaseException | None, _: object) -> None:
        """Leave no folder behind that this start made and nothing was recorded in; called when all in it is closed."""
        if (error or self._error) is not None and not self._used:
            remove_unused(self.run_dir)

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._error = error
        self.store.set_meta("ended", describe(error) if error else "")
        async with self._stack, self._learning:
            try:
                if self.step and self._learner is not None and self._learner.version == self._counted:
                    await self._checkpoint()
            finally:
                if isinstance(self._learner_choice, str):  # an object is whose it was before
                    await in_thread(getattr(self._learner, "close", lambda: None))

    def _resolve_names(self) -> None:
        """Look up what was given by name and check what was not, so that a mistake is refused before anything runs."""
        self._loss_name = resume_checks.name_of(self._loss)
        if isinstance(self._loss, str):
            self._loss = self.plugins.choose("register_losses", self._loss)
        self._find_executor()
        self._engine.check()
        if isinstance(self._learner_choice, str):
            getattr(self.plugins.choose("register_learners", self._learner_choice), "check", lambda: None)()
        else:
            resume_checks.check_learner(self._learner_choice, self.config, self._loss, self._loss_name)

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights that are served."""
        return self._counted

    def throughput(self) -> Throughput:
        """Return a count of what the engine computes from now on."""
        return Throughput(self.door.counters)

    async def _resume(self) -> None:
        resumed = bool(checkpoints(self.run_dir))
        # A server that outlives us may have what a learner made in a process that ended before its first checkpoint.
        if resumed or (self._engine.loads_files and self.store.meta("learner")):
            learner = await self.learner()
            if resumed:
                self.step = self._checkpointed = await self._checkpoints.restore(learner)
                self._counted = learner.version
            await self._updates.resume()
        resume_checks.note_begun(self.store, self.run_dir, self._passed, self._loss_name, self.step, self.terms)
        self.store.add_opening(self._counted)
        self.store.set_meta("ended", None)  # so it stays if this process is killed
        write_metrics(self.run_dir, self.history())

    async def learner(self) -> Learner:
        """Return the learner, loaded at the first call."""
        if self._learner is None:
            if isinstance(self._learner_choice, str):
                factory = self.plugins.choose("register_learners", self._learner_choice)
                loading = in_thread(factory, self.folder, self.config, self._loss)
                self._learner = await self.watch.during("the learner to load the model", loading)
            else:
                self._learner = self._learner_choice
            self._counted = self._learner.version
            self._updates = Updates(
                self._learner, self.door, self.store, self.run_dir,
                ahead=self.config.max_staleness, from_files=self._engine.loads_files,
            )  # fmt: skip
            self._used = True
            self.store.set_meta("learner", type(self._learner).__name__)
        return self._learner

    def _find_executor(self) -> Any:
        """Return what runs the agents; None: this process."""
        if isinstance(self._executor, str):
            self._executor = self.plugins.choose("register_executors", self._executor)(self.config)
        return self._executor

    def adapt(self, agent: object) -> RunAgent:
        """Return the function that runs ``agent`` once; plugins are asked at the first call."""
        if self._adapted is None or self._adapted[0] is not agent:
            self._adapted = agent, (self._find_executor() or self.plugins).adapt(agent)
        return self._adapted[1]

    def reward(self, reward: str | Reward | GroupReward) -> Reward | GroupReward:
        """Return what a reward's name stands for, anything else as it is; made and begun at the first call.

        Raises ConfigError for an unknown name, RewardError for what is no reward.
        """
        return self.rewards.find(reward)

    def rollout(
        self,
        task: Any,
        *,
        split: str = "train",
        sampling: Sampling | None = None,
        group_id: str = "",
        step: int | None = None,
        continues: str | None = None,
    ) -> Rollout:
        """Return a rollout to open with ``async with``; every call to its address is recorded.

        ``step`` is noted in the store; None: the one to be done next, and for an evaluation the last that was done. What was
        answered in the rollout that it ``continues`` is answered again.
        """
        if step is None:
            step = self.step + 1 if split == "train" else self.step
        self._used = True
        return Rollout(
            task,
            self.door,
            self.store,
            # Training imposes these, whatever the agent asks for.
            sampling=sampling or Sampling(self.config.temperature, top_p=1.0, top_k=0),
            split=split,
            step=step,
            group_id=group_id or uuid.uuid4().hex,
            continues=continues,
            passthrough=frozenset(self.config.passthrough),
            nodes=self.config.train_nodes if self.config.other_nodes == "passthrough" else (),
        )

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
        step: int | None = None,
        allow_no_calls: bool = False,
        key: str | None = None,
        scored_by: str | None = None,
    ) -> list[Group]:
        """Run ``agent`` ``group_size`` times on every task and return a group per task, in order.

        A run that fails is a trajectory with ``error``. With a ``key``, runs that were finished under the same one before, by
        this process or one that ended, are read from the store and not made again, with their scores where the reward named
        ``scored_by`` gave them to all of a group; runs that were cut off go on from their last answer, as long as the agent asks
        the same. Raises CaptureError where no run made a recorded call, unless ``allow_no_calls``, or at first none of
        ``train_nodes``. ``step`` is as in ``rollout``.
        """
        check_tasks(tasks)
        rollouts_have_threads()
        run_agent, size = self.adapt(agent), group_size or self.config.group_size
        new_rollout = functools.partial(self.rollout, split=split, sampling=sampling, step=step)
        batch = RolloutBatch(
            run_agent, new_rollout, getattr(run_agent, "gate", self._rollouts), to_input, to_output,
            self.config.rollout_timeout, self.on_rollout, self.watch,
        )  # fmt: skip
        with self._timer.timed("rollout_seconds"):
            plans = await in_thread(resume_plans, self.store, key, tasks, size, scored_by)
            groups = await batch.groups(tasks, plans, size)
        note_elsewhere(self.store, groups)
        if not allow_no_calls:
            nodes = () if self._nodes_seen or self.step or split != "train" else self.config.train_nodes
            check_captured(groups, nodes)
            self._nodes_seen = self._nodes_seen or split == "train"
        return groups

    async def score(self, groups: Sequence[Group], reward: str | Reward | GroupReward) -> list[Group]:
        """Return the groups with rewards and advantages, which are stored; RewardError if the reward raises for all."""
        resolved = self.reward(reward)
        name = name_of(resolved)

        async def one(group: Group) -> Group:
            scored = scoring.score(group, resolved, self.config.score_timeout)
            return await self.watch.during(f"the reward {name} to score", scored, group.task)

        keep = functools.partial(keep_scores, self.store, name, self.config.advantage)
        with exempt(), self._timer.timed("score_seconds"):
            scored = await score_all(groups, one, keep, self._scorings)
        await in_thread(self.store.flush)
        return scored

    async def learn(self, groups: Sequence[Group], *, seconds: Mapping[str, float] | None = None) -> dict[str, float]:
        """Take one optimizer step on the groups that have contrast, serve the new weights, and return metrics.

        Groups without advantages get them from their rewards. Counts as a step, and is written to the run folder as one,
        even where no group had contrast. With ``max_staleness`` groups with an older call are left out and counted as
        ``groups_stale``. Once begun it is finished, also where the caller is cancelled meanwhile; steps that are asked for at
        the same time are taken one after the other. ``seconds`` are those that the groups took, by arrow; None: what this
        run's ``collect`` and ``score`` took since the last step.
        """
        return await finished(self._learn(groups, self._timer.taken() if seconds is None else dict(seconds)))

    async def _learn(self, groups: Sequence[Group], seconds: dict[str, float]) -> dict[str, float]:
        groups = [g if g.advantages else scoring.advantages(g, self.config.advantage) for g in groups]
        teachable = self.teachable(groups)
        check_sampled(teachable)
        metrics = {**summary(groups), "groups_with_contrast": float(len(teachable))}
        async with self._learning:
            with self._timer.timed("learn_seconds"), self.watch.doing(f"step {self.step + 1} to be learnt"):
                if teachable:
                    metrics = await self._update_within_bound(teachable, metrics)
            return await self._finish_step(metrics, seconds)

    async def learn_sft(
        self,
        trajectories: Sequence[Trajectory],
        *,
        min_reward: float | None = None,
        epochs: int = 1,
        batch_size: int = 32,
    ) -> list[dict[str, float]]:
        """Imitate the trajectories: raise the likelihood of what was sampled in them, by supervised steps (``losses.sft``).

        Taken are those without an error and, with ``min_reward``, with at least that reward; of them the calls of
        ``train_nodes``. Every epoch goes through them in an order of its own, ``batch_size`` for one optimizer step. Each step
        counts as one of the run: it is served, written to the run folder and checkpointed, and its metrics are an item of the
        list. Only sampled tokens are trained, at temperature 1, whatever theirs was: the model itself should say them; calls
        that were cut off at their token limit too, whatever ``overlong`` says. Raises ConfigError where nothing is left.
        """
        good, seed = sft.chosen(trajectories, min_reward, self.config.train_nodes), f"{self.config.seed}/{self.step}"
        return [await finished(self._imitate(groups)) for groups in sft.batches(good, epochs, batch_size, seed)]

    async def _imitate(self, groups: Sequence[Group]) -> dict[str, float]:
        async with self._learning:
            with self._timer.timed("learn_seconds"), self.watch.doing(f"step {self.step + 1} to be learnt"):
                learnt = await self._update(groups, sft.tree, losses.sft)
            # Other weights may have sampled these, at another temperature: the gap would say nothing.
            learnt.pop("logprob_gap", None)
            return await self._finish_step(joined(summary(groups), learnt), {})

    async def _finish_step(self, metrics: dict[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        metrics |= seconds_of_step({**seconds, **self._timer.taken()})
        metrics = joined(metrics, self.rewards.account(), "account")
        metrics |= {k: v for k, v in (await self._throughput.taken()).items() if k == "cache_hit_rate"}
        self.store.add_step(self.step + 1, metrics)
        await in_thread(self.store.flush)
        self.step += 1
        append_metrics(self.run_dir, self.step, metrics)
        if self._learner is not None:
            self._counted = self._learner.version
            if self.step % self.config.checkpoint_every == 0:
                await self._checkpoint()
        return metrics

    def teachable(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that a step learns from, with the calls of ``train_nodes`` only: those with contrast in these."""
        trained = [scoring.of_nodes(group, self.config.train_nodes) for group in groups]
        return [g for g in trained if scoring.has_contrast(g) and any(t.calls for t in g.trajectories)]

    def tree(self, group: Group) -> TokenTree:
        """Return a group with advantages as the token tree that a step trains on: the calls of ``train_nodes``."""
        overlong = self.config.overlong or ("drop" if losses.drops_overlong(self._loss) else "train")
        return group_tree(scoring.of_nodes(group, self.config.train_nodes), drop_overlong=overlong == "drop")

    async def _update_within_bound(self, teachable: Sequence[Group], metrics: dict[str, float]) -> dict[str, float]:
        """Train on the groups that are new enough; without ``max_staleness`` on all, because nothing runs ahead.

        Returns ``metrics`` with those of the update.
        """
        version, bound = (await self.learner()).version, self.config.max_staleness
        trained = [group for group in teachable if not bound or oldest(group, version) <= bound]
        if bound:
            metrics |= {"groups_stale": float(len(teachable) - len(trained))}
        if trained:
            metrics = joined(metrics | staleness(trained, version), await self._update(trained, self.tree))
        return metrics

    async def _update(
        self, groups: Sequence[Group], tree: Callable[[Group], TokenTree], loss: Loss | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on the groups and serve its weights; return the learner's metrics, and what was left out."""
        trees = await in_thread(lambda: [tree(group) for group in groups])
        await self.learner()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        learnt = await self._updates.take(trees, trajectories, loss=loss, step=self.step + 1)
        return learnt | left_out(trees, trajectories)

    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) of the steps done; of a step that was done again after an interruption, the last."""
        return self.store.history(self.step)

    @property
    def checkpointed(self) -> Path | None:
        """The checkpoint of the current weights, if there is one."""
        return checkpoint_of(self.run_dir, self.step)

    async def checkpoint(self) -> Path:
        """Save weights, optimizer and random states under ``checkpoints/``, once a step; drop the oldest, but not the best."""
        async with self._learning:
            return await self._checkpoint()

    async def _checkpoint(self) -> Path:
        if self._checkpointed != self.step:
            saving = self._checkpoints.save(await self.learner(), self.step, self._counted)
            await self.watch.during(f"the checkpoint of step {self.step} to be written", saving)
            self._checkpointed = self.step
        return self._checkpoints.folder(self.step)
