"""Serves models inside this process, with one embedded engine each, for agents outside of rollouts.

An engine starts at the first call and is shared by all users of the same weights. An unused engine stops when another user
leaves, when another engine starts, or at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from art_core import TrainConfig
from art_core.errors import ConfigError, StoreError
from art_core.plugin_api import model_folder
from art_core.store.run_folder import last_checkpoint
from art_embedded import embedded_engine
from art_embedded.single_file_checkpoint import base_of_adapter, weights_of

if TYPE_CHECKING:
    from art_core.types import Upstream
    from art_embedded.engine import EmbeddedEngine


@dataclass(frozen=True)
class Served:
    """The weights that an engine serves."""

    model: str
    """Folder of a causal LM, or a hub name."""
    weights: Path | None = None
    """Adapter folder or safetensors file to load into the model."""
    saved: str = ""
    """Identifies the file content: changes when other weights are saved at the same path."""


class User:
    """A user of engines. An engine runs as long as one of its users is referenced and hasn't left."""


@dataclass(eq=False)
class _Started:
    engine: EmbeddedEngine
    users: WeakSet[User]


def find_model(model: str) -> Served:
    """Return the weights that ``model`` names: a model as in ``train``, or anything that ``find_checkpoint`` accepts."""
    path = Path(model).expanduser()
    if any((path / name).is_file() for name in ("run.sqlite", "learner.json", "adapter_config.json")):
        return find_checkpoint(path, model)
    return Served(model_folder(model))


def find_checkpoint(path: str | Path, model: str) -> Served:
    """Return the weights saved at ``path``.

    ``path`` is a checkpoint, a run folder (its newest checkpoint counts), a model, an adapter, or a safetensors file with an
    adapter or all weights of ``model``. An adapter is loaded into the model that it was trained on, or into ``model`` if that
    model's folder doesn't exist. Raises ConfigError if ``path`` is none of these, StoreError if it is damaged.
    """
    saved_at = Path(path).expanduser()
    if not saved_at.exists():
        raise ConfigError(
            f"checkpoint {path} doesn't exist; pass a run folder, a folder in its checkpoints/, or a file from save_checkpoint"
        )
    if saved_at.is_file():
        return _file(saved_at, model)
    if (saved_at / "run.sqlite").is_file():
        newest = last_checkpoint(saved_at)
        if newest is None:
            raise ConfigError(f"the run {path} has no checkpoint yet; pass another run, or wait for its first step")
        saved_at = newest
    state, saved = _state(saved_at)
    if (saved_at / "config.json").is_file():
        return Served(str(saved_at), None, saved)
    for adapter in (saved_at / "adapter", saved_at):
        if (adapter / "adapter_config.json").is_file():
            base = state.get("base_model") or _json(adapter / "adapter_config.json").get("base_model_name_or_path")
            return Served(_base(str(base or model), model), adapter, saved)
    raise ConfigError(
        f"{path} isn't a checkpoint: it has neither config.json nor adapter_config.json; pass a run folder, a folder in its "
        "checkpoints/, or a folder that save_pretrained wrote"
    )


def _file(file: Path, model: str) -> Served:
    base, status = base_of_adapter(file), file.stat()
    saved = f"{status.st_mtime_ns}/{status.st_size}"
    return Served(model_folder(model) if base is None else _base(base or model, model), file, saved)


def _base(base: str, model: str) -> str:
    try:
        return model_folder(base)
    except ConfigError:
        return model_folder(model)


def _state(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's manifest and its digest. The manifest contains the hashes of all other files."""
    manifest = folder / "learner.json"
    if not manifest.is_file():
        return {}, ""
    return _json(manifest), hashlib.sha256(manifest.read_bytes()).hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} is damaged ({error}); use another checkpoint") from error


_started: dict[Served, _Started] = {}
_lock = threading.Lock()
"""Held while an engine starts or stops."""


async def upstream(served: Served, user: User) -> Upstream:
    """Return an upstream that answers with these weights; start its engine if needed. Works from any event loop.

    Raises ConfigError if the model can't be loaded.
    """
    started = _started.get(served)
    if started is None or user not in started.users:
        started = await asyncio.to_thread(_start, served, user)
    return started.engine


def _start(served: Served, user: User) -> _Started:
    with _lock:
        started = _started.get(served)
        if started is None:
            _close_unused()
            started = _started[served] = _Started(_engine(served), WeakSet())
        started.users.add(user)
        return started


def _engine(served: Served) -> EmbeddedEngine:
    engine = embedded_engine(served.model, TrainConfig(model=served.model))

    async def begin() -> None:
        await engine.start()
        if served.weights is not None:
            with weights_of(served.weights) as weights:
                await engine.load(weights)

    try:
        asyncio.run(begin())  # a separate loop: the engine outlives its callers' loops
    except BaseException:
        engine.close()
        raise
    return engine


async def leave(user: User) -> None:
    """Remove ``user``; engines without other users stop, even while they answer."""
    await asyncio.to_thread(_leave, user)


def _leave(user: User) -> None:
    with _lock:
        for started in _started.values():
            started.users.discard(user)
        _close_unused()


def _close_unused() -> None:
    for served in [served for served, started in _started.items() if not started.users]:
        _started.pop(served).engine.close()


@atexit.register
def _close_all() -> None:
    while _started:
        _started.popitem()[1].engine.close()


def _start_over() -> None:
    """Forget the engines in a forked child, which doesn't have their decode threads."""
    global _lock
    _lock = threading.Lock()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
