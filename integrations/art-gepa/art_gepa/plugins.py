"""The installed plugins, with prompt changes applied to the agent's requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.capture import CHAT, Dialect
from art_core.plugin_api import Plugins
from art_gepa.live import PromptedLive
from art_gepa.prompts import Current, Fixed, Prompted


class WithPrompts(Plugins):
    """Applies the changes in a file to every request: ``art.train(..., plugins=WithPrompts(file))``."""

    def __init__(self, file: str | Path, *extra: object) -> None:
        super().__init__(*extra)
        self.source = self._source(Path(file).absolute())
        self.prompts = self.source.identity

    def _source(self, file: Path) -> Fixed | Current:
        return Fixed(file)

    def registered(self, hook: str) -> dict[str, Any]:
        """Return what is registered, with dialects that apply the changes."""
        found = super().registered(hook)
        if hook != "register_dialects":
            return found
        return {path: Prompted(it, self.source) for path, it in {CHAT: Dialect(), **found}.items()}

    def offer(self, hook: str, name: str) -> Any:
        """Return what is registered, with a live engine that applies the changes."""
        found = super().offer(hook, name)
        if (hook, name) != ("register_engines", "live"):
            return found
        return replace(found, thing=PromptedLive(found.thing, self.source))


class WithCandidate(WithPrompts):
    """For a search, which rewrites the file between rollouts."""

    def _source(self, file: Path) -> Current:
        return Current(file)
