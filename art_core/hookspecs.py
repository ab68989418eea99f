"""Everything that can be extended, in one file: the hooks, and a base class per part with its optional methods.

A plugin is a module (or object) that implements functions of these names, marked ``@hookimpl``, and is found by the entry-point
group ``art``. Hooks return objects when a run starts; none is called while model calls are answered. An argument beats a plugin:
what is passed to ``train`` itself needs no hook. Installing a plugin never changes a run that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from art_core.types import RunAgent, Upstream, Weights

hookspec = pluggy.HookspecMarker("art")
hookimpl = pluggy.HookimplMarker("art")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Offer:
    """What a plugin registers under a name."""

    thing: Any
    """A factory; for a loss or a dialect the thing itself."""
    check: Callable[[], None] = _nothing
    """Called first if a run uses the name; raises ConfigError if it can't work here, for example because a key is missing.
    Engines, learners, trackers."""
    prepare: Callable[[], None] = _nothing
    """Called in a thread while the engine starts, to import libraries. Learners."""
    install: Callable[[Callable[[str], None]], None] | None = None
    """``install(say)`` installs what it needs, for ``art doctor --install NAME``. Engines."""
    describe: Callable[[], tuple[str, str]] | None = None
    """Returns its state and what to do about it, a row of ``art doctor``. Engines."""


class Register(Protocol):
    """What the ``register_*`` hooks receive."""

    def __call__(self, name: str, thing: Any, **options: Any) -> None:
        """Offer ``thing`` as ``name``; ``options`` are the other fields of ``Offer``. Registering a name twice raises a
        PluginError that names both plugins."""
        ...


@hookspec(firstresult=True)
def adapt_agent(agent: object) -> RunAgent | None:
    """Turn ``agent`` into a function that runs it once, or return None if it is not yours.

    Called once, when a run starts, with the object that the user passed; the first answer that is not None wins. The function
    is ``async def run(input, address) -> output``; ``address`` is the rollout's ``RolloutAddress``. An exception that it raises
    is the agent's failure and becomes ``Trajectory.error``. If your type is more specific than another plugin's, use
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

    Called once, when a run starts. The factory is called as ``factory(run_dir, config)`` and returns a ``Tracker``
    (``art_core.loop.trackers``). Option: ``check``. The return value is ignored.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the ``art`` command: ``app.command("judge")(judge)``.

    Called when the ``art`` command starts. Import heavy modules inside the command. The return value is ignored.
    """


@hookspec
def register_dialects(register: Register) -> None:
    """Answer another path at every rollout's address: ``register("/v1/responses", dialect)``.

    Called once, when a run starts, in the process that runs the agents; the dialect is sent to the process that captures. A
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


# A part implements the protocol of its name in ``types`` and inherits its base class, to override what it can do. One that does not
# inherit it may still have any of the methods.
Base = TypeVar("Base")


class EngineBase:
    """The optional methods of an engine."""

    loads_files = False
    """Whether ``load`` only accepts weights that have a ``path``."""

    def begin(self, run_dir: Path) -> None:
        """Called once, before ``start``, with an existing folder for logs and other files."""

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return the logprob (nats, temperature 1) of every token but the first, given those before it, under the
        newest weights: (len(ids) - 1,). None: not supported."""
        return None

    async def counters(self) -> Mapping[str, float]:
        """Return totals since ``start``: ``prompt_tokens``, ``cached_tokens`` (the part of them that was not
        recomputed) and ``sampled_tokens``."""
        return {}

    def overlaps(self, weights: Weights) -> bool:
        """Whether these weights can be served beside the previous ones; ``load`` is then called with requests in
        flight."""
        return False

    def keeps_start(self) -> bool:
        """Whether ``at(0)`` always works, for nodes that are not trained."""
        return False

    def at(self, version: int) -> Upstream:
        """Return what answers with this version, which was loaded and not retired, or with the newest if that replaced
        it."""
        return self  # type: ignore[return-value]

    async def retire(self, version: int) -> None:
        """Drop a version: a newer one is served, and no open rollout began with it."""

    async def rest(self) -> None:
        """Release memory for the learner. No request is in flight, and none comes before ``wake``."""

    async def wake(self) -> None:
        """Get ready for requests again, with the weights of before."""


class LearnerBase:
    """The optional members of a learner."""

    choice = ""
    """A line for the person who trains: which learner was chosen and why."""

    def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return the logprob (nats, temperature 1) of every token but the first, under the weights of this version. None:
        not supported."""
        return None

    def close(self) -> None:
        """Called when the run ends, if a factory made the learner."""


class ExecutorBase:
    """The optional methods of an executor. If it is an asynchronous context manager, a run enters it before the first rollout."""

    def gate(self, agent: object) -> AbstractAsyncContextManager[Any] | None:
        """Return what a rollout of ``agent`` waits for and then holds, in place of the limit ``max_concurrent``; its time
        limit begins when the gate lets it in. None: keep ``max_concurrent``."""
        return None


def with_defaults(part: Any, base: type[Base]) -> Base:
    """Return a part that has all members of ``base``: itself if it inherits ``base``, else a wrapper."""
    if isinstance(part, base):
        return part

    class WithDefaults(base):  # type: ignore[misc, valid-type]
        """The part's own members, and defaults for those that it lacks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(part, name)

    wrapper = WithDefaults()
    for name in vars(base):
        if not name.startswith("_") and hasattr(part, name):
            setattr(wrapper, name, getattr(part, name))
    return wrapper
