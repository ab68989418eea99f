"""A checkpoint folder: weights, optimizer and random state as safetensors and JSON. Knows nothing about how to train.

    learner.json          version, base model, SHA-256 of every other file
    optimizer.safetensors AdamW's moments and the random state
    config.json, model.safetensors, tokenizer ...    where all weights are trained
    adapter/              where a LoRA adapter is trained

Nothing is unpickled. A folder is written beside its place, to the disk, and renamed, so it is whole or absent, also after
a power loss.
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
PASSED_OVER = "a run that goes on passes over this checkpoint"
OPTIMIZER = "optimizer.safetensors"
ADAPTER = "adapter"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
LaidOut = Callable[[Tensor, Tensor], Tensor]
"""(a whole tensor, the one that it is for) -> what of it goes there."""


@contextmanager
def writing(folder: Path, state: Mapping[str, Any]) -> Iterator[Path]:
    """Give an empty folder to write to; when the block ends it takes the place of ``folder``, with ``state`` in it.

    Raises StoreError where that fails; ``folder`` is then as it was.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        files = {str(file.relative_to(unfinished)): _hash(file) for file in _files(unfinished)}
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
        raise StoreError(
            f"the checkpoint {folder} could not be written: {error}; check space and permissions"
        ) from error
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state given to ``writing``, after comparing every file of ``folder`` with its hash; else DamagedCheckpoint."""
    state = read_manifest(folder)
    for name, digest in state.pop("files").items():
        try:
            if not (folder / name).is_file():
                raise DamagedCheckpoint(f"{folder / name} is missing; {PASSED_OVER}")
            if _hash(folder / name) != digest:
                raise DamagedCheckpoint(f"{folder / name} is not what was saved (SHA-256 differs); {PASSED_OVER}")
        except DamagedCheckpoint:
            raise
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read ({error.strerror}); {PASSED_OVER}") from error
    return state


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the state given to ``writing`` and under ``files`` the hash of every file, compared with none; else StoreError."""
    if not (folder / MANIFEST).is_file():
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}, so it is not a checkpoint; give a folder in checkpoints/ of a run"
        )
    try:
        state = json.loads((folder / MANIFEST).read_text())
        return {**state, "files": dict(state["files"]), "version": int(state["version"])}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} is damaged ({error!r}); {PASSED_OVER}") from error


def load_model(source: str | Path) -> PreTrainedModel:
    """Load a causal LM from a folder or by its hub name, in float32 on the CPU."""
    return load_causal_lm(source, torch.float32)


def write_model(folder: Path, model: PreTrainedModel, source: str, state: dict[str, Tensor] | None = None) -> None:
    """Write a model folder with the tokenizer of ``source``, a folder or a hub name; ``state`` counts instead of the weights
    that ``model`` holds."""
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=state)
    _share(folder, like=folder / "config.json")
    if not Path(source).is_dir():
        load_tokenizer(source).save_pretrained(folder)
        return
    # Copied, not loaded and saved: the tokenizer must stay the same to the byte.
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith((*WEIGHT_FILES, MANIFEST)) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def read_model(folder: Path, model: PreTrainedModel, laid_out: LaidOut) -> None:
    """Copy the weights in ``folder``, as ``laid_out`` gives them, into ``model``'s own memory."""
    if not (folder / "config.json").is_file():
        raise StoreError(
            f"{folder} holds an adapter, not a whole model; continue with the lora_rank that it was made with"
        )
    saved = load_model(folder)
    _copy(dict(saved.named_parameters()), dict(model.named_parameters()), folder, laid_out)


def write_adapter(folder: Path, model: PeftModel, state: dict[str, Tensor] | None = None) -> None:
    """Write the adapter; ``state`` counts instead of the weights that ``model`` holds."""
    # Embeddings are never trained, and the automatic check would ask the hub for the base model's config.
    model.save_pretrained(folder / ADAPTER, save_embedding_layers=False, state_dict=state)
    _share(folder / ADAPTER, like=folder / ADAPTER / "adapter_config.json")


def _share(folder: Path, *, like: Path) -> None:
    """safetensors keeps its files from all other users, and a server may run as one of them."""
    for file in folder.glob("*.safetensors"):
        file.chmod(like.stat().st_mode)


def read_adapter(folder: Path, model: PeftModel, laid_out: LaidOut) -> None:
    """Copy the adapter in ``folder``, as ``laid_out`` gives it, into ``model``'s own."""
    from peft import get_peft_model_state_dict

    file = folder / ADAPTER / "adapter_model.safetensors"
    if not file.is_file():
        raise StoreError(f"{folder} holds a whole model, not an adapter; continue with lora_rank=0")
    # These are the adapter's own tensors, under the names that the file has.
    _copy(load_file(file), get_peft_model_state_dict(model, save_embedding_layers=False), folder, laid_out)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``optimizer`` keeps for each of ``parameters``."""
    return {
        f"{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def write_optimizer(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write the ``optimizer_state``, and torch's random state."""
    tensors = {name: value.contiguous() for name, value in state.items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / OPTIMIZER)


def read_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], laid_out: LaidOut
) -> None:
    """Put back what ``write_optimizer`` wrote, the moments as ``laid_out`` gives them."""
    tensors = load_file(folder / OPTIMIZER)
    torch.set_rng_state(tensors.pop("random/cpu"))
    cuda = tensors.pop("random/cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    optimizer.state.clear()
    for label, value in tensors.items():
        key, _, name = label.partition("/")
        mine = parameters[name]
        optimizer.state[mine][key] = value if key == "step" else laid_out(value, mine.detach())


@torch.no_grad()
def _copy(saved: Mapping[str, Tensor], into: Mapping[str, Tensor], folder: Path, laid_out: LaidOut) -> None:
    _check_same_shapes(saved, into, folder)
    for name, tensor in into.items():
        tensor.copy_(laid_out(saved[name], tensor))


def _check_same_shapes(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differing = sorted(shapes.items() ^ {name: tuple(tensor.shape) for name, tensor in wanted.items()}.items())
    if differing:
        name, shape = differing[0]
        raise StoreError(
            f"{folder} is a checkpoint of another model: {name} of shape {shape} is in one of them only "
            f"({len(differing)} such differences); continue with the model and lora_rank that it was made with"
        )


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
