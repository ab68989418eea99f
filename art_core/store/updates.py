"""Rows of optimizer steps -> what each was given. Knows nothing about how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from art_core.store.digest import SIZE
from art_core.store.values import Damaged, column, from_json

UPDATE = "SELECT step, version, targets, trained FROM updates WHERE seq = ?"


@dataclass(frozen=True)
class Update:
    """What one optimizer step was given."""

    step: int
    version: int
    """Of the weights that it made."""
    targets: float | None
    """Trained tokens, where the learner counts them."""
    trained: tuple[tuple[str | None, tuple[bytes, ...]], ...]
    """Per trajectory its rollout's id, None where this file has no such rollout, and ``call_digest`` of each of its calls."""


def update_of(row: tuple | None) -> Update:
    """Return what a row of ``UPDATE`` says. Raises Damaged, also where there is none: its number was read a moment before."""
    if row is None:
        raise Damaged("an optimizer step that it lists is not there")
    step, version, targets, trained = row
    return Update(column(step, int), column(version, int), column(targets, float, NoneType), _trained(trained))


def _trained(data: bytes) -> tuple[tuple[str | None, tuple[bytes, ...]], ...]:
    try:
        return tuple((name, _cut(digests)) for name, digests in from_json(data))
    except (TypeError, ValueError) as error:
        raise Damaged(f"it should say what was trained: {error}") from error


def _cut(digests: str) -> tuple[bytes, ...]:
    whole = bytes.fromhex(digests)
    return tuple(whole[at : at + SIZE] for at in range(0, len(whole), SIZE))
