"""The installed plugins with other texts in the agent's requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.capture import CHAT, Dialect
from art_core.plugin_api import Plugins
from art_gepa.live import PromptedLive
from art_gepa.prompts import Current, Fixed, Prompted


class WithPrompts(Plugins):
    """The installed plugins, with the changes of a file in every request: ``art.train(..., plugins=WithPrompts(file))``."""

    def __init__(self, file: str | Path, *extra: object) -> None:
        super().__init__(*extra)
        self.source = self._source(Path(file).absolute())

    def _source(self, file: Path) -> Fixed | Current:
        return Fixed(file)

    def registered(self, hook: str) -> dict[str, Any]:
        """Return what is registered; dialects make the changes."""
        found = super().registered(hook)
        if hook != "register_dialects":
            return found
        return {path: Prompted(it, self.source) for path, it in {CHAT: Dialect(), **found}.items()}

    def offer(self, hook: str, name: str) -> Any:
        """Return what is registered; the live engine makes the changes."""
        found = super().offer(hook, name)
        if (hook, name) != ("register_engines", "live"):
            return found
        return replace(found, thing=PromptedLive(found.thing, self.source))


class WithCandidate(WithPrompts):
    """For a search, whose file changes between rollouts."""

    def _source(self, file: Path) -> Current:
        return Current(file)
