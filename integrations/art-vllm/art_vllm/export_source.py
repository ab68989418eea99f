"""A run folder -> the checkpoint to export and all that must be known of it. Knows nothing about what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from art_core.config import model_folder, weights_hash
from art_core.errors import ConfigError, StoreError
from art_core.learner import checkpoint
from art_core.learner.pretrained import load_config
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints, store_file
from art_core.types import Call

LONGEST = 4096
"""Tokens of the stored call that the export is checked with."""


@dataclass(frozen=True)
class Source:
    """A checkpoint and the run that it is of."""

    run: Path
    checkpoint: Path
    version: int
    start: str
    """Folder or hub name of the start weights."""
    start_weights: str
    """Their SHA-256, as the run noted it when it began."""
    adapter: bool
    """Whether an adapter was trained, not all weights."""
    in_4bit: bool
    """Whether the weights under the adapter were in 4 bits."""
    quantised: bool
    """Whether the start weights are so themselves."""
    dtype: str
    """Of the start weights, where they are there; else of what was trained."""
    config: Mapping[str, Any]
    """The run's settings."""
    call: Call | None
    """To compare logprobs with: one that these weights sampled, else the newest; None where none was recorded."""

    @property
    def step(self) -> int:
        return checkpoint_step(self.checkpoint)

    @property
    def name(self) -> str:
        """What the model is called where it is served."""
        return self.run.resolve().name


def find_source(run: Path, step: int | None) -> Source:
    """Return the newest checkpoint of ``run``, or that of ``step``. Raises ConfigError where there is none, or where the
    start weights under an adapter are gone or are others; StoreError where the checkpoint has no readable manifest."""
    file = store_file(run)
    folder = _checkpoint(run, step)
    state = checkpoint.read_manifest(folder)
    adapter = not (folder / "config.json").is_file()
    with Store(file) as store:
        model, hashed, config = store.meta("model") or "", store.meta("start_weights"), store.meta("config", {})
        start = _start(model, hashed, needed=adapter)
        call = _call(store, state["version"])
    described = _described(start or str(folder))
    return Source(
        run=run,
        checkpoint=folder,
        version=state["version"],
        start=start or model,
        start_weights=hashed,
        adapter=adapter,
        in_4bit=adapter and _in_4bit(folder, state, config),
        quantised=getattr(described, "quantization_config", None) is not None,
        dtype=str(described.dtype or "float32").removeprefix("torch."),
        config=config,
        call=call,
    )


def _checkpoint(run: Path, step: int | None) -> Path:
    kept = {checkpoint_step(folder): folder for folder in checkpoints(run)}
    if not kept:
        raise ConfigError(f"{run} has no checkpoint, so nothing was trained there yet; train a step first")
    if step is None:
        return kept[max(kept)]
    if step not in kept:
        raise ConfigError(f"{run} keeps no checkpoint of step {step}; there are: {', '.join(map(str, sorted(kept)))}")
    return kept[step]


def _start(model: str, hashed: str | None, *, needed: bool) -> str | None:
    """Return where the start weights are; None where they are not needed and not there as they were."""
    try:
        folder = model_folder(model)
        if (now := weights_hash(folder)) != hashed:
            raise ConfigError(
                f"the start weights in {folder} are not those that the run began with: SHA-256 {now[:12]}, not {hashed!s:.12}; "
                "put back those of then, because the adapter is right on them only"
            )
    except ConfigError as error:
        if not needed:
            return None
        raise ConfigError(f"the adapter cannot be exported without its start weights: {error}") from error
    return folder


def _described(model: str) -> PreTrainedConfig:
    try:
        return load_config(model)
    except ConfigError as error:
        raise StoreError(f"the config of {model} cannot be loaded: {error}; put the model back where it was") from error


def _in_4bit(folder: Path, state: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says so; else, in one written before it did, what the run was asked for and what PEFT noted."""
    if "in_4bit" in state:
        return state["in_4bit"]
    noted = json.loads((folder / checkpoint.ADAPTER / "adapter_config.json").read_text())
    return bool(config.get("load_in_4bit")) or "4bit" in str(noted.get("base_model_name_or_path"))


def _call(store: Store, version: int) -> Call | None:
    """Return a call that ``version`` sampled, else the newest; of neither the aborted and those of over LONGEST tokens."""
    newest = None
    for rollout_id, _, _ in reversed(store.callers()):
        calls = [row.call for row in store.recorded(rollout_id) if not row.replaced and _usable(row.call)]
        found = [call for call in calls if call.policy_version == version]
        if found:
            return found[-1]
        newest = newest or next(reversed(calls), None)
        if calls and max(call.policy_version for call in calls) < version:
            break  # versions grow, so those before it are older still
    return newest


def _usable(call: Call) -> bool:
    return bool(call.sampled_ids) and 1 < len(call.prompt_ids) + len(call.sampled_ids) <= LONGEST
