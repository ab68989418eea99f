"""Names of runs -> their folders: one run folder, or all that lie in a folder. A name never leads anywhere else, because it is
only compared with the names of what lies there. Knows nothing about what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from art_core.errors import ConfigError

STORE = "run.sqlite"


class RunFolders(Mapping[str, Path]):
    """The runs under ``root`` by name, as they are now, the newest first: a run that begins later is there too.

    Raises ConfigError where ``root`` is no folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        if not self.root.is_dir():
            raise ConfigError(f"there is no folder {root}; give the run_dir of a run, or a folder of runs")

    @property
    def single(self) -> bool:
        """Whether ``root`` is a run itself."""
        return (self.root / STORE).is_file()

    def __getitem__(self, name: str) -> Path:
        for found, path in self._items():
            if found == name:
                return path
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items())

    def __len__(self) -> int:
        return sum(1 for _ in self._items())

    def _items(self) -> Iterator[tuple[str, Path]]:
        if self.single:
            yield self.root.name or "run", self.root
            return
        for path in sorted(sorted(self.root.iterdir()), key=_opened, reverse=True):
            if not path.name.startswith(".") and (path / STORE).is_file():
                yield path.name, path


def _opened(folder: Path) -> float:
    """Return when a run was opened last: its lock is made anew then. Without a lock, when its store was written last."""
    for name in (".lock", STORE):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return 0.0


class OneFolder(Mapping[str, Path]):
    """One run folder, there already or not yet: that of a server that trains."""

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
