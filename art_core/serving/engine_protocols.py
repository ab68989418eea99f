"""What an engine can do beside what ``Engine`` demands. Each is asked for by ``isinstance``; an engine has those it can offer.

Knows nothing about who asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from art_core.types import Upstream, Weights


@runtime_checkable
class KeepsFiles(Protocol):
    """Writes to the run's folder: logs, for example."""

    def begin(self, run_dir: Path) -> None:
        """Called once, before ``start``; what the engine writes goes into this folder, which is there."""
        ...


@runtime_checkable
class Scores(Protocol):
    """Can say how likely a given text is under what it serves."""

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob (nats, temperature 1) of every token but the first, given those before it, under the newest
        weights. (len(ids) - 1,)."""
        ...


@runtime_checkable
class Counts(Protocol):
    """Counts what it computes."""

    async def counters(self) -> Mapping[str, float]:
        """Return totals since ``start``: ``prompt_tokens``, ``cached_tokens`` (of these, not computed anew) and
        ``sampled_tokens``."""
        ...


@runtime_checkable
class ServesVersions(Protocol):
    """Serves several versions of the weights at a time: a rollout goes on with those that it began with."""

    def overlaps(self, weights: Weights) -> bool:
        """Whether these can be served beside those before them. ``load`` is then called while requests are in flight."""
        ...

    def keeps_start(self) -> bool:
        """Whether version 0 is served all the time, for nodes that are not trained."""
        ...

    def at(self, version: int) -> Upstream:
        """Return what answers with the weights of this version, which were loaded and not retired; where others have replaced
        them, with the newest. Answers say whose they are."""
        ...

    async def retire(self, version: int) -> None:
        """Forget a version: newer weights are served and no rollout is left that began with it."""
        ...


@runtime_checkable
class Rests(Protocol):
    """Can leave the GPU to the learner. Both are called while no request is in flight."""

    async def rest(self) -> None:
        """Give back what memory can be given back; no request comes before ``wake``."""
        ...

    async def wake(self) -> None:
        """Be ready for requests, with the weights of before."""
        ...
