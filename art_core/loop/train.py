"""The loop. Read this file first: every other file is one of its verbs.

agent run -> trajectory -> group -> scored -> token tree -> loss -> weights -> served
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from art_core.config import PARTS, TrainConfig, check_tasks, make_config
from art_core.errors import ConfigError
from art_core.loop.display import Display, display
from art_core.loop.evaluate import Evaluator
from art_core.loop.identity import experiment
from art_core.loop.metrics import apart
from art_core.loop.pipeline import Pipeline
from art_core.loop.report import Report, write_report
from art_core.loop.resume_checks import Terms, changed_at
from art_core.loop.rewards import name_of, score_rest
from art_core.loop.rollout import failure, task_input
from art_core.loop.rollout_batch import Kept
from art_core.loop.run import Run
from art_core.loop.stopping import (
    FLAT_STEPS,
    Stop,
    flat_advice,
    flat_steps,
    freshness,
    say_elsewhere,
    say_untrained,
    stop,
    taught,
)
from art_core.loop.trackers import Tracker, Trackers, find_trackers
from art_core.plugins import Plugins
from art_core.runtime.threads import in_thread, run_alone
from art_core.scoring import of_nodes, why_unscored
from art_core.store.run_folder import checkpoint_step, last_checkpoint
from art_core.types import Engine, Group, GroupReward, Learner, Loss, Reward

Sample = Callable[[int], Awaitable[tuple[list[Group], dict[str, float]]]]
"""A step's number, from 0 -> its scored groups and the seconds that they took, by arrow."""

ENDED = (
    "training ends after step {} of {}: {}; everything is kept: once that is changed, train again with run_dir={!r} and it "
    "continues (with allow_changes=True if the agent, the reward or a setting of training was changed)"
)
"""Where nothing more can be scored, or nothing good is to be expected."""


@dataclass(frozen=True)
class TrainResult:
    """What ``train`` did; everything in it can be read again from ``run_dir``."""

    run_dir: Path
    report: Mapping[str, Any]
    """The content of ``report.json``."""
    before: Report | None
    after: Report | None


async def train(
    agent: object,
    tasks: Sequence[Any],
    *,
    model: str,
    steps: int,
    reward: str | Reward | GroupReward = "ruler",
    tasks_per_step: int = 8,
    group_size: int = 8,
    loss: str | Loss = "grpo",
    engine: str | Engine = "embedded",
    learner: str | Learner = "auto",
    executor: str | object | None = None,
    temperature: float = 1.0,
    trackers: Sequence[str | Tracker] = (),
    run_dir: str | Path | None = None,
    eval_tasks: Sequence[Any] | None = None,
    eval_every: int = 0,
    eval_reward: str | Reward | GroupReward | None = None,
    eval_temperatures: Sequence[float | None] = (None,),
    seed: int = 0,
    passthrough: Sequence[str] = (),
    to_input: Callable[[Any], Any] = task_input,
    to_output: Callable[[Any], Any] | None = None,
    dry_run: bool = False,
    progress: bool | Display = True,
    plugins: Plugins | None = None,
    **settings: Any,
) -> TrainResult:
    """Train the model inside ``agent`` on ``tasks`` by GRPO, and return what changed.

    ``agent`` is a compiled LangGraph graph, a LangChain runnable, a function of a task, or whatever an installed plugin adapts.
    ``reward`` is a function of one trajectory, an object with ``async score(group)``, or a registered name.
    ``eval_tasks`` are run before the first step, every ``eval_every`` steps and at the end, scored by ``eval_reward``
    (default: ``reward``), once at each of ``eval_temperatures`` (None: the agent's own); the first is what
    ``report["before"]`` and ``report["after"]`` show. ``dry_run`` rolls out, scores and prints one group, without a step.
    Further keywords are fields of ``TrainConfig``. With the ``run_dir`` of an interrupted run, it goes on where it stopped; a
    folder that was begun with another agent, tasks, reward or settings is refused, unless ``allow_changes`` is set.
    """
    config = make_config(
        settings, train, model=model, steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, seed=seed,
        temperature=temperature, passthrough=passthrough if isinstance(passthrough, str) else tuple(passthrough),
    )  # fmt: skip
    check_tasks(tasks)
    if eval_tasks is not None:
        check_tasks(eval_tasks, "eval_tasks")
    screen = display(progress)
    run = Run(run_dir, config, engine=engine, learner=learner, loss=loss, executor=executor, plugins=plugins)
    shape = {"to_input": to_input, "to_output": to_output}
    # What is misspelt, missing or no reward is refused before anything runs.
    run.adapt(agent)
    scored_by = {"reward": run.reward(reward), "eval_reward": run.reward(eval_reward or reward)}
    name, of = name_of(scored_by["reward"]), experiment(agent, tasks, eval_tasks=eval_tasks, **scored_by, **shape)
    run.terms = Terms(of, until=steps, begins=not dry_run)
    found = find_trackers(functools.partial(run.plugins.choose, "register_trackers"), trackers)
    with screen:
        screen.phase("starting the engine", None)
        threading.Thread(target=_prepare, args=(run, learner), name="art-learner").start()
        async with run, screen.rates(run.throughput().taken):
            run.store.set_meta("planned_steps", run.store.meta("planned_steps") if dry_run else max(steps, run.step))
            run.store.set_meta("dry_run", dry_run)
            if run.step < steps:
                run.store.set_meta("reward", name)
            run.on_rollout = screen.advance
            if choice := getattr(await run.learner(), "choice", ""):
                screen.say(choice)
            if dry_run:
                return await _dry_run(run, agent, tasks[0], reward, screen, shape)
            with run.watch.doing("the trackers to begin"):
                told = Trackers(found, run.run_dir, run.config, screen.say)
            sample = functools.partial(_sample, run, agent, tasks, reward, screen, shape)
            evaluate_now = Evaluator(
                run, agent, eval_tasks, eval_reward or reward, tuple(eval_temperatures), screen, shape, told.tell
            )
            loop = functools.partial(_loop, run, reward, sample, told, evaluate_now, eval_every, screen)
            return await _train(run, loop, told, evaluate_now, screen)


