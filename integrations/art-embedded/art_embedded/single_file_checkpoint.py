"""Weights as one file of safetensors: all of a model, or an adapter with its config in the file's head.

Nothing is pickled or unpickled. Knows nothing about learners and engines.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from art_core.errors import ConfigError, StoreError
from art_core.types import Weights

ADAPTER = "art_adapter_config"
"""Under this name the head has the adapter's config."""
BASE = "art_base_model"


def write_one_file(checkpoint: Path, base: str, path: Path) -> None:
    """Write the weights in a checkpoint folder, of a model that began as ``base``, to ``path``; it is whole or as it was.

    Raises StoreError where that fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    adapter, unfinished = checkpoint / "adapter", path.with_name(f".{path.name}.unfinished")
    try:
        head = {"format": "pt", BASE: base}
        if adapter.is_dir():
            head[ADAPTER] = (adapter / "adapter_config.json").read_text()
        tensors = {}
        for file in sorted((adapter if adapter.is_dir() else checkpoint).glob("*model*.safetensors")):
            tensors |= load_file(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, head)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.chmod((checkpoint / "learner.json").stat().st_mode)  # safetensors keeps it from all other users
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise StoreError(f"{path} could not be written: {error}; check space and permissions") from error


def base_of_adapter(file: Path) -> str | None:
    """Return the model that the adapter in ``file`` was trained on; None where it has the weights of a whole model.

    Raises ConfigError for a file of another format, StoreError for a damaged one.
    """
    head = _head(file)
    return head.get(BASE, "") if ADAPTER in head else None


def _head(file: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as stream:
        first = stream.read(9)
    if first[8:] != b"{":  # the length of a JSON object, then the object
        raise ConfigError(
            f"{file} is not in the format safetensors, and nothing is unpickled from a file; save it with save_checkpoint, or "
            "give a run folder"
        )
    try:
        with safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except SafetensorError as error:
        raise StoreError(f"{file} is damaged ({error}); give another checkpoint") from error


@contextmanager
def weights_of(path: Path) -> Iterator[Weights]:
    """Give what an engine loads, from an adapter's folder or such a file, while the block runs. Raises StoreError where the
    file is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if path.is_dir():
        yield Weights(1, path)
        return
    head = _head(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}); give another checkpoint") from error
    if ADAPTER not in head:
        yield Weights(1, path=None, live=tensors)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(head[ADAPTER])
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder, "adapter_model.safetensors"), {"format": "pt"})
        yield Weights(1, Path(folder))
