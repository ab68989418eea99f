"""``train``: check what is passed, open the run, and hand it to the loop in ``training.py``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from art_core.config import check_tasks, make_config
from art_core.errors import ConfigError
from art_core.loop.display import Display, display
from art_core.loop.evaluate import Evaluator
from art_core.loop.open_run import opened
from art_core.loop.report import TrainResult, dry_run_report
from art_core.loop.resume_checks import ExpectedExperiment, experiment
from art_core.loop.rewards import reward_name
from art_core.loop.rollout import task_input
from art_core.loop.run import Run
from art_core.loop.setup import Setup
from art_core.loop.trackers import Tracker, Trackers
from art_core.loop.training import Training
from art_core.plugins import Plugins
from art_core.runtime.threads import run_alone
from art_core.types import Engine, GroupReward, Learner, Loss, Reward


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
    temperature: float | None = None,
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
    Further keywords are fields of ``TrainConfig``. With the ``run_dir`` of an interrupted run, it resumes where it stopped; a
    folder that was started with another agent, tasks, reward or settings is refused, unless ``allow_changes`` is set.
    """
    config = make_config(
        settings, train, model=model, steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, seed=seed,
        temperature=temperature, passthrough=passthrough if isinstance(passthrough, str) else tuple(passthrough),
    )  # fmt: skip
    check_tasks(tasks)
    if eval_tasks is not None:
        check_tasks(eval_tasks, "eval_tasks")
    screen = display(progress)
    setup = Setup(run_dir, config, engine=engine, learner=learner, loss=loss, executor=executor, plugins=plugins)
    convert = {"to_input": to_input, "to_output": to_output}
    # Before anything runs: this refuses what is misspelt, missing or not a reward.
    setup.adapt(agent)
    rewards = {"reward": setup.rewards.find(reward), "eval_reward": setup.rewards.find(eval_reward or reward)}
    setup.expected = ExpectedExperiment(
        experiment(agent, tasks, eval_tasks=eval_tasks, prompts=setup.plugins.prompts, **rewards, **convert),
        until=steps, begins=not dry_run,
    )  # fmt: skip
    factories = Trackers.find(setup.plugins, trackers)
    with screen:
        screen.phase("starting the engine", None)
        threading.Thread(target=_prepare, args=(setup,), name="art-learner").start()
        async with opened(setup) as run, screen.rates(run.throughput().taken):
            _note_plan(run, steps, reward_name(rewards["reward"]), dry_run)
            run.on_rollout = screen.advance
            if choice := (await run.learner()).choice:
                screen.say(choice)
            if dry_run:
                screen.phase("dry run: one group", config.group_size)
                groups = await run.score(await run.collect(agent, tasks[:1], **convert), reward)
                return TrainResult(run.run_dir, {"dry_run": await dry_run_report(run, groups[0], screen)}, None, None)
            with run.watch.doing("the trackers to begin"):
                notified = Trackers(factories, run.run_dir, config, screen.say)
            scored_by, notify = eval_reward or reward, notified.notify
            evaluator = Evaluator(run, agent, eval_tasks, scored_by, tuple(eval_temperatures), screen, convert, notify)
            training = Training(run, agent, tasks, reward, evaluator, eval_every, convert, notified, screen)
            return await training.execute()


def train_sync(*args: Any, **kwargs: Any) -> TrainResult:
    """``train`` for scripts: the same arguments, if no event loop runs."""
    return run_alone(train, *args, **kwargs)


def _prepare(setup: Setup) -> None:
    """Import the learner's libraries while the engine starts. Loading it reports whatever is missing."""
    if isinstance(setup.learner, str):
        with contextlib.suppress(ConfigError, ImportError):
            setup.plugins.offer("register_learners", setup.learner).prepare()


def _note_plan(run: Run, steps: int, reward: str, dry_run: bool) -> None:
    """Store what this start is for, for whoever looks at the run."""
    run.store.set_meta("planned_steps", run.store.meta("planned_steps") if dry_run else max(steps, run.step))
    run.store.set_meta("dry_run", dry_run)
    if run.step < steps:
        run.store.set_meta("reward", reward)
