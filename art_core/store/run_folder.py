"""Where a run keeps what on disk. Knows nothing about what the files say."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from art_core.errors import ConfigError, StoreError

log = logging.getLogger("art_core.run")

STARTED = {".lock", "checkpoints", "metrics.jsonl", "run.sqlite", "run.sqlite-wal", "run.sqlite-shm"}
"""What is in a run folder once it is opened."""
CHECKPOINT = re.compile(r"step-(\d+)")
HOLD_ATTEMPTS = 5
_LOCKS: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""What ``claimed`` has open."""


def _let_go() -> None:
    """A lock is of the open file, which a forked child shares: a pool's worker that outlives this process would go on holding
    it."""
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def claimed(run_dir: Path) -> Iterator[bool]:
    """Make the run folder and hold it: no other process may write to it meanwhile. Yields whether it was not there before.

    Raises StoreError where it cannot be made, ConfigError where another process holds it, or where it is a folder of runs.
    """
    runs = [] if (run_dir / "run.sqlite").exists() else sorted(it.parent.name for it in run_dir.glob("*/run.sqlite"))
    if runs:
        raise ConfigError(
            f"{run_dir} is a folder of runs ({', '.join(runs[:3])}{', ...' * (len(runs) > 3)}); give a run one of its own, such "
            f"as run_dir={str(run_dir / 'my-run')!r}"
        )
    made = False
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            run_dir.mkdir()
            made = True
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise StoreError(f"the run folder {run_dir} cannot be made: {error}; give another run_dir=") from error
    _LOCKS.add(lock)
    with lock:
        hold(lock, f"another process is working in the run folder {run_dir}; wait for it, or give another run_dir=")
        _settle(run_dir / "checkpoints")
        yield made


def _settle(folder: Path) -> None:
    """Put right what a process that was ended while it wrote a checkpoint has left (``learner/checkpoint.py``)."""
    for replaced in folder.glob(".step-*.replaced"):
        whole = folder / replaced.stem.removeprefix(".")
        if not whole.exists():
            replaced.rename(whole)
    for left in (*folder.glob(".step-*.replaced"), *folder.glob(".step-*.unfinished")):
        shutil.rmtree(left, ignore_errors=True)


def remove_unused(run_dir: Path) -> None:
    """Remove a run folder in which is only what every start makes; whoever calls it holds the folder and recorded nothing."""
    if {path.name for path in run_dir.rglob("*")} <= STARTED:
        shutil.rmtree(run_dir, ignore_errors=True)


def hold(opened: IO[str] | int, otherwise: str) -> None:
    """Keep others from holding an open file or folder until it is closed; ConfigError, which says ``otherwise``, where it is
    held already."""
    for _ in range(HOLD_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)  # ``is_claimed`` holds it for a moment
    raise ConfigError(otherwise)


def is_claimed(run_dir: Path) -> bool | None:
    """Return whether a process works in the run folder; None if nobody ever claimed it, or its lock cannot be read."""
    try:
        with (run_dir / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def remove_old(folder: Path) -> bool:
    """Remove a folder that nobody needs any more, and say whether it is gone. No step is worth less because it is not: that is
    logged, and the next tidying may try again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("%s is not needed any more and could not be removed: %s; it is tried again", folder, error)
    return not folder.exists()


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once, so that no reader sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def bring_to_disk(path: Path) -> None:
    """Return when what ``path``, a file or a folder, holds would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_run_dir(model: str) -> Path:
    """Return a run folder that does not exist yet, under ``runs/``."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(model).name}"
    folder, n = Path("runs") / name, 1
    while folder.exists():
        n += 1
        folder = Path("runs") / f"{name}-{n}"
    return folder


def store_file(run_dir: str | Path) -> Path:
    """Return the file of a run folder's store; ConfigError where ``run_dir`` is not a run folder."""
    file = Path(run_dir).expanduser() / "run.sqlite"
    if not file.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no run.sqlite; give the run_dir of a run")
    return file


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step)


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint folder, or None where there is none."""
    return next(reversed(checkpoints(run_dir)), None)


def checkpoint_of(run_dir: Path, step: int) -> Path | None:
    """Return the newest checkpoint folder if it is that of ``step``, else None."""
    newest = last_checkpoint(run_dir)
    return newest if newest is not None and checkpoint_step(newest) == step else None


def checkpoint_step(folder: Path) -> int:
    """Return the number of steps done when the checkpoint was saved."""
    match = CHECKPOINT.fullmatch(folder.name)
    assert match, folder
    return int(match[1])
