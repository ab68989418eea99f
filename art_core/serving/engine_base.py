"""The optional methods of an engine, with defaults that do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from art_core.types import Engine, Upstream, Weights


class EngineBase:
    """A base class for engines, beside the protocol ``types.Engine``: override what the engine can do."""

    loads_files = False
    """Whether ``load`` only accepts weights that have a ``path``."""

    def begin(self, run_dir: Path) -> None:
        """Called once, before ``start``, with an existing folder for logs and other files."""

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return the logprob (nats, temperature 1) of every token but the first, given those before it, under the
        newest weights, shape (len(ids) - 1,); None if not supported."""
        return None

    async def counters(self) -> Mapping[str, float]:
        """Return totals since ``start``: ``prompt_tokens``, ``cached_tokens`` (those of them that weren't recomputed)
        and ``sampled_tokens``."""
        return {}

    def overlaps(self, weights: Weights) -> bool:
        """Whether these weights can be served beside the previous ones. If so, ``load`` is called while requests are
        in flight."""
        return False

    def keeps_start(self) -> bool:
        """Whether ``at(0)`` always works, for nodes that aren't trained."""
        return False

    def at(self, version: int) -> Upstream:
        """Return an upstream that answers with this version, which was loaded and not retired; with the newest if that
        replaced it."""
        return self  # type: ignore[return-value]

    async def retire(self, version: int) -> None:
        """Drop a version. A newer one is served, and no open rollout began with this one."""

    async def rest(self) -> None:
        """Release memory for the learner. No request is in flight, and none follows before ``wake``."""

    async def wake(self) -> None:
        """Get ready for requests again, with the weights from before ``rest``."""


class _WithDefaults(EngineBase):
    """An engine that doesn't inherit ``EngineBase``, with the defaults for the methods that it lacks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        for name in vars(EngineBase):
            if not name.startswith("_") and hasattr(engine, name):
                setattr(self, name, getattr(engine, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def with_defaults(engine: Any) -> Any:
    """Return the engine with all optional methods."""
    return engine if isinstance(engine, EngineBase) else _WithDefaults(engine)
