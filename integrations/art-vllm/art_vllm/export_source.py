"""Finds the checkpoint to export in a run folder, with what the export needs to know about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from art_core.errors import ConfigError, StoreError
from art_core.learner import checkpoint
from art_core.learner.pretrained import load_config
from art_core.plugin_api import model_folder, weights_hash
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints, store_file
from art_core.types import Call

MAX_CALL_TOKENS = 4096
"""Most tokens of the stored call that the export is checked with."""


@dataclass(frozen=True)
class Source:
    """A checkpoint and its run."""

    run: Path
    checkpoint: Path
    version: int
    start: str
    """Folder or hub name of the start weights."""
    start_weights: str
    """Their SHA-256, as recorded when the run began."""
    adapter: bool
    """Whether an adapter was trained; else all weights."""
    in_4bit: bool
    """Whether the adapter was trained on 4-bit weights."""
    quantised: bool
    """Whether the start weights are quantized."""
    dtype: str
    """Data type of the start weights if they exist, else of the trained weights."""
    config: Mapping[str, Any]
    """The run's settings."""
    call: Call | None
    """The call to compare logprobs on: one that these weights sampled, else the newest; None if none was recorded."""

    @property
    def step(self) -> int:
        return checkpoint_step(self.checkpoint)

    @property
    def name(self) -> str:
        """The served model's name."""
        return self.run.resolve().name


def find_source(run: Path, step: int | None) -> Source:
    """Return the newest checkpoint of ``run``, or that of ``step``.

    Raises ConfigError if there is none, or if an adapter's start weights are missing or have changed; StoreError if the
    checkpoint has no readable manifest.
    """
    file = store_file(run)
    folder = _checkpoint(run, step)
    state = checkpoint.read_manifest(folder)
    adapter = not (folder / "config.json").is_file()
    with Store(file) as store:
        model, hashed, config = store.meta("model") or "", store.meta("start_weights"), store.meta("config", {})
        start = _start(model, hashed, needed=adapter)
        call = _call(store, state["version"])
    model_config = _load_config(start or str(folder))
    return Source(
        run=run,
        checkpoint=folder,
        version=state["version"],
        start=start or model,
        start_weights=hashed,
        adapter=adapter,
        in_4bit=adapter and _in_4bit(folder, state, config),
        quantised=getattr(model_config, "quantization_config", None) is not None,
        dtype=str(model_config.dtype or "float32").removeprefix("torch."),
        config=config,
        call=call,
    )


def _checkpoint(run: Path, step: int | None) -> Path:
    by_step = {checkpoint_step(folder): folder for folder in checkpoints(run)}
    if not by_step:
        raise ConfigError(f"{run} has no checkpoint yet; train at least one step first")
    if step is None:
        return by_step[max(by_step)]
    if step not in by_step:
        raise ConfigError(
            f"{run} has no checkpoint of step {step}; available steps: {', '.join(map(str, sorted(by_step)))}"
        )
    return by_step[step]


def _start(model: str, hashed: str | None, *, needed: bool) -> str | None:
    """Return the location of the start weights; None if they aren't ``needed`` and are missing or changed."""
    try:
        folder = model_folder(model)
        if (current := weights_hash(folder)) != hashed:
            raise ConfigError(
                f"the start weights in {folder} have changed since the run began: SHA-256 {current[:12]}, not {hashed!s:.12}; "
                "restore them, because the adapter is only valid on them"
            )
    except ConfigError as error:
        if not needed:
            return None
        raise ConfigError(f"the adapter can't be exported without its start weights: {error}") from error
    return folder


def _load_config(model: str) -> PreTrainedConfig:
    try:
        return load_config(model)
    except ConfigError as error:
        raise StoreError(f"the config of {model} can't be loaded: {error}; restore the model") from error


def _in_4bit(folder: Path, state: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the adapter was trained on 4-bit weights.

    Old checkpoints don't record it; for them it follows from the run's settings and PEFT's config.
    """
    if "in_4bit" in state:
        return state["in_4bit"]
    peft_config = json.loads((folder / checkpoint.ADAPTER / "adapter_config.json").read_text())
    return bool(config.get("load_in_4bit")) or "4bit" in str(peft_config.get("base_model_name_or_path"))


def _call(store: Store, version: int) -> Call | None:
    """Return a call that ``version`` sampled, else the newest; never an aborted one or one over MAX_CALL_TOKENS."""
    newest = None
    for rollout_id, _, _ in reversed(store.callers()):
        calls = [row.call for row in store.recorded(rollout_id) if not row.replaced and _usable(row.call)]
        sampled = [call for call in calls if call.policy_version == version]
        if sampled:
            return sampled[-1]
        newest = newest or next(reversed(calls), None)
        if calls and max(call.policy_version for call in calls) < version:
            break  # versions only grow, so earlier rollouts have older ones
    return newest


def _usable(call: Call) -> bool:
    return bool(call.sampled_ids) and 1 < len(call.prompt_ids) + len(call.sampled_ids) <= MAX_CALL_TOKENS
