"""OpenPipe ART's public names (0.5.23) on top of art: ``import art_openpipe as art``. Each is imported at its first use.

As a plugin it registers a path at which each answer names its recorded call, and lets calls name the block that captures them.
"""

from __future__ import annotations

import importlib
from typing import Any

from art_core import hookimpl, name_agents
from art_core.plugin_api import Register
from art_openpipe.record import PATH, Named, calling_scope
from art_openpipe.refused import add_modules

NAMES = {
    "dev": "LoRAConfig",
    "gather": "gather_trajectories gather_trajectory_groups trajectory_group_batches",
    "metrics": "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS PIPELINE_RL_SCORE_METRICS",
    "model": "Model TrainableModel",
    "refused": "MegatronRuntimeConfig MegatronTopologyConfig PipelineAutotuneConfig PipelineRuntimeConfig "
    "ServerlessBackend get_megatron_runtime_config init_megatron_runtime_config",
    "tokens": "get_tokenizer tensorize tokenize",
    "trajectories": "Trajectory TrajectoryGroup capture_yielded_trajectory current_trajectory no_capture trajectory "
    "trajectory_group yield_trajectory",
    "local": "Backend",
    "types": "LocalServingUnavailableError LocalTrainResult Messages MessagesAndChoices ServerlessTrainResult Tools "
    "TrainConfig TrainResult TrainSFTConfig",
    "utils": "retry",
}
"""Module -> the names that the package exports from it."""
MODULES = ["dev", "langgraph", "local", "metrics", "model", "rewards", "trajectories", "types", "utils"]
REPLACED = {
    "auto_trajectory": "art.current_trajectory()",
    "capture_auto_trajectory": "await art.trajectory(coroutine)",
    "History": "art.trajectories.LegacyHistory",
    "LocalBackend": "from art_openpipe.local import LocalBackend",
}
"""Names of earlier releases -> what OpenPipe ART 0.5.23 has instead."""
_PLACES = {name: module for module, names in NAMES.items() for name in names.split()}

__all__ = [*_PLACES, "dev"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    use = (
        f"use {REPLACED[name]}"
        if name in REPLACED
        else "docs/from-openpipe-art.md lists what works, differs or is refused"
    )
    raise AttributeError(f"OpenPipe ART 0.5.23 has no {name!r}, or art_openpipe does not: {use}")


@hookimpl
def register_dialects(register: Register) -> None:
    """Answer chat completions at an additional path."""
    register(PATH, Named())


@hookimpl
def redirect_clients() -> None:
    """Let every call name the trajectory that captures it."""
    name_agents(calling_scope)


add_modules(__name__)