def _prepare(run: Run, learner: str | Learner) -> None:
    """Import the learner's libraries while the engine starts. Loading it reports whatever is missing."""
    if isinstance(learner, str):
        with contextlib.suppress(ConfigError, ImportError):
            getattr(run.plugins.choose("register_learners", learner), "prepare", lambda: None)()


async def _train(
    run: Run, loop: Callable[[], Awaitable[None]], trackers: Trackers, evaluate_now: Evaluator, screen: Display
) -> TrainResult:
    """Evaluate, train, evaluate again; what there is to show is written however it ends."""
    try:
        before = await evaluate_now.once("before")
        await loop()
        if run.step and _checkpointed(run) is None:
            await run.checkpoint()
            trackers.tell("log_checkpoint", run.step, _checkpointed(run))
        after = await evaluate_now.once("after") if run.step else before
    except asyncio.CancelledError:
        screen.say(f"stopped: {run.run_dir} holds everything up to step {run.step}; with it as run_dir the run goes on")
        raise
    finally:
        try:
            report = write_report(run)
            trackers.tell("log_report", report)
        finally:
            with run.watch.doing("the trackers to end"):
                await in_thread(trackers.close)
    return TrainResult(run.run_dir, report, before, after)


async def _loop(
    run: Run,
    reward: Any,
    sample: Sample,
    trackers: Trackers,
    evaluate_now: Evaluator,
    eval_every: int,
    screen: Display,
) -> None:
    """Run the agent, score the runs, learn from them, serve the result; once per batch of tasks."""
    ended, groups = None, []
    steps, ahead = run.config.steps, run.config.max_staleness
    since, history = _since_early_end(run), [metrics for _, metrics in run.history()]

    def end() -> Stop | None:
        exhausted = run.rewards.exhausted(reward)
        return Stop(exhausted) if exhausted else stop(history, run.config, groups, since=since)

    if begun := _begun(run):
        screen.say(begun)
    screen.total(steps, run.step)
    async with Pipeline(sample, range(run.step, steps), depth=ahead) as pipeline:
        while run.step < steps and not (ended := end()):
            # Here, not at the end of a step, so that a run that goes on makes up for one that was interrupted.
            if eval_every and run.step and run.step % eval_every == 0:
                await pipeline.settled()  # the evaluation has the engine to itself
                await evaluate_now.once(f"step {run.step}")
                if run.rewards.exhausted(reward):
                    continue
            if ahead:
                screen.phase(f"step {run.step + 1}/{steps}: rollouts, scoring and learning", None)
            groups, seconds = await pipeline.next()
            metrics = await run.learn(groups, seconds={**seconds, "wait_seconds": pipeline.waited()})
            history.append(metrics)
            trackers.tell("log", run.step, metrics)
            trackers.tell("log_groups", run.step, groups, "train")
            if folder := _checkpointed(run):
                trackers.tell("log_checkpoint", run.step, folder)
            screen.log(run.step, metrics)
            say_untrained(run.step, metrics, screen)
            if flat_steps(history) == FLAT_STEPS and not (end() or Stop("")).may_pass:
                screen.say(flat_advice(FLAT_STEPS, groups))
    _say_end(run, ended, history, groups, screen)


