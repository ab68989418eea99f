"""Which processes a test has started and not ended, itself or through others: they carry a mark in their environment. Linux."""

from pathlib import Path


def marked(mark: str) -> dict[int, bytes]:
    """Return the command lines of the processes whose environment holds ``mark``, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if mark.encode() in environment:
            found[int(folder.name)] = command
    return found
