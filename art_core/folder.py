"""Where a run keeps what on disk. Knows nothing about what the files say."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

CHECKPOINT = re.compile(r"step-(\d+)")


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once, so that no reader sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def new_run_dir(model: str) -> Path:
    """Return a run folder that does not exist yet, under ``runs/``."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(model).name}"
    folder, n = Path("runs") / name, 1
    while folder.exists():
        n += 1
        folder = Path("runs") / f"{name}-{n}"
    return folder


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step)


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint folder, or None where there is none."""
    return next(reversed(checkpoints(run_dir)), None)


def checkpoint_step(folder: Path) -> int:
    """Return the number of steps done when the checkpoint was saved."""
    match = CHECKPOINT.fullmatch(folder.name)
    assert match, folder
    return int(match[1])
