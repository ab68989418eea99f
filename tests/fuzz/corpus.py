"""The inputs that are kept, one JSON line each: ``corpus/TARGET.jsonl``.

A line holds ``data``, the bytes as Latin-1, and where a target went wrong on them ``found``: what it was. Those lines stay when
the others are made few.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fuzz import targets

FOLDER = Path(__file__).parent / "corpus"
TARGETS = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


@dataclass(frozen=True, order=True)
class Entry:
    """An input that is kept."""

    data: bytes
    found: str = ""
    """What went wrong on it once; empty: nothing."""


def target(name: str) -> ModuleType:
    """Return a target's module."""
    return importlib.import_module(f"fuzz.targets.{name}")


def entries(name: str) -> list[Entry]:
    """Return a target's inputs, its seeds first."""
    file = FOLDER / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [json.loads(line) for line in lines]
    return [*map(Entry, target(name).SEEDS), *(Entry(it["data"].encode("latin-1"), it.get("found", "")) for it in kept)]


def keep(name: str, given: list[Entry]) -> None:
    """Write a target's inputs without its seeds: what was found first, then from short to long."""
    known = set(target(name).SEEDS)
    rows = sorted(
        {it for it in given if it.found or it.data not in known}, key=lambda it: (not it.found, len(it.data), it)
    )
    lines = [{"data": it.data.decode("latin-1"), **({"found": it.found} if it.found else {})} for it in rows]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
