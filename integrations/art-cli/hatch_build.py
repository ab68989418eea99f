"""Adds the demo's example to the wheel and the sdist. A wheel may be built from an unpacked sdist, which has it already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXAMPLE = "examples/email_search"


class AddExample(BuildHookInterface):
    """Called by hatchling before each build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Include the checkout's example."""
        if not Path(self.root, "art_cli", EXAMPLE).is_dir():
            build_data["force_include"][str(Path(self.root, "../..", EXAMPLE))] = f"art_cli/{EXAMPLE}"
