"""Rollouts and learning on a Ray cluster: ``train(executor="ray", learner="ray")``. Imports Ray only when a run uses it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from art_core import hookimpl
from art_core.plugin_api import Register

if TYPE_CHECKING:
    from art_core import TrainConfig
    from art_core.types import Loss
    from art_ray.executor import RayExecutor
    from art_ray.learner import RayLearner

__all__ = ["RayExecutor", "RayLearner", "register_executors", "register_learners"]
_MODULES = {"RayExecutor": "art_ray.executor", "RayLearner": "art_ray.learner"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'art_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


@hookimpl
def register_executors(register: Register) -> None:
    register("ray", ray_executor)


@hookimpl
def register_learners(register: Register) -> None:
    register("ray", ray_learner)


def ray_executor(config: TrainConfig) -> RayExecutor:
    """Return an executor on a Ray cluster; ``config.executor_args`` are its options."""
    from art_ray.executor import RayExecutor

    return RayExecutor(config)


def ray_learner(model_folder: str, config: TrainConfig, loss: Loss) -> RayLearner:
    """Return a learner in processes on a Ray cluster; ``config.learner_args`` are its options."""
    from art_ray.learner import RayLearner

    return RayLearner(model_folder, config, loss)
