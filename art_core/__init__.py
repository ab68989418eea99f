"""Train the agent you already have.

``import art_core as art`` is light: torch, transformers and the clients of agents are loaded when they are needed.
"""

import importlib
from typing import Any

from art_core.hookspecs import hookimpl

__all__ = ["hookimpl"]

_LAZY = {"destination": "attribution", "exempt": "attribution", "train": "training", "train_sync": "training",
         "open_run": "training", "evaluate": "evaluation"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"art_core.{_LAZY[name]}"), name)
    raise AttributeError(name)
