"""A checkpoint of a run -> a folder that others can serve: adapter, merged model, how to serve them, what was checked.

Knows nothing about the command line.
"""

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
from art_core.learner.replay import load_weights
from art_core.store.run_folder import hold
from art_vllm.export_check import Check, Comparison
from art_vllm.export_source import Source, find_source
from art_vllm.how_to_serve import how_to_serve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAID_IN_4_BIT = (
    "the adapter was trained on weights in 4 bits and is exported for those in 16: its logprobs are near those of training, "
    "not the same"
)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    adapter: Path | None
    """PEFT's folder; None where all weights were trained."""
    merged: Path | None
    """The model's folder; None where it was not asked for."""
    dtype: str
    commands: dict[str, str]
    """What it serves (``merged``, ``adapter``) -> the command line that does."""
    check: Check | None
    """None where none was asked for."""
    notes: tuple[str, ...]
    """What a person should know."""


def export(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    step: int | None = None,
    merged: bool = True,
    dtype: str | None = None,
    check: bool = True,
    progress: Callable[[str], None] = lambda what: None,
) -> Exported:
    """Write what the run's newest checkpoint holds, or that of ``step``, to ``out``; default: ``exports/step-N`` in the run.

    ``dtype`` is that of the merged weights; None: the start weights'. ``merged=False`` leaves the merged model out.
    ``check`` loads the export back and compares logprobs. ``progress`` is told what begins. ``out`` is whole or absent.
    Raises ConfigError where there is nothing to export or it cannot be exported so, StoreError where a file is damaged or
    cannot be written, ArtError where the export is not what was trained.
    """
    source = find_source(Path(run_dir).expanduser(), step)
    dtype = dtype or source.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} cannot be exported; give one of {', '.join(DTYPES)}")
    _check_asked(source, merged)
    folder = Path(out).expanduser().resolve() if out else source.run / "exports" / source.checkpoint.name
    _check_place(folder)
    try:
        with _writing(folder) as unfinished:
            found = _write(unfinished, source, DTYPES[dtype] if merged else None, check, progress)
            commands = how_to_serve(unfinished, folder, source, dtype)
            progress("hashing the files")
            _write_record(unfinished, source, dtype, found)
    except StoreError as error:
        if source.checkpoint.is_dir():
            raise
        raise StoreError(
            f"{source.checkpoint} was deleted while it was exported: the run is training and keeps its newest checkpoints "
            "only; export again, or train with keep_checkpoints=None, which keeps all"
        ) from error
    except torch.OutOfMemoryError as error:
        raise ArtError(
            f"{source.start} does not fit on the GPU in float32, which merging and checking are computed in: {error}; "
            "run it with CUDA_VISIBLE_DEVICES= (empty), on the CPU"
        ) from error
    adapter, model = folder / "adapter", folder / "merged"
    return Exported(
        folder,
        adapter if adapter.is_dir() else None,
        model if model.is_dir() else None,
        dtype,
        commands,
        found,
        _notes(source, dtype, found),
    )


def _check_asked(source: Source, merged: bool) -> None:
    if not source.adapter and not merged:
        raise ConfigError(f"{source.run} trained all weights, so without the merged model nothing is left to export")
    if source.adapter and source.quantised and merged:
        raise ConfigError(
            f"the start weights {source.start} are quantised themselves, so an adapter cannot be merged into them; "
            "give --no-merged and serve the adapter beside them"
        )


def _check_place(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give --out a folder, new or empty")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there and not empty; give another --out, or delete it")
    if folder == Path.cwd():  # it takes the place of the empty folder
        raise ConfigError(f"{folder} is where you stand; give --out a name, such as --out my-model")


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write to, which becomes ``folder`` when the block ends well and is gone where it does not.

    Raises ConfigError where another export to ``folder`` is being written.
    """
    try:
        with _held(folder.with_name(f".{folder.name}.unfinished")) as unfinished:
            try:
                yield unfinished
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    except StoreError:
        raise
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the export {folder} could not be written: {error}; check space and permissions") from error


@contextmanager
def _held(unfinished: Path) -> Iterator[Path]:
    """Make the folder, or empty what one that was killed has left, and keep other exports out of it."""
    unfinished.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        hold(descriptor, f"another export is being written to {unfinished}; wait for it, or give another --out")
        for left in unfinished.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield unfinished
    finally:
        os.close(descriptor)


def _write(
    folder: Path, source: Source, dtype: torch.dtype | None, check: bool, progress: Callable[[str], None]
) -> Check | None:
    """Write the models, the merged one in ``dtype`` (None: without it), and compare what was written with what was trained."""
    progress("loading the trained weights")
    model = load_weights(source.start, source.checkpoint)
    comparison = None
    if check:
        progress("computing logprobs as trained")
        comparison = Comparison(model, source)
    if source.adapter:
        _write_adapter(folder / "adapter", source)
    if dtype is not None:
        progress("merging and writing the model")
        _write_merged(folder / "merged", model, dtype, source)
    del model
    if comparison is None:
        return None
    progress("loading the export back and computing its logprobs")
    if dtype is None:
        back = PeftModel.from_pretrained(load_weights(source.start, None), str(folder / "adapter")).eval()
    else:
        back = load_weights(folder / "merged", None)
    return comparison.with_export(back, dtype or torch.float32)


def _write_adapter(folder: Path, source: Source) -> None:
    """Copy the adapter, with the start weights where they are now under ``base_model_name_or_path``."""
    trained = source.checkpoint / checkpoint.ADAPTER
    folder.mkdir()
    shutil.copyfile(trained / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((trained / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": source.start, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_merged(folder: Path, model: PreTrainedModel | PeftModel, dtype: torch.dtype, source: Source) -> None:
    """Write the model with the adapter merged in float32, then rounded, and with the tokenizer that it was trained with."""
    plain = model.merge_and_unload() if isinstance(model, PeftModel) else model
    needed = plain.num_parameters() * dtype.itemsize
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise StoreError(
            f"the merged model takes {needed / 1e9:.3g} GB and {folder.parent.parent} has {free / 1e9:.3g} GB free; make "
            "room, give --out on another disk, or a smaller --dtype"
        )
    checkpoint.write_model(folder, plain.to(dtype), source.start if source.adapter else str(source.checkpoint))


def _write_record(folder: Path, source: Source, dtype: str, check: Check | None) -> None:
    """Write ``export.json``: where it comes from, every file's SHA-256, and what was found when it was loaded back."""
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
    notes = [SAID_IN_4_BIT] if source.in_4bit else []
    if check is not None and check.lost:
        notes.append(
            f"{dtype} is coarser than what was trained: the export is {check.mean:.3g} nats from the trained weights, and these "
            f"are {check.moved:.3g} from the start weights (means); --dtype float32 keeps it, and serving the adapter does"
        )
    return tuple(notes)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
