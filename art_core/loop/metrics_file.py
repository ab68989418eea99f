"""``metrics.jsonl`` in the run folder: one line per step."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from art_core.store.run_folder import write_whole

log = logging.getLogger("art_core.run")

FILE = "metrics.jsonl"


def write_metrics(run_dir: Path, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Rewrite ``metrics.jsonl``, so that no step is missing or repeated, whatever was interrupted."""
    write_whole(run_dir / FILE, "".join(_line(step, metrics) for step, metrics in history))


def append_metrics(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add a step to ``metrics.jsonl``. If the disk is full, only the store has it."""
    try:
        with (run_dir / FILE).open("a") as file:
            file.write(_line(step, metrics))
    except OSError as error:
        log.warning("step %d is not in %s: %s; it is added when the run resumes", step, FILE, error)


def _line(step: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"
