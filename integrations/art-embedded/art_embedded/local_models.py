"""Models that this process serves to itself, by an embedded engine for each: for agents outside every rollout.

An engine is started at the first call, shared by all who ask for the same weights, and ended when its users have left and
another is wanted, or at exit. Knows nothing about agents, rollouts or HTTP.
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

from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError, StoreError
from art_core.store.run_folder import last_checkpoint
from art_embedded import embedded_engine
from art_embedded.single_file_checkpoint import base_of_adapter, weights_of

if TYPE_CHECKING:
    from art_core.types import Upstream
    from art_embedded.engine import EmbeddedEngine


@dataclass(frozen=True)
class Served:
    """Which weights are served."""

    model: str
    """A folder with a causal LM, or a hub name."""
    weights: Path | None = None
    """An adapter's folder or a file of safetensors, loaded into the model."""
    saved: str = ""
    """Another text where other weights have been saved at the same place since."""


class User:
    """Somebody who asks; an engine is kept while one of its users is referred to, and has not left."""


@dataclass(eq=False)
class _Started:
    engine: EmbeddedEngine
    users: WeakSet[User]


def find_model(model: str) -> Served:
    """Return what ``model`` names: a model as ``train`` takes it, or all that ``find_checkpoint`` finds."""
    path = Path(model).expanduser()
    if any((path / name).is_file() for name in ("run.sqlite", "learner.json", "adapter_config.json")):
        return find_checkpoint(path, model)
    return Served(model_folder(model))


def find_checkpoint(path: str | Path, model: str) -> Served:
    """Return what was saved at ``path``: a checkpoint, the newest one of a run folder, a model, an adapter, or one file of
    safetensors with an adapter or all the weights of ``model``.

    An adapter is put on the model that it was trained on; where that is a folder that is not on this machine, on ``model``.
    Raises ConfigError where nothing of this is there, StoreError where it is damaged.
    """
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(
            f"there is no checkpoint {path}; give a run folder, a folder in its checkpoints/, or what was saved"
        )
    if found.is_file():
        return _file(found, model)
    if (found / "run.sqlite").is_file():
        newest = last_checkpoint(found)
        if newest is None:
            raise ConfigError(f"the run {path} has no checkpoint yet; give another run, or wait for its first step")
        found = newest
    state, saved = _state(found)
    if (found / "config.json").is_file():
        return Served(str(found), None, saved)
    for adapter in (found / "adapter", found):
        if (adapter / "adapter_config.json").is_file():
            base = state.get("base_model") or _json(adapter / "adapter_config.json").get("base_model_name_or_path")
            return Served(_base(str(base or model), model), adapter, saved)
    raise ConfigError(
        f"{path} is no checkpoint: it has neither config.json nor adapter_config.json; give a run folder, a folder in its "
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
    """Return what the manifest of a checkpoint says, and a digest of it: it has the hashes of all the other files."""
    manifest = folder / "learner.json"
    if not manifest.is_file():
        return {}, ""
    return _json(manifest), hashlib.sha256(manifest.read_bytes()).hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} is damaged ({error}); give another checkpoint") from error


_started: dict[Served, _Started] = {}
_lock = threading.Lock()
"""Held while an engine is started or ended."""


async def upstream(served: Served, user: User) -> Upstream:
    """Return what answers with these weights; where nothing does yet, it is started. For any event loop of this process.

    Raises ConfigError where the model cannot be loaded.
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
        asyncio.run(begin())  # a loop of its own: callers' loops come and go, and the engine stays
    except BaseException:
        engine.close()
        raise
    return engine


async def leave(user: User) -> None:
    """Ask for nothing more; engines that nobody else uses are ended, with what they are answering."""
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
    """In a fork: the decode threads are not in it."""
    global _lock
    _lock = threading.Lock()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
