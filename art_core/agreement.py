"""Whether a run's settings agree with those that its folder was begun with and its learner was made with.

Knows nothing about what the settings do.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

from art_core.config import TrainConfig, weights_hash
from art_core.errors import ConfigError
from art_core.shown import without_access
from art_core.store import Store
from art_core.types import Learner, Loss

log = logging.getLogger("art_core.run")

LEARNING = (
    "learning_rate", "warmup_steps", "max_grad_norm", "max_tokens_per_pass", "lora_rank", "load_in_4bit", "kl",
    "importance_cap", "max_staleness",
)  # fmt: skip
"""Settings that a learner reads from its own config."""
RESUMED = (
    "seed", "tasks_per_step", "group_size", "temperature", "advantage", "overlong", "dynamic_sampling", "learning_rate",
    "lora_rank", "load_in_4bit", "kl", "importance_cap", "max_staleness", "train_nodes", "other_nodes", "frozen_model",
)  # fmt: skip
"""Settings that make a run another one where they change half way."""
USUAL_LOSS = "grpo"


def check_begun_with(store: Store, run_dir: Path, config: TrainConfig, folder: str, loss: str) -> None:
    """Note what a run folder is begun with, also where a start before failed; of one that goes on, refuse other start weights
    (in ``folder``) with a ConfigError, and say which settings differ."""
    mine, settings = weights_hash(folder), without_access(dataclasses.asdict(config))
    theirs, goes_on = store.meta("start_weights"), bool(store.openings())
    if theirs not in (None, mine) and goes_on:
        raise ConfigError(
            f"the run folder {run_dir} belongs to another model: it was begun with {store.meta('model')!r} "
            f"(weights {theirs[:12]}), this is {config.model!r} (weights {mine[:12]}); "
            "give another run_dir=, or the model that it was begun with"
        )
    if command := settings.pop("command"):  # of the last start, the rest is of the first
        store.set_meta("command", command)
    if theirs is None or not goes_on:
        model = config.model
        store.set_meta("start_weights", mine)
        store.set_meta("model", model if model == "tiny" or not Path(model).exists() else str(Path(model).resolve()))
        store.set_meta("config", settings)
        store.set_meta("loss", loss)
        return
    begun = {**store.meta("config", {}), "loss": store.meta("loss") or loss}
    now = {**{name: settings[name] for name in RESUMED}, "loss": loss}
    for name, value in now.items():
        value = list(value) if isinstance(value, tuple) else value  # as JSON gives it back
        if begun.get(name, value) != value:
            log.warning("%s was begun with %s=%s and goes on with %s", run_dir, name, begun[name], value)


def check_learner(learner: Learner, config: TrainConfig, loss: Loss, loss_name: str) -> None:
    """Refuse a learner object that was made with other settings than the run, with a ConfigError.

    Settings that an object cannot have been given are warned about: it has no config, or a loss of its own.
    """
    kind, own = type(learner).__name__, getattr(learner, "config", None)
    usual = TrainConfig()
    if own is None:
        given = [name for name in LEARNING if getattr(config, name) != getattr(usual, name)]
        if given:
            log.warning("learner=%s(...) has no config, so these may not reach it: %s", kind, _said(config, given))
    else:
        differing = [name for name in LEARNING if getattr(own, name, getattr(config, name)) != getattr(config, name)]
        if differing:
            raise ConfigError(
                f"the learner {kind} was made with {_said(own, differing)} and the run with {_said(config, differing)}; "
                "give both the same, or the learner by its name"
            )
    if loss_name != USUAL_LOSS and _function(getattr(learner, "loss", None)) is not _function(loss):
        log.warning("loss=%s is not handed to learner=%s(...), which was made before", loss_name, kind)


def name_of(loss: str | Loss) -> str:
    """Return the name of a loss, with the keywords that it was given."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, functools.partial):
        return f"{name_of(loss.func)}({', '.join(f'{name}={value!r}' for name, value in loss.keywords.items())})"
    return getattr(loss, "__name__", type(loss).__name__)


def _function(loss: Any) -> Any:
    """Return the loss without the keywords that a learner, or whoever made it, put on it."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _said(config: Any, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(config, name)}" for name in names)
