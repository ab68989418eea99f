"""The loop: collect, score, learn, evaluate. Read this file first.

agent -> trajectory -> group -> scored group -> token tree -> loss -> weights -> served
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from art_core.loop import advice, stopping
from art_core.loop.display import Display
from art_core.loop.evaluate import Evaluator
from art_core.loop.metrics import timed_separately
from art_core.loop.pipeline import Pipeline
from art_core.loop.report import TrainResult, write_report
from art_core.loop.resume_checks import changed_at
from art_core.loop.resume_plans import group_id
from art_core.loop.rewards import reward_name, score_rest
from art_core.loop.run import Run
from art_core.loop.tasks import batch_of_step, fresh_tasks
from art_core.loop.trackers import Trackers
from art_core.runtime.threads import in_thread
from art_core.scoring import why_unscored
from art_core.types import Group

ENDED = (
    "training ends after step {} of {}: {}. Everything is kept: change that and train again with run_dir={!r} to continue "
    "(with allow_changes=True if the agent, the reward or a setting changes)"
)


@dataclass
class Training:
    """One call of ``train``: what is trained, on what, and who is notified."""

    run: Run
    agent: object
    tasks: Sequence[Any]
    reward: Any
    evaluator: Evaluator
    eval_every: int
    convert: Mapping[str, Any]
    trackers: Trackers
    screen: Display
    history: list[Mapping[str, float]] = field(default_factory=list)
    """The metrics of every step so far."""
    groups: Sequence[Group] = ()
    """The groups of the last step."""

    async def execute(self) -> TrainResult:
        """Evaluate, train, evaluate again; the report is written however it ends."""
        run, after = self.run, None
        try:
            before = await self.evaluator.run_or_reuse("before")
            await self.loop()
            if run.step and not run.checkpointed:
                await run.checkpoint()
                self.trackers.notify("log_checkpoint", run.step, run.checkpointed)
            after = await self.evaluator.run_or_reuse("after") if run.step else before
        except asyncio.CancelledError:
            self.screen.say(
                f"stopped: {run.run_dir} holds everything up to step {run.step}; pass it as run_dir to resume"
            )
            raise
        finally:
            try:
                report = write_report(run)
                self.trackers.notify("log_report", report)
            finally:
                with run.watch.doing("the trackers to end"):
                    await in_thread(self.trackers.close)
        return TrainResult(run.run_dir, report, before, after)

    async def loop(self) -> None:
        """Per step: evaluate if it is due, collect and score groups, learn from them and serve the new weights."""
        run, steps, ahead, stop = self.run, self.run.config.steps, self.run.config.max_staleness, None
        self.history = [metrics for _, metrics in run.history()]
        since = self._steps_before_early_end()
        self._say_begin()
        async with Pipeline(self.collect_and_score, range(run.step, steps), depth=ahead) as pipeline:
            while run.step < steps and not (stop := self._stop(since)):
                # Here, not at the end of a step, so that a resumed run makes up for an interrupted evaluation.
                if self.eval_every and run.step and run.step % self.eval_every == 0:
                    await pipeline.settled()  # the evaluation has the engine to itself
                    await self.evaluator.run_or_reuse(f"step {run.step}")
                    if run.rewards.exhausted(self.reward):
                        continue
                if ahead:
                    self.screen.phase(f"step {run.step + 1}/{steps}: rollouts, scoring and learning", None)
                self.groups, seconds = await pipeline.next()
                metrics = await run.learn(self.groups, seconds={**seconds, "wait_seconds": pipeline.waited()})
                self._log(metrics, since)
        self._say_end(stop)

    async def collect_and_score(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """Return the scored groups of a step, counted from 0, and the seconds that they took by arrow.

        With ``dynamic_sampling``, more tasks are added until ``tasks_per_step`` groups have contrast.
        """
        run, config, groups = self.run, self.run.config, list[Group]()
        batch, fresh = batch_of_step(self.tasks, step, config), fresh_tasks(self.tasks, step, config)
        with timed_separately() as seconds:
            for extra_round in range(1 + config.max_extra_rounds * config.dynamic_sampling):
                groups += await self._round(step, batch, extra_round)
                missing = config.tasks_per_step - len(run.teachable(groups))
                if not missing or run.rewards.exhausted(self.reward):
                    break
                batch = list(islice(fresh, missing))
        if missing and config.dynamic_sampling and not run.rewards.exhausted(self.reward):
            self.screen.say_once(
                f"step {step + 1}: {config.tasks_per_step - missing} of {config.tasks_per_step} groups have contrast after "
                f"max_extra_rounds={config.max_extra_rounds}; steps of this kind train on those",
                about="max_extra_rounds",
            )
        return groups, seconds

    async def _round(self, step: int, batch: Sequence[Any], extra_round: int) -> list[Group]:
        run, config = self.run, self.run.config
        screen = Display(quiet=True) if config.max_staleness else self.screen  # several steps cannot share a bar
        extra = f", extra round {extra_round}" if extra_round else ""
        screen.phase(f"step {step + 1}/{config.steps}: rollouts{extra}", len(batch) * config.group_size)
        # Scores of a reward that was replaced at this step do not count.
        scored_by = None if changed_at(run.store, step, "reward") else reward_name(run.reward(self.reward))
        groups = await run.collect(
            self.agent, batch, step=step + 1, allow_no_calls=extra_round > 0, key=_key(step, extra_round), scored_by=scored_by,
            **self.convert,
        )  # fmt: skip
        advice.say_elsewhere(f"step {step + 1}", groups, self.screen)
        if reason := advice.why_failed(groups):
            self.screen.say_once(f"rollouts failed: {reason}; failed rollouts are data, scored like all others")
        screen.phase(f"step {step + 1}/{config.steps}: scoring and learning", None)
        scored = await score_rest(groups, lambda rest: run.score(rest, self.reward), config.advantage)
        for reason in why_unscored(scored):
            self.screen.say_once(f"rollouts could not be scored: {reason}; without a reward a rollout has no advantage")
        return scored

    def _stop(self, since: int) -> stopping.Stop | None:
        exhausted = self.run.rewards.exhausted(self.reward)
        return stopping.Stop(exhausted) if exhausted else self._stop_by_metrics(since)

    def _stop_by_metrics(self, since: int = 0) -> stopping.Stop | None:
        return stopping.stop(self.history, self.run.config, self.groups, since=since)

    def _steps_before_early_end(self) -> int:
        """Return how many steps were done when training last ended early; 0 if it didn't, or if those were undone."""
        done, ended = [step for step, _ in self.run.history()], self.run.store.meta("stopped", {}).get("step")
        return done.index(ended) + 1 if ended in done else 0

    def _log(self, metrics: Mapping[str, float], since: int) -> None:
        """Show a finished step and notify the trackers."""
        step = self.run.step
        self.history.append(metrics)
        self.trackers.notify("log", step, metrics)
        self.trackers.notify("log_groups", step, self.groups, "train")
        if self.run.checkpointed:
            self.trackers.notify("log_checkpoint", step, self.run.checkpointed)
        self.screen.log(step, metrics)
        if text := advice.untrained_advice(step, metrics):
            self.screen.say_once(text, about="skipped" if metrics.get("skipped") else "untrained")
        if text := advice.one_answer_advice(self.history, self.run.config.learning_rate):
            self.screen.say(text)
        stop = self._stop(since)
        if (text := advice.flat_advice(self.history, self.groups)) and not (stop and stop.may_pass):
            self.screen.say(text)

    def _say_begin(self) -> None:
        run = self.run
        if run.step >= run.config.steps:
            self.screen.say(f"{run.run_dir}: all {run.step} steps are done already")
        else:
            key, indices = _key(run.step, 0), range(run.config.tasks_per_step)
            begun = any(run.store.attempts(group_id(key, index)) for index in indices)
            if run.step or begun:
                used = f", with the rollouts recorded for step {run.step + 1}" if begun else ""
                self.screen.say(f"{run.run_dir}: resuming after step {run.step}{used}")
        self.screen.total(run.config.steps, run.step)

    def _say_end(self, stop: stopping.Stop | None) -> None:
        run = self.run
        if fresh := advice.freshness(self.history):
            self.screen.say(fresh)
        if stop:
            run.store.set_meta("stopped", {"step": run.step, "reason": stop.reason, "may_pass": stop.may_pass})
            self.screen.say(ENDED.format(run.step, run.config.steps, stop.reason, str(run.run_dir)))
        elif self.groups:
            unscored = (last := self._stop_by_metrics()) and last.may_pass
            early = unscored or not advice.taught(self.history)
            flat = range(1, len(self.history) + 1) if unscored else range(1, advice.FLAT_STEPS)
            if early and (text := advice.flat_advice(self.history, self.groups, flat)):
                self.screen.say(text)


def _key(step: int, extra_round: int) -> str:
    """Return the key under which the groups that follow ``step`` are collected."""
    return f"train {step + 1}/{extra_round}"
