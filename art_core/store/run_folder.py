"""Where a run keeps what on disk, and the lock on its folder."""

from __future__ import annotations

import atexit
import fcntl
import itertools
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
"""Open lock files of ``claimed``."""
_NAMED: set[Path] = set()
"""Folders that ``new_run_dir`` made."""


def _release_in_child() -> None:
    """A forked child shares the open file and so the lock, and a pool's worker may outlive this process."""
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def claimed(run_dir: Path) -> Iterator[bool]:
    """Create the run folder if needed and lock it against writers in other processes. Yields whether it is new.

    Raises StoreError if it cannot be created, ConfigError if another process holds it or it is a folder of runs.
    """
    runs = sorted(file.parent.name for file in run_dir.glob("*/run.sqlite"))
    if runs and not (run_dir / "run.sqlite").exists():
        raise ConfigError(
            f"{run_dir} is a folder of runs ({', '.join(runs[:3])}{', ...' * (len(runs) > 3)}); give a run one of its own, such "
            f"as run_dir={str(run_dir / 'my-run')!r}"
        )
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        new = run_dir.absolute() in _NAMED
        with suppress(FileExistsError):
            run_dir.mkdir()
            new = True
        new = new and not any(run_dir.iterdir())  # this process may have used it before
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise StoreError(f"the run folder {run_dir} cannot be made: {error}; pass another run_dir=") from error
    _LOCKS.add(lock)
    with lock:
        hold(lock, f"the run folder {run_dir} is open here or in another process; close it, or use another folder")
        _clean_up(run_dir / "checkpoints")
        yield new


def _clean_up(folder: Path) -> None:
    """Finish or undo the saving of a checkpoint that was interrupted (``learner/checkpoint.py``)."""
    for replaced in folder.glob(".step-*.replaced"):
        whole = folder / replaced.stem.removeprefix(".")
        if not whole.exists():
            replaced.rename(whole)
    for remains in (*folder.glob(".step-*.replaced"), *folder.glob(".step-*.unfinished")):
        shutil.rmtree(remains, ignore_errors=True)


def remove_unused(run_dir: Path) -> None:
    """Remove a run folder that has only what every start creates; the caller holds it and recorded nothing."""
    if {path.name for path in run_dir.rglob("*")} <= STARTED:
        shutil.rmtree(run_dir, ignore_errors=True)


def hold(opened: IO[str] | int, message: str) -> None:
    """Lock an open file or folder until it is closed. Raises ConfigError with ``message`` if another process holds it."""
    for _ in range(HOLD_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)  # ``is_claimed`` holds it for a moment
    raise ConfigError(message)


def is_claimed(run_dir: Path) -> bool | None:
    """Return whether a process holds the run folder; None if nobody ever claimed it, or its lock is unreadable."""
    try:
        with (run_dir / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def remove_old(folder: Path) -> bool:
    """Remove a folder that nobody needs, and return whether it is gone. A failure is logged, and can be tried again later."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("could not remove %s, which is no longer needed: %s; will retry later", folder, error)
    return not folder.exists()


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once, so that no reader sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def bring_to_disk(path: Path) -> None:
    """Sync a file or a folder, so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_run_dir(model: str) -> Path:
    """Make a run folder under ``runs/``, which no other process gets; if it stays empty, it is removed at exit."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(model).name}"
    try:
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise StoreError(f"no run folder can be made in {Path('runs').absolute()}: {error}; pass run_dir=") from error
    _NAMED.add(folder.absolute())
    return folder


@atexit.register
def _remove_empty() -> None:
    for folder in _NAMED:
        with suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


def store_file(run_dir: str | Path) -> Path:
    """Return the path of a run folder's store. Raises ConfigError if ``run_dir`` is not a run folder."""
    file = Path(run_dir).expanduser() / "run.sqlite"
    if not file.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no run.sqlite; pass the run_dir of a run")
    return file


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((folder for folder in folders if CHECKPOINT.fullmatch(folder.name)), key=checkpoint_step)


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint folder, or None."""
    return next(reversed(checkpoints(run_dir)), None)


def checkpoint_step(folder: Path) -> int:
    """Return the number of steps done when the checkpoint was saved."""
    return int(folder.name.removeprefix("step-"))
