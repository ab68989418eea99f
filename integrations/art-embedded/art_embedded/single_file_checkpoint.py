"""Saves and loads weights as one safetensors file: a whole model, or an adapter with its config in the file's header.

Nothing is pickled or unpickled.
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
"""Header key of the adapter's config."""
BASE = "art_base_model"


def write_one_file(checkpoint: Path, base: str, path: Path) -> None:
    """Write the weights of a checkpoint folder to ``path``, atomically. ``base`` is the model that training started from.

    Raises StoreError if that fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    adapter, unfinished = checkpoint / "adapter", path.with_name(f".{path.name}.unfinished")
    try:
        header = {"format": "pt", BASE: base}
        if adapter.is_dir():
            header[ADAPTER] = (adapter / "adapter_config.json").read_text()
        tensors = {}
        for file in sorted((adapter if adapter.is_dir() else checkpoint).glob("*model*.safetensors")):
            tensors |= load_file(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, header)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.chmod(
            (checkpoint / "learner.json").stat().st_mode
        )  # safetensors makes it unreadable for other users
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise StoreError(f"{path} can't be written: {error}; check disk space and permissions") from error


def base_of_adapter(file: Path) -> str | None:
    """Return the model that the adapter in ``file`` was trained on; None if the file has the weights of a whole model.

    Raises ConfigError for a file of another format, StoreError for a damaged one.
    """
    header = _header(file)
    return header.get(BASE, "") if ADAPTER in header else None


def _header(file: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as stream:
        first = stream.read(9)
    if first[8:] != b"{":  # the length of a JSON object, then the object
        raise ConfigError(
            f"{file} isn't a safetensors file, and art never unpickles files; save it with save_checkpoint, or pass a run folder"
        )
    try:
        with safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except SafetensorError as error:
        raise StoreError(f"{file} is damaged ({error}); use another checkpoint") from error


@contextmanager
def weights_of(path: Path) -> Iterator[Weights]:
    """Yield the weights of an adapter folder or a single file; valid only inside the block.

    Raises StoreError if the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if path.is_dir():
        yield Weights(1, path)
        return
    header = _header(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}); use another checkpoint") from error
    if ADAPTER not in header:
        yield Weights(1, path=None, live=tensors)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(header[ADAPTER])
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder, "adapter_model.safetensors"), {"format": "pt"})
        yield Weights(1, Path(folder))
