"""Trains and serves the policy on rented GPUs, through Tinker's API. Imports the SDK only if a run uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register

if TYPE_CHECKING:
    from art_core import TrainConfig
    from art_core.types import Loss
    from art_tinker.engine import TinkerEngine
    from art_tinker.learner import TinkerLearner


@hookimpl
def register_engines(register: Register) -> None:
    register("tinker", tinker_engine, check=check)


@hookimpl
def register_learners(register: Register) -> None:
    register("tinker", tinker_learner, check=check)


def check() -> None:
    """Raise ConfigError if the server can't be reached, or no key is set."""
    from art_tinker.service import check

    check()


def tinker_engine(model_folder: str, config: TrainConfig) -> TinkerEngine:
    """Return an engine that samples on the server."""
    from art_tinker.engine import TinkerEngine

    return TinkerEngine(model_folder, config)


tinker_engine.loads_files = True  # type: ignore[attr-defined]


def tinker_learner(model_folder: str, config: TrainConfig, loss: Loss) -> TinkerLearner:
    """Return a learner that trains an adapter on the server."""
    from art_tinker.learner import TinkerLearner

    return TinkerLearner(model_folder, config, loss)