def _since_early_end(run: Run) -> int:
    """Return how many of the steps done were there when training last ended early; 0 if it did not, or went back before."""
    done, ended = [step for step, _ in run.history()], run.store.meta("stopped", {}).get("step")
    return done.index(ended) + 1 if ended in done else 0


def _begun(run: Run) -> str:
    """Return what is said of a run that goes on; empty for a new one."""
    if run.step >= run.config.steps:
        return f"{run.run_dir}: finished already after step {run.step}"
    kept, places = Kept(run.store, _key(run.step, 0)), range(run.config.tasks_per_step)
    begun = any(run.store.attempts(kept.group_id(place)) for place in places)
    used = f"; what was answered in step {run.step + 1} before is used" if begun else ""
    return f"{run.run_dir}: going on after step {run.step}{used}" if run.step or begun else ""


def _key(step: int, extra_round: int) -> str:
    """Return what the groups are collected under that follow ``step``."""
    return f"train {step + 1}/{extra_round}"


def _say_end(
    run: Run, ended: Stop | None, history: Sequence[Mapping[str, float]], groups: Sequence[Group], screen: Display
) -> None:
    """Say how training ended; ``groups`` are those of the last step, empty if there was none."""
    if fresh := freshness(history):
        screen.say(fresh)
    flat, next_ends = flat_steps(history), stop(history, run.config, groups)
    if ended:
        run.store.set_meta("stopped", {"step": run.step, "reason": ended.reason, "may_pass": ended.may_pass})
        screen.say(ENDED.format(run.step, run.config.steps, ended.reason, str(run.run_dir)))
    elif groups and ((next_ends and next_ends.may_pass) or (0 < flat < FLAT_STEPS and not taught(history))):
        screen.say(flat_advice(flat, groups))


async def _sample(
    run: Run, agent: object, tasks: Sequence[Any], reward: Any, screen: Display, shape: Mapping[str, Any], step: int
) -> tuple[list[Group], dict[str, float]]:
    """Run the agent on a step's tasks and score the runs; return all groups, and the seconds by arrow.

    With ``dynamic_sampling``, again on fresh tasks until ``tasks_per_step`` groups have contrast.
    """
    config, groups = run.config, []
    # What a changed reward gave before does not count.
    by = None if changed_at(run.store, step, "reward") else name_of(run.reward(reward))
    batch, fresh = batch_of_step(tasks, step, config), fresh_tasks(tasks, step, config)
    shown = Display(quiet=True) if config.max_staleness else screen  # several steps cannot share a bar
    with apart() as seconds:
        for number in range(1 + config.max_extra_rounds * config.dynamic_sampling):
            extra = f", extra round {number}" if number else ""
            shown.phase(f"step {step + 1}/{config.steps}: rollouts{extra}", len(batch) * config.group_size)
            found = await run.collect(
                agent,
                batch,
                step=step + 1,
                allow_no_calls=number > 0,
                key=_key(step, number),
                scored_by=by,
                **shape,
            )
            say_elsewhere(f"step {step + 1}", found, screen)
            for reason in why_failed(found):
                screen.say_once(f"runs of the agent failed: {reason}; failed runs are data, scored like all others")
            shown.phase(f"step {step + 1}/{config.steps}: scoring and learning", None)
            scored = await score_rest(found, lambda rest: run.score(rest, reward), config.advantage)
            for reason in why_unscored(scored):
                screen.say_once(f"runs could not be scored: {reason}; such runs are not trained")
            groups += scored
            missing = config.tasks_per_step - len(run.teachable(groups))
            if not missing or run.rewards.exhausted(reward):
                break
            batch = list(islice(fresh, missing))
    if missing and config.dynamic_sampling and not run.rewards.exhausted(reward):
        screen.say_once(
            f"step {step + 1}: {config.tasks_per_step - missing} of {config.tasks_per_step} groups have contrast after "
            f"max_extra_rounds={config.max_extra_rounds}; steps of this kind train on those",
            about="max_extra_rounds",
        )
    return groups, seconds


