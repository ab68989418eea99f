"""What is finished, so that an interrupted call continues where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from art_core.errors import ConfigError
from art_core.store.run_folder import write_whole
from art_core.types import JsonDict

FILE = "improve.json"


class Journal:
    """The finished parts of a call in ``run_dir``, by name, with the seconds that each took.

    Raises ConfigError if the folder was begun with different arguments than ``asked``.
    """

    def __init__(self, run_dir: Path, asked: JsonDict) -> None:
        self._file = run_dir / FILE
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        begun = known.get("asked", asked)
        if different := [name for name in asked if begun.get(name) != asked[name]]:
            raise ConfigError(
                f"{run_dir} was begun with different arguments ({', '.join(different)}); pass the same ones, or another run_dir"
            )
        self._content = {"asked": asked, "parts": known.get("parts", {})}

    async def once(self, name: str, work: Callable[[], Awaitable[JsonDict]]) -> JsonDict:
        """Return what ``work`` returned when it was finished, now or in an earlier call."""
        parts = self._content["parts"]
        if name not in parts:
            begun = time.monotonic()
            result = await work()
            parts[name] = {**result, "seconds": time.monotonic() - begun}
            write_whole(self._file, json.dumps(self._content, indent=2))
        return parts[name]
