"""Copies checkpoint folders, in blocks, between machines that share no disk."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK = 64 * 2**20


def listed(folder: Path) -> list[tuple[str, int]]:
    """Return the relative name and the size in bytes of every file in ``folder``."""
    return [
        (str(path.relative_to(folder)), path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()
    ]


def blocks(files: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the file name and the offset of every block; an empty file has one block."""
    for name, size in files:
        yield from ((name, start) for start in range(0, max(size, 1), BLOCK))


def read_block(folder: Path, name: str, start: int) -> bytes:
    with (folder / name).open("rb") as file:
        file.seek(start)
        return file.read(BLOCK)


def write_block(folder: Path, name: str, block: bytes) -> None:
    """Append a block to its file; blocks must arrive in order."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(block)


def replace_folder(folder: Path, received: Path) -> None:
    """Replace ``folder`` by ``received``, which is in the same directory."""
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    received.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def marker(folder: Path) -> Iterator[Path]:
    """Create a file in ``folder`` for the block, by which another process can tell whether it sees the same disk."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".art-ray-{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
