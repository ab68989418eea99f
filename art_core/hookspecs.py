"""Everything that can be extended, in one file. Knows nothing about who extends it.

A plugin is a module (or object) with functions of these names marked ``@hookimpl``, found by the entry-point group ``art``.
Hooks hand over objects when a run starts; none is called while calls are being answered. An argument beats a plugin: what
is passed to ``train`` itself needs no hook. Installing a plugin never changes a run that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from art_core.types import RunAgent

hookspec = pluggy.HookspecMarker("art")
hookimpl = pluggy.HookimplMarker("art")

Register = Callable[[str, Any], None]
"""``register(name, thing)``; the same name twice is a PluginError that names both plugins."""


@hookspec(firstresult=True)
def adapt_agent(agent: object) -> RunAgent | None:
    """Turn ``agent`` into a function that runs it once, or return None if it is not yours.

    Called once, when a run starts, with the object the user passed; the first answer that is not None wins. The function is
    ``async def run(input, address) -> output``; ``address`` is the ``RolloutAddress`` of this run. An exception that it
    raises is the agent's failure and becomes ``Trajectory.error``. An adapter for a more specific type than another's says
    so with ``@hookimpl(tryfirst=True)``.
    """


@hookspec
def redirect_clients() -> None:
    """Wrap your client library so that calls inside a rollout go to the rollout's address.

    Called once per process, before the first rollout, for every installed plugin, whichever of them adapted the agent; in
    an agent's spawned child processes too, before they work for a rollout.
    Do not import the library here: wrap it in ``art_core.when_imported(module, wrap)``.
    The wrapper asks ``art_core.destination(model)`` at every call: None means
    that the call is not ours and must go through untouched. Must be idempotent; the return value is ignored.
    """


@hookspec
def register_rewards(register: Register) -> None:
    """Offer rewards by name: ``register("ruler", factory)``, for ``train(reward="ruler")``.

    Called once, when a run starts. The factory is called without arguments if a run asks for the name, and returns a
    function of a trajectory or an object with ``async score(group)``; one that costs something is a ``MeteredReward``. The
    return value is ignored.
    """


@hookspec
def register_losses(register: Register) -> None:
    """Offer losses by name: ``register("mine", loss)``, for ``train(loss="mine")``.

    Called once, when a run starts. A loss is a function ``LossInputs -> LossOutputs``; where a run sets ``kl`` or
    ``importance_cap`` it is given that keyword. The return value is ignored.
    """


@hookspec
def register_learners(register: Register) -> None:
    """Offer learners by name: ``register("mine", factory)``, for ``train(learner="mine")``.

    Called once, when a run starts. The factory is called as ``factory(model_folder, config, loss)`` with the start weights'
    folder, the run's ``TrainConfig`` and the loss function, and returns a ``Learner``; where that has ``close()``, it is called
    when the run ends. The factory's attribute ``check``, where it has one, is called first of all and raises ConfigError where
    it cannot work here. Its attribute ``prepare``, if it has one, is called in a thread while the engine starts, to import
    libraries. The return value is ignored.
    """


@hookspec
def register_engines(register: Register) -> None:
    """Offer engines by name: ``register("mine", factory)``, for ``train(engine="mine")``.

    Called once, when a run starts. The factory is a module-level callable (it travels to the child process that serves) and
    is called there as ``factory(model_folder, config)``; it returns an ``Engine``. It may have attributes: ``check()``, called
    first of all, raises ConfigError where it cannot work here; ``install(say)`` gets what it needs, for ``art doctor --install
    mine``; ``describe() -> (state, what to do)`` is a row of ``art doctor``. The return value is ignored.
    """


@hookspec
def register_executors(register: Register) -> None:
    """Offer other places to run agents in, by name: ``register("mine", factory)``, for ``train(executor="mine")``.

    Called once, when a run starts. The factory is called as ``factory(config)`` and returns an object with ``adapt(agent)``,
    which is asked instead of the hook ``adapt_agent`` and returns the same: ``async def run(input, address) -> output``. It
    may raise RolloutLost, where the machine that ran the agent is gone: the run is then made again, with another address.
    What ``adapt`` returned may have an attribute ``gate``, an asynchronous context manager: a run, and its time, then begins
    when that lets it in, in place of the limit ``max_concurrent``.
    Where the object is an asynchronous context manager it is entered before the first run. The return value is ignored.
    """


@hookspec
def register_trackers(register: Register) -> None:
    """Offer trackers by name: ``register("mine", factory)``, for ``train(trackers=["mine"])``.

    Called once, when a run starts. The factory is called as ``factory(run_dir, config)`` and returns a ``Tracker``
    (``art_core.loop.trackers``). Its attribute ``check``, if it has one, is called first of all and raises ConfigError if the
    tracker cannot work here, because a key is missing, for example. The return value is ignored.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the ``art`` command: ``app.command("judge")(judge)``.

    Called when the ``art`` command starts. Import what is heavy inside the command. The return value is ignored.
    """


@hookspec
def register_dialects(register: Register) -> None:
    """Offer to answer another path at every rollout's address: ``register("/v1/responses", dialect)``.

    Called once, when a run starts, in the process that runs the agents; the dialect travels to the process that captures. A
    dialect has ``to_chat(body) -> chat request``, ``from_chat(body, completion) -> response body`` and
    ``stream_from_chat(body, chunks) -> async iterator of SSE events``, and may have ``prepare``, ``error`` and ``error_event``
    (``art_core.capture.Dialect``). The return value is ignored.
    """


@hookspec(firstresult=True)
def suggest(kind: str, wanted: object) -> str | None:
    """Say how to get what no installed plugin provides, or return None if you do not know.

    Called just before a run is refused because a part is missing. ``kind`` is ``"agent"``, with the agent as ``wanted``, or
    ``"reward"``, ``"engine"`` and so on, with a name. The answer completes the error: ``"run: pip install ..."``.
    """
