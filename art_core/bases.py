"""One base class per part that a plugin can add: its optional methods, each with a default that does nothing.

Inherit the base class beside implementing the protocol of the same name in ``types``, and override what your part can do.
A part that doesn't inherit it may still have any of the methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from art_core.types import Upstream, Weights

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
