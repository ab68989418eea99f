"""An open run folder and the loop's verbs: collect, score, learn. ``training.py`` calls them in order."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core import losses, scoring
from art_core.attribution import exempt, use_rollout_executor
from art_core.config import LIVE, TrainConfig, check_tasks
from art_core.errors import ConfigError
from art_core.loop import sft
from art_core.loop.capture_checks import check_captured, check_sampled, note_elsewhere
from art_core.loop.learning import Learning
from art_core.loop.metrics import Throughput, Timer, group_metrics, merge_metrics, staleness, untrained_shares
from art_core.loop.metrics_file import append_metrics, write_metrics
from art_core.loop.resume_plans import finished_trajectories, group_id, resume_plans
from art_core.loop.rewards import keep_scores, reward_name, score_all
from art_core.loop.rollout import Rollout, task_input
from art_core.loop.rollout_batch import RolloutBatch
from art_core.loop.setup import Setup
from art_core.loop.temperature import temperature_after
from art_core.loop.watchdog import Watchdog
from art_core.runtime.memory import used_memory
from art_core.runtime.threads import finished, in_thread
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, last_checkpoint
from art_core.token_tree import group_tree
from art_core.types import Group, GroupReward, Learner, Loss, Reward, Sampling, TokenTree, Trajectory


class Run:
    """Collect, score, learn; ``open_run`` opens it, and leaving the ``async with`` block closes it."""

    def __init__(self, setup: Setup, store: Store, serving: ServingProxy, learning: Learning, watch: Watchdog) -> None:
        self.run_dir, self.model_folder = setup.run_dir, setup.model_folder
        self.plugins, self.rewards = setup.plugins, setup.rewards
        self.store, self.serving, self.watch = store, serving, watch
        self._setup, self._learning = setup, learning
        self.used = learning.loaded
        """Whether the run folder may contain rollouts or steps."""
        self.on_rollout: Callable[[], None] = lambda: None
        """Called after every finished rollout, for progress displays."""
        self._captured: set[str] = set()
        """Splits with calls. Once ``train_nodes`` made one, a step in which they make none is not a mistake of the set-up."""
        self._temperature = -1, self.config, 0.0
        """Of which step and settings, and the temperature."""
        self._timer = Timer()
        self._throughput = self.throughput()
        # Shared by all that is under way at a time: steps may overlap.
        self._rollouts = asyncio.Semaphore(self.config.max_concurrent)
        self._scorings = asyncio.Semaphore(self.config.max_concurrent_scores)

    @property
    def config(self) -> TrainConfig:
        """The settings of the run."""
        return self._setup.config

    @config.setter
    def config(self, config: TrainConfig) -> None:
        self._setup.config = config

    @property
    def step(self) -> int:
        """Steps done, those that taught nothing included."""
        return self._learning.step

    @property
    def version(self) -> int:
        """The number of optimizer steps that produced the served weights."""
        return self._learning.version

    def throughput(self) -> Throughput:
        """Return a count of what the engine computes from now on."""
        return Throughput(self.serving.counters)

    async def learner(self) -> Learner:
        """Return the learner, loaded at the first call."""
        learner = await self._learning.load()
        self.used = True
        return learner

    def reward(self, reward: str | Reward | GroupReward) -> Reward | GroupReward:
        """Return the reward that is registered under a name, anything else as it is.

        Raises ConfigError for an unknown name, RewardError for what isn't a reward.
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

        ``step`` is stored with it; None means the next step, and for an evaluation the last finished one. ``continues``
        is the id of a rollout whose recorded answers are replayed.
        """
        if step is None:
            step = self.step + 1 if split == "train" else self.step
        self.used = True
        return Rollout(
            task,
            self.serving,
            self.store,
            # Training imposes these, whatever the agent requests.
            sampling=sampling or Sampling.plain(self.temperature),
            split=split,
            step=step,
            group_id=group_id or uuid.uuid4().hex,
            continues=continues,
            passthrough=frozenset(self.config.passthrough),
            nodes=self.config.train_nodes if self.config.other_nodes == "passthrough" else (),
            live=self.config.model == LIVE,
        )

    @property
    def temperature(self) -> float:
        """The temperature of training rollouts that begin now."""
        if self._temperature[:2] != (self.step, self.config):
            temperature = temperature_after([metrics for _, metrics in self.history()], self.config)
            self._temperature = self.step, self.config, temperature
        return self._temperature[2]

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

        A rollout that fails is a trajectory with ``error``. With a ``key``, rollouts that ended under it before, in any
        process, are read from the store, with their scores if the reward named ``scored_by`` scored the group. Interrupted
        ones resume after their last answer if the agent repeats its requests. Raises CaptureError if no rollout recorded
        a call, unless ``allow_no_calls``, and in the first step if ``train_nodes`` made none. ``step``: as in ``rollout``.
        """
        check_tasks(tasks)
        use_rollout_executor()
        run_agent, size = self._setup.adapt(agent), group_size or self.config.group_size
        new_rollout = functools.partial(self.rollout, split=split, sampling=sampling, step=step)
        batch = RolloutBatch(
            run_agent, new_rollout, self._setup.gate(agent) or self._rollouts, to_input, to_output,
            self.config.rollout_timeout, self.on_rollout, self.watch,
        )  # fmt: skip
        with self._timer.timed("rollout_seconds"):
            plans = await in_thread(resume_plans, self.store, key, tasks, size, scored_by)
            groups = await batch.groups(tasks, plans, size)
        note_elsewhere(self.store, groups)
        if not allow_no_calls:
            nodes = () if "train" in self._captured or self.step or split != "train" else self.config.train_nodes
            check_captured(groups, nodes, earlier=bool(self._captured or self.step))
            self._captured.add(split)
        return groups

    def collected(self, key: str, index: int) -> list[Trajectory]:
        """Return the rollouts of the task at ``index`` that ended under ``key``, failed or not."""
        return finished_trajectories(self.store, group_id(key, index))

    async def score(self, groups: Sequence[Group], reward: str | Reward | GroupReward) -> list[Group]:
        """Store rewards and advantages, and return the groups with both. Raises RewardError if the reward raises for all."""
        resolved = self.reward(reward)
        name = reward_name(resolved)

        async def one(group: Group) -> Group:
            scored = scoring.score(group, resolved, self.config.score_timeout)
            return await self.watch.during(f"the reward {name} to score", scored, group.task)

        keep = functools.partial(keep_scores, self.store, name, self.config.advantage)
        with exempt(), self._timer.timed("score_seconds"):
            scored = await score_all(groups, one, keep, self._scorings)
        await in_thread(self.store.flush)
        return scored

    async def learn(self, groups: Sequence[Group], *, seconds: Mapping[str, float] | None = None) -> dict[str, float]:
        """Take one optimizer step on the ``teachable`` groups, serve the new weights, and return metrics.

        Groups without advantages get them from their rewards. It counts as a step and is written to the run folder even if no
        group has contrast. With ``max_staleness``, groups with an older call are left out (``groups_stale``). A step that has
        begun is finished even if the caller is cancelled; concurrent calls are taken in turn. ``seconds`` are what the groups
        took, by arrow; None: what ``collect`` and ``score`` took since the last step. Raises ConfigError without groups.
        """
        if not groups:
            raise ConfigError("no groups to learn from: the list is empty; pass at least one scored group")
        return await finished(self._learn(groups, self._timer.taken() if seconds is None else dict(seconds)))

    async def _learn(self, groups: Sequence[Group], seconds: dict[str, float]) -> dict[str, float]:
        groups = [g if g.advantages else scoring.advantages(g, self.config.advantage) for g in groups]
        teachable = self.teachable(groups)
        check_sampled(teachable)
        metrics = {**group_metrics(groups), "groups_with_contrast": float(len(teachable))}
        async with self._learning.lock:
            with self._timer.timed("learn_seconds"), self.watch.doing(f"step {self.step + 1} to be learned"):
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

        Trajectories with an error are left out, and with ``min_reward`` those below it; of the others, the calls of
        ``train_nodes`` are trained. Every epoch shuffles them, with ``batch_size`` per optimizer step. Each step counts as a
        step of the run: it is served, written to the run folder and checkpointed. Returns the metrics of each step. Only
        sampled tokens are trained, at temperature 1 whatever theirs was, because the model itself should say them, and calls
        that were cut off at their token limit too, whatever ``overlong`` says. Raises ConfigError if nothing is left.
        """
        good, seed = sft.chosen(trajectories, min_reward, self.config.train_nodes), f"{self.config.seed}/{self.step}"
        return [await finished(self._imitate(groups)) for groups in sft.batches(good, epochs, batch_size, seed)]

    async def _imitate(self, groups: Sequence[Group]) -> dict[str, float]:
        async with self._learning.lock:
            with self._timer.timed("learn_seconds"), self.watch.doing(f"step {self.step + 1} to be learned"):
                learned = await self._update(groups, sft.tree, losses.sft)
            # Other weights may have sampled these, at another temperature: the gap would mean nothing.
            learned.pop("logprob_gap", None)
            return await self._finish_step(merge_metrics(group_metrics(groups), learned), {})

    async def _finish_step(self, metrics: dict[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        metrics |= self._timer.taken_by_step(seconds)
        metrics = merge_metrics(metrics, self.rewards.account(), "account")
        metrics["memory_bytes"] = float(used_memory())
        metrics |= {k: v for k, v in (await self._throughput.taken()).items() if k == "cache_hit_rate"}
        self.store.add_step(self.step + 1, metrics)
        await in_thread(self.store.flush)
        self._learning.step += 1
        append_metrics(self.run_dir, self.step, metrics)
        await self._learning.checkpoint_if_due()
        return metrics

    def teachable(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that a step learns from, with the calls of ``train_nodes`` alone: all, or those with contrast."""
        all_teach = losses.needs_teacher(self._setup.loss)
        trained = [scoring.of_nodes(group, self.config.train_nodes) for group in groups]
        return [g for g in trained if (all_teach or scoring.has_contrast(g)) and any(t.calls for t in g.trajectories)]

    def tree(self, group: Group) -> TokenTree:
        """Return a group with advantages as the token tree that a step trains on: the calls of ``train_nodes``."""
        overlong = self.config.overlong or ("drop" if losses.drops_overlong(self._setup.loss) else "train")
        return group_tree(scoring.of_nodes(group, self.config.train_nodes), drop_overlong=overlong == "drop")

    async def _update_within_bound(self, teachable: Sequence[Group], metrics: dict[str, float]) -> dict[str, float]:
        """Train on the groups that are recent enough for ``max_staleness``, and add the metrics of the update."""
        version, bound = (await self.learner()).version, self.config.max_staleness
        trained = [g for g in teachable if not bound or staleness([g], version)["staleness_max"] <= bound]
        if bound:
            metrics |= {"groups_stale": float(len(teachable) - len(trained))}
        if trained:
            metrics = merge_metrics(metrics | staleness(trained, version), await self._update(trained, self.tree))
        return metrics

    async def _update(
        self, groups: Sequence[Group], tree: Callable[[Group], TokenTree], loss: Loss | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on the groups and serve its weights; return the learner's metrics and what was left out."""
        trees = await in_thread(lambda: [tree(group) for group in groups])
        await self.learner()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        learned = await self._learning.updater.take_step(trees, trajectories, loss=loss, step=self.step + 1)
        return learned | untrained_shares(trees, trajectories)

    def write_metrics(self) -> None:
        """Rewrite ``metrics.jsonl`` without the steps after the one that was resumed."""
        write_metrics(self.run_dir, self.history())

    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) of the finished steps; of a step that was repeated after an interruption, the last."""
        return self.store.history(self.step)

    @property
    def checkpointed(self) -> Path | None:
        """The checkpoint of the current weights, if there is one."""
        newest = last_checkpoint(self.run_dir)
        return newest if newest is not None and checkpoint_step(newest) == self.step else None

    async def checkpoint(self) -> Path:
        """Save weights, optimizer and random states under ``checkpoints/``, once per step; drop old ones, but not the best."""
        async with self._learning.lock:
            return await self._learning.checkpoint()
