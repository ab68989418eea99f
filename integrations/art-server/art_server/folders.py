"""Maps names of runs to their folders: one run folder, or all run folders in a folder.

A name can't lead to any other folder, because it is only compared with the names of the existing ones.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from art_core.errors import ConfigError

STORE = "run.sqlite"


class RunFolders(Mapping[str, Path]):
    """The runs in ``root`` by name, newest first. It always reflects the current state, including runs that start later.

    Raises ConfigError if ``root`` isn't a folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        if not self.root.is_dir():
            raise ConfigError(f"no folder {root}; pass the run_dir of a run, or a folder of runs")

    @property
    def single(self) -> bool:
        """Whether ``root`` is itself a run folder."""
        return (self.root / STORE).is_file()

    def __getitem__(self, name: str) -> Path:
        for each, path in self._items():
            if each == name:
                return path
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items())

    def __len__(self) -> int:
        return sum(1 for _ in self._items())

    def items(self) -> ItemsView[str, Path]:
        """Return the current runs; reads ``root`` once, and not again for every run."""
        return dict(self._items()).items()

    def _items(self) -> Iterator[tuple[str, Path]]:
        if self.single:
            yield self.root.name or "run", self.root
            return
        for path in sorted(sorted(self.root.iterdir()), key=_opened, reverse=True):
            twice = path.is_symlink() and path.resolve().parent == self.root
            if not path.name.startswith(".") and not twice and (path / STORE).is_file():
                yield path.name, path


def _opened(folder: Path) -> float:
    """Return when a run was last opened, which recreates its lock file. Without a lock file: when its store was last written."""
    for name in (".lock", STORE):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return 0.0


class OneFolder(Mapping[str, Path]):
    """The run folder of a server, which may not exist yet."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir).expanduser().resolve()

    def __getitem__(self, name: str) -> Path:
        if name != self._path.name:
            raise KeyError(name)
        return self._path

    def __iter__(self) -> Iterator[str]:
        return iter([self._path.name])

    def __len__(self) -> int:
        return 1
