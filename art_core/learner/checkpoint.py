"""A checkpoint folder: weights, optimizer and random state as safetensors and JSON.

    learner.json          version, base model, SHA-256 of every other file
    optimizer.state       AdamW's moments and the random state; *.safetensors beside the model's would be taken for weights
    config.json, model.safetensors, tokenizer ...    if all weights are trained
    adapter/              if a LoRA adapter is trained

Nothing is unpickled. A folder is written under a temporary name beside its place, synced to disk and renamed, so it is whole
or absent, even after a power loss.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from art_core.errors import DamagedCheckpoint, StoreError
from art_core.learner.pretrained import load_causal_lm, load_tokenizer, no_progress_bars
from art_core.store.run_folder import bring_to_disk

if TYPE_CHECKING:
    from peft import PeftModel

MANIFEST = "learner.json"
SKIPPED = "a resumed run skips this checkpoint"
OPTIMIZER = "optimizer.state"
ADAPTER = "adapter"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
NOT_COPIED = (*WEIGHTS, MANIFEST, OPTIMIZER)
"""Endings of a source's files that a checkpoint has of its own."""
LaidOut = Callable[[Tensor, Tensor], Tensor]
"""(unsharded tensor, the tensor to load it into) -> the part of it that belongs there."""


@contextmanager
def writing(folder: Path, state: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to write to; at the end of the block it gets a manifest with ``state`` and replaces ``folder``.

    Raises StoreError if that fails; ``folder`` is then unchanged.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        paths = sorted(file for file in unfinished.rglob("*") if file.is_file())
        files = {str(file.relative_to(unfinished)): _hash(file) for file in paths}
        (unfinished / MANIFEST).write_text(json.dumps({**state, "files": files}, indent=2))
        for path in (*unfinished.rglob("*"), unfinished):
            bring_to_disk(path)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        unfinished.rename(folder)
        bring_to_disk(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"checkpoint {folder} couldn't be written: {error}; check space and permissions") from error
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """Check every file of ``folder`` against its hash and return the state passed to ``writing``, or raise DamagedCheckpoint."""
    state = read_manifest(folder)
    for name, digest in state.pop("files").items():
        file = folder / name
        try:
            actual = _hash(file)
        except OSError as error:
            raise DamagedCheckpoint(f"{file} can't be read ({error.strerror}); {SKIPPED}") from error
        if actual != digest:
            raise DamagedCheckpoint(f"{file} is not what was saved (SHA-256 differs); {SKIPPED}")
    return state


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the state passed to ``writing``, with the unchecked hashes of all files as ``files``, or raise DamagedCheckpoint."""
    if not (folder / MANIFEST).is_file():
        raise DamagedCheckpoint(f"{folder} is not a checkpoint (no {MANIFEST}); pass a folder in checkpoints/ of a run")
    try:
        state = json.loads((folder / MANIFEST).read_text())
        return {**state, "files": dict(state["files"]), "version": int(state["version"])}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} is damaged ({error!r}); {SKIPPED}") from error


def write_model(folder: Path, model: PreTrainedModel, source: str, state: dict[str, Tensor] | None = None) -> None:
    """Write a model folder with the tokenizer of ``source``, a folder or a hub name; ``state`` replaces the model's weights."""
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=state)
    _copy_mode(folder, folder / "config.json")
    if not Path(source).is_dir():
        load_tokenizer(source).save_pretrained(folder)
        return
    # Copied, not loaded and saved: the tokenizer must stay the same byte for byte.
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith(NOT_COPIED) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def read_model(folder: Path, model: PreTrainedModel, laid_out: LaidOut) -> None:
    """Copy the weights in ``folder``, laid out by ``laid_out``, into the memory of ``model``."""
    if not (folder / "config.json").is_file():
        raise StoreError(f"{folder} holds an adapter, not a whole model; resume with its lora_rank")
    _copy(dict(load_causal_lm(folder).named_parameters()), dict(model.named_parameters()), folder, laid_out)


def write_adapter(folder: Path, model: PeftModel, state: dict[str, Tensor] | None = None) -> None:
    """Write the adapter; ``state`` replaces the model's weights."""
    # Embeddings are never trained, and PEFT's automatic check would request the base model's config from the hub.
    model.save_pretrained(folder / ADAPTER, save_embedding_layers=False, state_dict=state)
    _copy_mode(folder / ADAPTER, folder / ADAPTER / "adapter_config.json")


def read_adapter(folder: Path, model: PeftModel, laid_out: LaidOut) -> None:
    """Copy the adapter in ``folder``, laid out by ``laid_out``, into the memory of the model's adapter."""
    from peft import get_peft_model_state_dict

    file = folder / ADAPTER / "adapter_model.safetensors"
    if not file.is_file():
        raise StoreError(f"{folder} holds a whole model, not an adapter; resume with lora_rank=0")
    # PEFT returns the adapter's own tensors, not copies, under the names used in the file.
    _copy(load_file(file), get_peft_model_state_dict(model, save_embedding_layers=False), folder, laid_out)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state of each of ``parameters``, by ``{key}/{parameter}``."""
    return {
        f"{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def write_optimizer(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write the ``optimizer_state`` and torch's random state."""
    tensors = {name: value.contiguous() for name, value in state.items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / OPTIMIZER)


def read_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], laid_out: LaidOut
) -> None:
    """Restore what ``write_optimizer`` wrote, the moments laid out by ``laid_out``."""
    tensors = load_file(next(folder.glob("optimizer.*")))  # .safetensors in older checkpoints
    torch.set_rng_state(tensors.pop("random/cpu"))
    cuda = tensors.pop("random/cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    optimizer.state.clear()
    for label, value in tensors.items():
        key, _, name = label.partition("/")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value if key == "step" else laid_out(value, parameter.detach())


@torch.no_grad()
def _copy(saved: Mapping[str, Tensor], into: Mapping[str, Tensor], folder: Path, laid_out: LaidOut) -> None:
    saved_shapes, shapes = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (saved, into))
    if differing := sorted(saved_shapes.items() ^ shapes.items()):
        name, shape = differing[0]
        raise StoreError(
            f"{folder} is a checkpoint of another model: only one of them has {name} of shape {shape} "
            f"({len(differing)} such differences); resume with the same model and lora_rank"
        )
    for name, tensor in into.items():
        tensor.copy_(laid_out(saved[name], tensor))


def _copy_mode(folder: Path, source: Path) -> None:
    """Make weights as readable as ``source``: safetensors hides its files from other users, and a server may run as one."""
    for file in folder.glob("*.safetensors"):
        file.chmod(source.stat().st_mode)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
