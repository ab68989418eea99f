"""Weights & Biases: ``train(trackers=["wandb"])`` and ``ARTWandbLogger``. wandb is imported only when a run is opened."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core import hookimpl
from art_core.plugin_api import Register

if TYPE_CHECKING:
    from art_core import TrainConfig
    from art_wandb.logger import ARTWandbLogger
    from art_wandb.tracker import WandbTracker

__all__ = ["ARTWandbLogger", "WandbTracker", "register_trackers"]
MODULES = {"ARTWandbLogger": "art_wandb.logger", "WandbTracker": "art_wandb.tracker"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'art_wandb' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


@hookimpl
def register_trackers(register: Register) -> None:
    register("wandb", wandb_tracker)


def wandb_tracker(run_dir: Path, config: TrainConfig) -> WandbTracker:
    """Return a tracker that logs to one W&B run per run folder."""
    from art_wandb.tracker import WandbTracker

    return WandbTracker(run_dir, config)
