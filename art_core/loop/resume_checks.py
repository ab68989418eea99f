"""Whether a run's settings agree with those that its folder was begun with and its learner was made with.

Knows nothing about what the settings do.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.config import TrainConfig, shipped_model, weights_hash
from art_core.errors import ConfigError
from art_core.loop.display import plural
from art_core.loop.identity import source_of
from art_core.redaction import without_access
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
    "warmup_steps", "max_grad_norm", "lora_rank", "load_in_4bit", "kl", "importance_cap", "max_staleness", "train_nodes",
    "other_nodes", "frozen_model",
)  # fmt: skip
"""Settings that make a run another one if they change half way."""
USUAL_LOSS = "grpo"
MEASURED = ("eval_tasks", "eval_reward")
"""Of what ``train`` was passed: the weights do not depend on it."""
Passed = Mapping[str, Any]
"""What a run folder is held to, by name: settings, the loss, and what ``train`` knows of agent, tasks and rewards."""


@dataclass(frozen=True)
class Terms:
    """What a run is opened for, and so what its folder is held to."""

    experiment: Mapping[str, str] = field(default_factory=dict)
    """Agent, tasks and rewards, as far as they are known."""
    names: Collection[str] = (*RESUMED, "loss")
    """Settings that count; what was left out of ``open_run`` does not."""
    until: float = math.inf
    """The step after which no other is taken."""
    begins: bool = True
    """Whether other terms are refused from now on: not after a dry run."""


def check_begun_with(
    store: Store, run_dir: Path, config: TrainConfig, folder: str, loss: Loss, loss_name: str, terms: Terms
) -> Passed:
    """Note what a run folder is begun with, also if a start before failed, and return what it is held to.

    Raises ConfigError for a folder that was begun with other start weights (in ``folder``), and without ``allow_changes``
    for one that was begun on other ``terms``; what either does not know is no difference.
    """
    mine, settings = weights_hash(folder), without_access(dataclasses.asdict(config))
    command, allowed = settings.pop("command"), settings.pop("allow_changes")
    theirs, begun = store.meta("start_weights"), store.meta("begun", bool(store.openings()))
    if theirs not in (None, mine) and begun:
        raise ConfigError(
            f"the run folder {run_dir} belongs to another model: it was begun with {store.meta('model')!r} "
            f"(weights {theirs[:12]}), this is {config.model!r} (weights {mine[:12]}); "
            "give another run_dir=, or the model that it was begun with"
        )
    of_loss = f"{loss_name} (source {source})" if (source := source_of(loss)) else loss_name
    known = {**{name: settings[name] for name in RESUMED}, "loss": of_loss}
    passed = {**terms.experiment, **{name: it for name, it in known.items() if name in terms.names}}
    passed = {name: list(it) if isinstance(it, tuple) else it for name, it in passed.items()}  # as JSON returns it
    if theirs is None or not begun:
        model = config.model
        store.set_meta("start_weights", mine)
        store.set_meta(
            "model", model if shipped_model(model) or not Path(model).exists() else str(Path(model).resolve())
        )
        store.set_meta("config", settings)
        store.set_meta("loss", loss_name)
        store.set_meta("experiment", passed)
    elif (changes := _changes(store, passed)) and not allowed:
        raise ConfigError(_refusal(store, run_dir, changes))
    store.set_meta("begun", begun)
    if command:  # of the last start, the rest is of the first
        store.set_meta("command", command)
    return passed


def note_begun(store: Store, run_dir: Path, passed: Passed, loss_name: str, step: int, terms: Terms) -> None:
    """Note that the folder is begun, and what has changed at ``step``: if no step is left, of ``MEASURED`` only."""
    if not terms.begins:
        return
    store.set_meta("begun", True)
    passed = {name: it for name, it in passed.items() if step < terms.until or name in MEASURED}
    changes, recorded = _changes(store, passed), _recorded(store)
    new = {name: it for name, it in passed.items() if name in changes or name not in recorded}
    store.set_meta("config", store.meta("config", {}) | {name: it for name, it in new.items() if name in RESUMED})
    store.set_meta("experiment", recorded | new)
    if "loss" in new:
        store.set_meta("loss", loss_name)
    if changes:
        store.set_meta("changes", [*store.meta("changes", []), {"step": step, "changed": changes}])
        for name, (before, now) in changes.items():
            log.warning("%s was begun with %s=%s and continues after step %d with %s", run_dir, name, before, step, now)


def changed_at(store: Store, step: int, name: str) -> bool:
    """Whether ``name`` was changed when so many steps were done."""
    return any(it["step"] == step and name in it["changed"] for it in store.meta("changes", []))


def _recorded(store: Store) -> dict[str, Any]:
    if (recorded := store.meta("experiment")) is not None:
        return recorded
    begun = {**store.meta("config", {}), "loss": store.meta("loss")}  # of a run from before more was noted
    return {name: it for name, it in begun.items() if name in Terms.names and (name != "loss" or it)}


def _changes(store: Store, passed: Passed) -> dict[str, list[Any]]:
    """Return [recorded, passed] of what differs."""
    recorded = _recorded(store)
    return {name: [recorded[name], it] for name, it in passed.items() if name in recorded and recorded[name] != it}


def _refusal(store: Store, run_dir: Path, changes: Mapping[str, list[Any]]) -> str:
    rows = [("setting", "recorded", "passed"), *((name, *map(str, both)) for name, both in changes.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[it.ljust(width) for it, width in zip(row, widths, strict=True)] for row in rows]
    table = "\n".join("  ".join(line).rstrip() for line in lines)
    steps = max((step for step, _ in store.steps()), default=0)
    edited = any("(source " in str(old) and "(source " in str(new) for old, new in changes.values())
    hint = "; right if an edit of the source does not change what it computes" if edited else ""
    recorded = f"`art train --resume {run_dir}`" if store.meta("command") else "repeat the call that began it"
    return (
        f"the run folder {run_dir} holds another experiment ({plural(steps, 'step')} done). It differs in:\n\n{table}\n\n"
        f"- To begin a new run, pass another run_dir.\n"
        f"- To continue with what is recorded: {recorded}.\n"
        f"- To continue with what is passed now, allow it: allow_changes=True, or --allow-changes of `art train`{hint}. The "
        "change is recorded."
    )


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
        keywords = ", ".join(f"{name}={value!r}" for name, value in loss.keywords.items())
        return f"{name_of(loss.func)}({re.sub(' at 0x[0-9a-fA-F]+', '', keywords)})"  # an address is of one process
    return getattr(loss, "__name__", type(loss).__name__)


def _function(loss: Any) -> Any:
    """Return the loss without the keywords that a learner, or whoever made it, put on it."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _said(config: Any, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(config, name)}" for name in names)
