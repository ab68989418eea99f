"""OpenPipe ART's public names on top of art: ``import art_openpipe as art``. Each name is imported at its first use.

As a plugin it only registers a path at which each answer names its recorded call.
"""

from __future__ import annotations

import importlib
from typing import Any

from art_core import hookimpl
from art_core.plugin_api import Register
from art_openpipe.dialect import PATH, Named

NAMES = {
    "auto": ("auto_trajectory", "capture_auto_trajectory", "capture_yielded_trajectory", "yield_trajectory"),
    "gather": ("gather_trajectories", "gather_trajectory_groups", "trajectory_group_batches"),
    "local": ("LocalBackend",),
    "model": ("Model", "TrainableModel"),
    "serverless": ("ServerlessBackend", "ServerlessTrainResult"),
    "trajectories": ("History", "Trajectory", "TrajectoryGroup"),
    "types": (
        "Backend",
        "LocalTrainResult",
        "Messages",
        "MessagesAndChoices",
        "Tools",
        "TrainConfig",
        "TrainResult",
        "TrainSFTConfig",
    ),
    "utils": ("retry",),
}
"""Module -> the names that the package exports from it."""
MODULES = (
    "dev", "gather", "langgraph", "local", "mcp", "model", "pipeline_trainer", "rewards", "serverless", "skypilot",
    "tinker",
    "trajectories", "types", "utils",
)  # fmt: skip
_PLACES = {name: module for module, names in NAMES.items() for name in names}

__all__ = [*_PLACES, "dev"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"art_openpipe has no {name!r}; docs/from-openpipe-art.md lists the names that work, differ or are refused"
    )


@hookimpl
def register_dialects(register: Register) -> None:
    """Answer chat completions at an additional path."""
    register(PATH, Named())
