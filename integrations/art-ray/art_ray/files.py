"""A checkpoint folder's way between machines that share no disk, in blocks. Knows nothing about what is in it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK = 64 * 2**20


def listed(folder: Path) -> list[tuple[str, int]]:
    """Return the files in ``folder``, by their relative names, with their sizes."""
    return [(str(it.relative_to(folder)), it.stat().st_size) for it in sorted(folder.rglob("*")) if it.is_file()]


def blocks(files: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield name and place of every block; an empty file has one."""
    for name, size in files:
        yield from ((name, start) for start in range(0, max(size, 1), BLOCK))


def read_block(folder: Path, name: str, start: int) -> bytes:
    with (folder / name).open("rb") as file:
        file.seek(start)
        return file.read(BLOCK)


def write_block(folder: Path, name: str, block: bytes) -> None:
    """Blocks of a file come in order."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(block)


def put_in_place(arrived: Path, folder: Path) -> None:
    """Let a folder that is beside ``folder`` take its place."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    arrived.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def marker(folder: Path) -> Iterator[Path]:
    """Give a file in ``folder`` by which others know that they see the same disk."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".art-ray-{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
