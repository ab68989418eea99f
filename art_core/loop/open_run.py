"""``open_run``: claims the run folder, starts the engine, and resumes what was interrupted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.attribution import run_in_child_processes
from art_core.config import PARTS, make_config
from art_core.loop import resume_checks
from art_core.loop.learning import Learning
from art_core.loop.run import Run
from art_core.loop.setup import Setup
from art_core.loop.watchdog import Watchdog
from art_core.plugins import redirect_clients
from art_core.redaction import describe_error
from art_core.serving.policy_engine import sampling_seed
from art_core.store import Store
from art_core.store.run_folder import claimed, remove_unused


def open_run(
    run_dir: str | Path | None = None, *, model: str = "tiny", **settings: Any
) -> AbstractAsyncContextManager[Run]:
    """Open a run with ``async with``: the loop in pieces (``collect``, ``score``, ``learn``, ``rollout``).

    Keywords are fields of ``TrainConfig`` and ``engine``, ``learner``, ``loss``, ``executor``, ``plugins`` as in ``train``. A
    folder that was started with another loss or other training settings is refused, unless ``allow_changes``.
    """
    parts = {name: settings.pop(name) for name in PARTS if name in settings}
    config = make_config(settings, model=model)
    if "steps" not in settings and config.decay_steps is None and isinstance(parts.get("learner", ""), str):
        config = replace(config, decay_steps=0)  # nobody knows where the end is
    setup = Setup(run_dir, config, **parts)
    setup.expected = resume_checks.ExpectedExperiment(names=(*settings, *parts))
    return opened(setup)


@asynccontextmanager
async def opened(setup: Setup) -> AsyncIterator[Run]:
    """Open the folder of ``setup``, start the engine and resume; when left, save a checkpoint and stop everything."""
    run: Run | None = None

    def leave(kind: object, error: BaseException | None, _: object) -> None:
        # Leave no folder behind that this start made and nothing was recorded in.
        if error is not None and not (run and run.used):
            remove_unused(setup.run_dir)

    async with AsyncExitStack() as stack:
        if stack.enter_context(claimed(setup.run_dir)):
            stack.push(leave)
        watch = stack.enter_context(Watchdog(setup.run_dir, setup.config.watchdog_seconds))
        store = stack.enter_context(Store(setup.run_dir / "run.sqlite"))
        passed = resume_checks.check_experiment(
            store, setup.run_dir, setup.config, setup.model_folder, setup.loss, setup.loss_name, setup.expected
        )
        setup.rewards.begin()
        setup.plugins.call("redirect_clients")
        run_in_child_processes(redirect_clients)
        dialects = setup.plugins.registered("register_dialects")
        # Another process of this run has drawn from its seed: rollouts of one group must not be the same.
        config = replace(setup.config, seed=sampling_seed(setup.config.seed, len(store.openings())))
        start = setup.engine.start(setup.model_folder, config, setup.run_dir, dialects)
        serving = watch.serving = await stack.enter_async_context(await watch.during("the engine to start", start))
        if isinstance(setup.executor, AbstractAsyncContextManager):
            await stack.enter_async_context(setup.executor)
        learning = Learning(setup, store, serving, watch)
        await learning.resume()
        run = Run(setup, store, serving, learning, watch)
        resume_checks.record_experiment(store, setup.run_dir, passed, setup.loss_name, run.step, setup.expected)
        store.add_opening(learning.version)
        store.set_meta("ended", None)  # so it stays if this process is killed
        run.write_metrics()
        ended = ""
        try:
            yield run
        except BaseException as error:
            ended = describe_error(error)
            raise
        finally:
            store.set_meta("ended", ended)
            await learning.close()
