"""Everything that can be extended, in one file: the hooks, and what they register.

A plugin is a module (or object) that implements functions of these names, marked ``@hookimpl``, and is found by the entry-point
group ``art``. Hooks return objects when a run starts; none is called while model calls are answered. An argument beats a plugin:
what is passed to ``train`` itself needs no hook. Installing a plugin never changes a run that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import typer

    from art_core.types import RunAgent

hookspec = pluggy.HookspecMarker("art")
hookimpl = pluggy.HookimplMarker("art")


@dataclass(frozen=True)
class Offer:
    """What a plugin registers under a name."""

    thing: Any
    """A factory; for a loss or a dialect the thing itself."""
    check: Callable[[], None] = lambda: None
    """Called first if a run uses the name; raises ConfigError if it can't work here, for example because a key is missing.
    Engines, learners, trackers."""
    prepare: Callable[[], None] = lambda: None
    """Called in a thread while the engine starts, to import libraries. Learners."""
    install: Callable[[Callable[[str], None]], None] | None = None
    """``install(say)`` installs what it needs, for ``art doctor --install NAME``. Engines, task suites."""
    describe: Callable[[], tuple[str, str]] | None = None
    """Returns its state and what to do about it, a row of ``art doctor``. Engines."""


class Register(Protocol):
    """What the ``register_*`` hooks receive."""

    def __call__(self, name: str, thing: Any, **options: Any) -> None:
        """Offer ``thing`` as ``name``; ``options`` are the other fields of ``Offer``. Registering a name twice raises a
        PluginError that names both plugins."""


@hookspec(firstresult=True)
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Turn ``agent`` into a function that runs it once, or return None if it is not yours.

    Called when a run starts, with the object that the user passed, and ``shared`` is true: concurrent rollouts run it. If the
    user passed a function without parameters, called in each rollout with what it returns. Leave out ``shared`` if it makes no
    difference. The first answer that is not None wins.

    The function is ``async def run(input, address) -> output``; ``address`` is the rollout's ``RolloutAddress``. What it
    raises is the agent's failure and becomes ``Trajectory.error``. If your type is more specific than another plugin's, use
    ``@hookimpl(tryfirst=True)``.
    """


@hookspec
def redirect_clients() -> None:
    """Wrap your client library so that calls inside a rollout go to the rollout's address.

    Called once per process, before the first rollout, for every installed plugin, whichever of them adapted the agent; also in
    the agent's spawned child processes, before they work for a rollout. Don't import the library here: wrap it in
    ``art_core.when_imported(module, wrap)``. Your wrapper calls ``art_core.destination(model)`` for every request: None means
    that the request is not ours and must go through untouched. Must be idempotent; the return value is ignored.
    """


@hookspec
def register_rewards(register: Register) -> None:
    """Offer rewards by name: ``register("ruler", factory)``, for ``train(reward="ruler")``.

    Called once, when a run starts. The factory is called without arguments if a run uses the name, and returns a function of
    a trajectory or an object with ``async score(group)``; a reward that costs something is a ``MeteredReward``. The return
    value is ignored.
    """


@hookspec
def register_tasks(register: Register) -> None:
    """Offer task suites by name: ``register("mine", suite)``, for ``tasks("mine/some-tasks")``.

    Called when tasks are loaded. A suite is a ``TaskSuite``. Import its library in its methods. Option: ``install``. The return
    value is ignored.
    """


@hookspec
def register_losses(register: Register) -> None:
    """Offer losses by name: ``register("mine", loss)``, for ``train(loss="mine")``.

    Called once, when a run starts. A loss is a function ``LossInputs -> LossOutputs``; if a run sets ``kl`` or
    ``importance_cap``, it is passed as a keyword. The return value is ignored.
    """


@hookspec
def register_learners(register: Register) -> None:
    """Offer learners by name: ``register("mine", factory)``, for ``train(learner="mine")``.

    Called once, when a run starts. The factory is called as ``factory(model_folder, config, loss)`` with the start weights'
    folder, the run's ``TrainConfig`` and the loss function, and returns a ``Learner``; ``LearnerBase`` has its optional
    methods. Options: ``check``, ``prepare``. The return value is ignored.
    """


@hookspec
def register_engines(register: Register) -> None:
    """Offer engines by name: ``register("mine", factory)``, for ``train(engine="mine")``.

    Called once, when a run starts. The factory is a module-level callable, because it is sent to the child process that
    serves; there it is called as ``factory(model_folder, config)`` and returns an ``Engine``; ``EngineBase`` has its optional
    methods. If the factory has ``loads_files = True``, the engine only loads weights from files. Options: ``check``,
    ``install``, ``describe``. The return value is ignored.
    """


@hookspec
def register_executors(register: Register) -> None:
    """Offer other places to run agents in, by name: ``register("mine", factory)``, for ``train(executor="mine")``.

    Called once, when a run starts. The factory is called as ``factory(config)`` and returns an object with ``adapt(agent)``,
    which replaces the hook ``adapt_agent`` and returns the same: ``async def run(input, address) -> output``. That function may
    raise RolloutLost if the machine that ran the agent is gone; the rollout is then repeated at another address.
    ``ExecutorBase`` has the optional methods. The return value is ignored.
    """


@hookspec
def register_trackers(register: Register) -> None:
    """Offer trackers by name: ``register("mine", factory)``, for ``train(trackers=["mine"])``.

    Called once, when a run starts. The factory is called as ``factory(run_dir, config)`` and returns an
    ``art_core.plugin_api.Tracker``, or an object with its methods. Option: ``check``. The return value is ignored.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the ``art`` command: ``app.command("judge")(judge)``.

    Called when the ``art`` command starts. Import heavy modules inside the command. The return value is ignored.
    """


@hookspec
def register_dialects(register: Register) -> None:
    """Answer another path at every rollout's address: ``register("/v1/responses", dialect)``.

    Called once, when a run starts, in the process that runs the agents; the dialect, an ``art_core.capture.Dialect``, is sent to
    the process that captures. ``{model}`` in a path stands for a model's name. The return value is ignored.
    """


@hookspec(firstresult=True)
def suggest(kind: str, wanted: object) -> str | None:
    """Say how to get what no installed plugin provides, or return None if you do not know.

    Called just before a run is refused because a part is missing. ``kind`` is ``"agent"``, with the agent as ``wanted``, or
    ``"reward"``, ``"engine"`` and so on, with a name. The answer completes the error: ``"run: pip install ..."``.
    """
