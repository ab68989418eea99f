"""Whether a call belongs to the experiment of its run folder, and a learner object to the settings of its run."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core import losses
from art_core.config import LIVE, TrainConfig, shipped_model, weights_hash
from art_core.errors import ConfigError
from art_core.loop.display import plural
from art_core.loop.own_code import digest, identity, source_of
from art_core.loop.rollout import task_id
from art_core.redaction import without_access
from art_core.store import Store
from art_core.types import Learner, Loss

log = logging.getLogger("art_core.run")

LEARNER_SETTINGS = (
    "learning_rate", "warmup_steps", "decay_steps", "max_grad_norm", "max_tokens_per_pass", "lora_rank", "load_in_4bit",
    "kl", "teacher", "importance_cap", "max_staleness",
)  # fmt: skip
"""Settings that a learner reads from its own config."""
FIXED_SETTINGS = (
    "seed", "tasks_per_step", "group_size", "temperature", "max_temperature", "advantage", "overlong", "dynamic_sampling",
    "learning_rate", "warmup_steps", "decay_steps", "max_grad_norm", "lora_rank", "load_in_4bit", "kl", "teacher",
    "importance_cap", "max_staleness", "train_nodes", "other_nodes", "frozen_model", "tool_format",
)  # fmt: skip
"""Settings that define the experiment: with another value it is another experiment."""
EVALUATION_PARTS = ("eval_tasks", "eval_reward")
"""Parts of the experiment that the weights don't depend on."""
Experiment = Mapping[str, Any]
"""The identities of agent, tasks and rewards, the settings and the loss, by name."""


@dataclass(frozen=True)
class ExpectedExperiment:
    """What the caller expects the run folder to hold."""

    experiment: Mapping[str, str] = field(default_factory=dict)
    """Identities of agent, tasks and rewards, if they are known."""
    names: Collection[str] = (*FIXED_SETTINGS, "loss")
    """Settings to compare with the folder's; ``open_run`` compares only those that it is passed."""
    until: float = math.inf
    """The last step to take."""
    begins: bool = True
    """Whether the folder belongs to this experiment from now on; False for a dry run."""


def experiment(
    agent: Any, tasks: Sequence[Any], reward: Any, eval_tasks: Sequence[Any] | None = None, eval_reward: Any = None,
    *, prompts: str, to_input: Any = None, to_output: Any = None,
) -> dict[str, str]:  # fmt: skip
    """Return what identifies an experiment besides its settings, by the names of the arguments of ``train``."""
    parts = {"agent": identity(agent), "tasks": identity_of_tasks(tasks), "reward": identity(reward)}
    parts |= {"to_input": identity(to_input or "none"), "to_output": identity(to_output or "none"), "prompts": prompts}
    if eval_tasks is not None:
        parts |= {"eval_tasks": identity_of_tasks(eval_tasks), "eval_reward": identity(eval_reward)}
    return parts


def identity_of_tasks(tasks: Sequence[Any]) -> str:
    """Return the number of tasks and a hash of their ids, in any order. Raises ConfigError like ``task_id``."""
    return f"{plural(len(tasks), 'task')} ({digest(sorted(map(task_id, tasks)))})"


def check_experiment(
    store: Store,
    run_dir: Path,
    config: TrainConfig,
    folder: str,
    loss: Loss,
    loss_name: str,
    expected: ExpectedExperiment,
) -> Experiment:
    """Return the experiment that this call passes, and record it if the run folder is new or no start has succeeded yet.

    Raises ConfigError if the folder was started with other start weights than those in ``folder`` or, without
    ``allow_changes``, with another experiment. A name that only one of the two experiments has isn't compared.
    """
    weights, settings = weights_hash(folder), without_access(dataclasses.asdict(config))
    command, allowed = settings.pop("command"), settings.pop("allow_changes")
    recorded_weights, begun = store.meta("start_weights"), store.meta("begun", False)
    if begun and recorded_weights != weights:
        raise ConfigError(
            f"the run folder {run_dir} belongs to another model: it was started with {store.meta('model')!r} "
            f"(weights {recorded_weights[:12]}), this is {config.model!r} (weights {weights[:12]}); "
            "pass another run_dir=, or the model that it was started with"
        )
    source = source_of(loss)
    compared = {name: settings[name] for name in FIXED_SETTINGS}
    compared["loss"] = f"{loss_name} (source {source})" if source else loss_name
    passed = {**expected.experiment, **{name: value for name, value in compared.items() if name in expected.names}}
    if not begun:
        local = config.model != LIVE and Path(config.model).exists() and not shipped_model(config.model)
        store.set_meta("start_weights", weights)
        store.set_meta("model", str(Path(config.model).resolve()) if local else config.model)
        store.set_meta("config", settings)
        store.set_meta("loss", loss_name)
        store.set_meta("experiment", passed)
    elif (changes := _changes(store, passed)) and not allowed:
        raise ConfigError(_refusal(store, run_dir, changes))
    if command:  # unlike the rest, this is of the last start
        store.set_meta("command", command)
    return passed