def why_failed(groups: Sequence[Group]) -> list[str]:
    """Return the reason for which runs of the agent failed, the most frequent one where there are several."""
    reasons = Counter(failure(t) for g in groups for t in g.trajectories if t.error)
    return [reason for reason, _ in reasons.most_common(1)]


def batch_of_step(tasks: Sequence[Any], step: int, config: TrainConfig) -> list[Any]:
    """Return the tasks of a step: every epoch is a fresh order of all tasks, and the same for the same seed."""
    return [tasks[index] for index in _places(len(tasks), step, config)]


def fresh_tasks(tasks: Sequence[Any], step: int, config: TrainConfig) -> Iterator[Any]:
    """Yield, without end, the tasks for a step's extra rounds: all others first, in an order of this step's own.

    As a function of seed and step alone it needs no cursor: a run that goes on draws what it would have drawn.
    """
    order = list(range(len(tasks)))
    random.Random(f"{config.seed}/extra/{step}").shuffle(order)
    order.sort(key=set(_places(len(tasks), step, config)).__contains__)
    return (tasks[index] for index in cycle(order))


def _places(count: int, step: int, config: TrainConfig) -> list[int]:
    """Return where the tasks of a step stand among ``count`` tasks."""
    first = step * config.tasks_per_step
    orders: dict[int, list[int]] = {}
    places = []
    for index in range(first, first + config.tasks_per_step):
        epoch, place = divmod(index, count)
        if epoch not in orders:
            orders[epoch] = list(range(count))
            random.Random(f"{config.seed}/{epoch}").shuffle(orders[epoch])
        places.append(orders[epoch][place])
    return places


def _checkpointed(run: Run) -> Path | None:
    """Return the checkpoint of the weights of the moment, where there is one."""
    newest = last_checkpoint(run.run_dir)
    return newest if newest is not None and checkpoint_step(newest) == run.step else None


async def _dry_run(
    run: Run, agent: object, task: Any, reward: Any, screen: Display, shape: Mapping[str, Any]
) -> TrainResult:
    """Roll out, score and build one group; say what a step would train on."""
    screen.phase("dry run: one group", run.config.group_size)
    groups = await run.score(await run.collect(agent, [task], **shape), reward)
    tree = run.tree(groups[0])
    learner = await run.learner()
    seconds = await in_thread(learner.measure, [tree])
    trained = of_nodes(groups[0], run.config.train_nodes)
    calls = [call for t in trained.trajectories for call in t.calls]
    report = {
        "calls": len(calls),
        "tokens_call_by_call": sum(len(c.prompt_ids) + len(c.sampled_ids) for c in calls),
        "tokens": tree.num_tokens,
        "targets": tree.num_targets,
        "rewards": [t.reward for t in groups[0].trajectories],
        "errors": [t.error for t in groups[0].trajectories if t.error],
        "unscored": why_unscored(groups),
        "has_contrast": bool(run.teachable(groups)),
        "rollout_seconds": max(t.seconds for t in groups[0].trajectories),
        "learn_seconds": seconds,
        "learn_seconds_per_step": seconds * run.config.tasks_per_step,
    }
    for name, value in report.items():
        screen.say(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    return TrainResult(run.run_dir, {"dry_run": report}, None, None)


def open_run(run_dir: str | Path | None = None, *, model: str = "tiny", **settings: Any) -> Run:
    """Return a run to open with ``async with``: the loop in pieces (``collect``, ``score``, ``learn``, ``rollout``).

    Keywords are fields of ``TrainConfig`` and ``engine``, ``learner``, ``loss``, ``executor``, ``plugins`` as in ``train``. A
    folder that was begun with another loss or other settings of training than these is refused, unless ``allow_changes``.
    """
    parts = {name: settings.pop(name) for name in PARTS if name in settings}
    run = Run(run_dir, make_config(settings, model=model), **parts)
    run.terms = Terms(names=(*settings, *parts))
    return run


def train_sync(*args: Any, **kwargs: Any) -> TrainResult:
    """``train`` for scripts: the same arguments, where no event loop runs."""
    return run_alone(train, *args, **kwargs)
