"""Exports a checkpoint: the adapter, the merged model, instructions to serve them, and a record of the check."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel

from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner import checkpoint
from art_core.learner.pretrained import load_adapter
from art_core.learner.replay import load_weights
from art_core.store.run_folder import hold
from art_vllm.command_line import chat_template
from art_vllm.export_check import Check, Comparison
from art_vllm.export_source import Source, find_source
from art_vllm.how_to_serve import TEMPLATE, how_to_serve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAINED_IN_4BIT = (
    "the adapter was trained on 4-bit weights and is exported for 16-bit ones: its logprobs are close to those of training, not "
    "equal"
)


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    adapter: Path | None
    """The PEFT adapter's folder; None if all weights were trained."""
    merged: Path | None
    """The merged model's folder; None with ``merged=False``."""
    dtype: str
    commands: dict[str, str]
    """``merged`` or ``adapter`` -> the command line that serves it."""
    check: Check | None
    """None with ``check=False``."""
    notes: tuple[str, ...]
    """Remarks for the user."""


def export(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    step: int | None = None,
    merged: bool = True,
    dtype: str | None = None,
    check: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Export the run's newest checkpoint, or that of ``step``, to ``out``; default: ``exports/step-N`` in the run folder.

    ``dtype`` is the data type of the merged weights; None: that of the start weights. ``merged=False`` omits the merged model.
    ``check`` loads the export and compares logprobs. ``progress`` is called with the name of each stage. ``out`` is either
    complete or absent. Raises ConfigError if there is nothing to export or the options don't fit the run, StoreError if a file
    is damaged or can't be written, ArtError if the export's logprobs differ from the trained weights'.
    """
    source = find_source(Path(run_dir).expanduser(), step)
    dtype = dtype or source.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    _check_options(source, merged)
    folder = Path(out).expanduser().resolve() if out else source.run / "exports" / source.checkpoint.name
    _check_out(folder)
    try:
        with _writing(folder) as unfinished:
            check_result = _write(unfinished, source, DTYPES[dtype] if merged else None, check, progress)
            commands = how_to_serve(unfinished, folder, source, dtype)
            progress("hashing the files")
            _write_record(unfinished, source, dtype, check_result)
    except StoreError as error:
        if source.checkpoint.is_dir():
            raise
        raise StoreError(
            f"{source.checkpoint} was deleted while it was exported: the run is training and keeps only its newest checkpoints; "
            "export again, or train with keep_checkpoints=None, which keeps all"
        ) from error
    except torch.OutOfMemoryError as error:
        raise ArtError(
            f"{source.start} doesn't fit on the GPU in float32, which merging and checking need: {error}; "
            "to use the CPU, run with CUDA_VISIBLE_DEVICES= (empty)"
        ) from error
    adapter, model = folder / "adapter", folder / "merged"
    return Exported(
        folder,
        adapter if adapter.is_dir() else None,
        model if model.is_dir() else None,
        dtype,
        commands,
        check_result,
        _notes(source, dtype, check_result),
    )


def _check_options(source: Source, merged: bool) -> None:
    if not source.adapter and not merged:
        raise ConfigError(f"{source.run} trained all weights, so there is no adapter to export; remove --no-merged")
    if source.adapter and source.quantised and merged:
        raise ConfigError(
            f"the start weights {source.start} are quantized, so an adapter can't be merged into them; "
            "pass --no-merged and serve the adapter on top of them"
        )


def _check_out(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; --out must be a folder, new or empty")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} isn't empty; pass another --out, or delete it")
    if folder == Path.cwd():  # the export is renamed to ``folder``, which replaces it
        raise ConfigError(f"{folder} is the current directory; pass another --out, such as --out my-model")


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``folder`` if the block succeeds and deleted if it fails.

    Raises ConfigError if another export to ``folder`` is in progress, StoreError if a file can't be written.
    """
    try:
        with _locked(folder.with_name(f".{folder.name}.unfinished")) as unfinished:
            try:
                yield unfinished
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    except StoreError:
        raise
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the export {folder} can't be written: {error}; check disk space and permissions") from error


@contextmanager
def _locked(unfinished: Path) -> Iterator[Path]:
    """Create the folder, or clear what a killed export left in it, and lock it against other exports."""
    unfinished.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        hold(descriptor, f"another export is writing to {unfinished}; wait for it, or pass another --out")
        for entry in unfinished.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield unfinished
    finally:
        os.close(descriptor)


def _write(
    folder: Path, source: Source, dtype: torch.dtype | None, check: bool, progress: Callable[[str], None]
) -> Check | None:
    """Write the adapter and the merged model in ``dtype`` (None: no merged model), and check what was written."""
    progress("loading the trained weights")
    model = load_weights(source.start, source.checkpoint)
    comparison = None
    if check:
        progress("computing the trained weights' logprobs")
        comparison = Comparison(model, source)
    if source.adapter:
        _write_adapter(folder / "adapter", source)
    if dtype is not None:
        progress("merging and writing the model")
        _write_merged(folder / "merged", model, dtype, source)
    tokenizer_of = source.start if source.adapter else str(source.checkpoint)
    if template := chat_template(tokenizer_of, source.config.get("tool_format")):
        for kind in folder.iterdir():
            (kind / TEMPLATE).write_text(template, encoding="utf-8")
    del model
    if comparison is None:
        return None
    progress("loading the export and computing its logprobs")
    if dtype is None:
        exported = load_adapter(load_weights(source.start, None), folder / "adapter").eval()
    else:
        exported = load_weights(folder / "merged", None)
    return comparison.with_export(exported, dtype or torch.float32)


def _write_adapter(folder: Path, source: Source) -> None:
    """Copy the adapter; ``base_model_name_or_path`` becomes the current location of the start weights."""
    trained = source.checkpoint / checkpoint.ADAPTER
    folder.mkdir()
    shutil.copyfile(trained / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((trained / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": source.start, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_merged(folder: Path, model: PreTrainedModel | PeftModel, dtype: torch.dtype, source: Source) -> None:
    """Merge the adapter in float32, round to ``dtype``, and write the model with its tokenizer."""
    plain = model.merge_and_unload() if isinstance(model, PeftModel) else model
    needed = plain.num_parameters() * dtype.itemsize
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise StoreError(
            f"the merged model needs {needed / 1e9:.3g} GB and {folder.parent.parent} has {free / 1e9:.3g} GB free; free up disk "
            "space, or pass --out on another disk or a smaller --dtype"
        )
    checkpoint.write_model(folder, plain.to(dtype), source.start if source.adapter else str(source.checkpoint))


def _write_record(folder: Path, source: Source, dtype: str, check: Check | None) -> None:
    """Write ``export.json``: the source of the export, the result of the check, and the SHA-256 of every file."""
    record = {
        "run": str(source.run.resolve()),
        "step": source.step,
        "version": source.version,
        "start": source.start,
        "start_weights": source.start_weights,
        "trained": "adapter" if source.adapter else "all weights",
        "trained_in_4bit": source.in_4bit,
        "dtype": dtype if (folder / "merged").is_dir() else None,
        "check": check and asdict(check),
        "files": {str(file.relative_to(folder)): _hash(file) for file in sorted(folder.rglob("*")) if file.is_file()},
    }
    (folder / "export.json").write_text(json.dumps(record, indent=2) + "\n")


def _notes(source: Source, dtype: str, check: Check | None) -> tuple[str, ...]:
    notes = [TRAINED_IN_4BIT] if source.in_4bit else []
    if check is not None and check.lost:
        notes.append(
            f"rounding to {dtype} removes what was trained: on average, logprobs of the export differ by {check.mean:.3g} nats "
            f"from the trained weights', and those by {check.moved:.3g} from the start weights'; pass --dtype float32, or serve "
            "the adapter"
        )
    return tuple(notes)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