def record_experiment(
    store: Store, run_dir: Path, passed: Experiment, loss_name: str, step: int, expected: ExpectedExperiment
) -> None:
    """Mark the folder as started, and record what changed after ``step``: only EVALUATION_PARTS if no step follows."""
    if not expected.begins:
        return
    store.set_meta("begun", True)
    passed = {name: value for name, value in passed.items() if step < expected.until or name in EVALUATION_PARTS}
    changes, recorded = _changes(store, passed), store.meta("experiment")
    new = {name: value for name, value in passed.items() if name in changes or name not in recorded}
    store.set_meta("config", store.meta("config") | {name: new[name] for name in FIXED_SETTINGS if name in new})
    store.set_meta("experiment", recorded | new)
    if "loss" in new:
        store.set_meta("loss", loss_name)
    if changes:
        store.set_meta("changes", [*store.meta("changes", []), {"step": step, "changed": changes}])
    for name, (before, now) in changes.items():
        log.warning("%s was started with %s=%s and continues after step %d with %s", run_dir, name, before, step, now)


def changed_at(store: Store, step: int, name: str) -> bool:
    """Whether ``name`` was changed after ``step``."""
    return any(change["step"] == step and name in change["changed"] for change in store.meta("changes", []))


def _changes(store: Store, passed: Experiment) -> dict[str, list[Any]]:
    """Return [recorded, passed] for each name that differs."""
    recorded = store.meta("experiment")
    return {name: [recorded[name], value] for name, value in passed.items() if recorded.get(name, value) != value}


def _refusal(store: Store, run_dir: Path, changes: Mapping[str, list[Any]]) -> str:
    rows = [("setting", "recorded", "passed"), *((name, *map(str, values)) for name, values in changes.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    steps = max((step for step, _ in store.steps()), default=0)
    edited = any("(source " in str(old) and "(source " in str(new) for old, new in changes.values())
    hint = ", which is right if an edit of the source does not change what it computes" if edited else ""
    parts = ", ".join(name for name in changes if name not in FIXED_SETTINGS)
    restore = f"restore the files of {parts} if they were edited, and " if parts else ""
    repeat = f"run `art train --resume {run_dir}`" if store.meta("command") else "repeat the call that began it"
    return (
        f"the run folder {run_dir} holds another experiment ({plural(steps, 'step')} done). What differs:\n\n{table}\n\n"
        f"- To start a new run, pass another run_dir.\n"
        f"- To continue with what is recorded, {restore}{repeat}.\n"
        f"- To continue with what is passed now, pass allow_changes=True (`art train --allow-changes`){hint}. The change is "
        "recorded."
    )


def check_learner(learner: Learner, config: TrainConfig, loss: Loss, loss_name: str) -> None:
    """Raise ConfigError if a learner object was made with other settings than the run.

    Logs a warning if settings or the loss may not reach the object, because it has no config, or another loss.
    """
    kind, own = type(learner).__name__, getattr(learner, "config", None)
    other = TrainConfig() if own is None else own
    names = (*LEARNER_SETTINGS, "steps") if config.decay_steps else LEARNER_SETTINGS
    differing = [name for name in names if getattr(other, name, getattr(config, name)) != getattr(config, name)]
    passed = ", ".join(f"{name}={getattr(config, name)}" for name in differing)
    if differing and own is None:
        log.warning("learner=%s(...) has no config, so these settings may not reach it: %s", kind, passed)
    elif differing:
        made_with = ", ".join(f"{name}={getattr(own, name)}" for name in differing)
        raise ConfigError(
            f"the learner {kind} was made with {made_with} and the run with {passed}; pass the same to both, or pass the "
            "learner by name"
        )
    if loss_name != "grpo" and losses.plain(getattr(learner, "loss", None)) is not losses.plain(loss):
        log.warning("loss=%s does not reach learner=%s(...), which has its own loss", loss_name, kind)


def loss_name_of(loss: str | Loss) -> str:
    """Return the name of a loss, with the keywords of its partials."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, functools.partial):
        keywords = ", ".join(f"{name}={value!r}" for name, value in loss.keywords.items())
        # Without addresses, which differ between processes.
        return f"{loss_name_of(loss.func)}({re.sub(' at 0x[0-9a-fA-F]+', '', keywords)})"
    return getattr(loss, "__name__", type(loss).__name__)
