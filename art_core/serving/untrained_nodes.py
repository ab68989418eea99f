"""The model behind the nodes that are not trained: its engine beside the policy's, with weights that never change.

Knows nothing about which calls go to it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from art_core.capture import HttpUpstream, Stamped
from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError
from art_core.redaction import without_keys
from art_core.serving.engine_protocols import ServesVersions
from art_core.types import Engine, Weights

EngineFactory = Callable[[str, TrainConfig], Engine]


class FrozenEngine(Stamped):
    """Another engine, whose answers are all of one version."""

    def __init__(self, make: Callable[[], Engine], version: int) -> None:
        super().__init__(make(), version)

    async def start(self) -> None:
        await super().start()
        if isinstance(self._engine, HttpUpstream):
            served = [it["id"] for it in (await self._engine.models()).get("data") or ()]
            if len(served) == 1:
                # Else the model that the agent names is asked for.
                self._engine.model = served[0]

    async def load(self, weights: Weights) -> None:
        raise ConfigError(f"version {weights.version} cannot be loaded: the model of the untrained nodes is frozen")


def is_address(engine: object) -> bool:
    """Say whether this is a server's address, not a name, a folder or an object."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


def _server(base_url: str, timeout: float | None) -> HttpUpstream:
    return HttpUpstream(base_url, api_key=os.environ.get("ART_UPSTREAM_API_KEY"), timeout=timeout)


def frozen_engine(
    engine: str | Engine, make: EngineFactory, folder: str, config: TrainConfig
) -> Callable[[], Engine] | None:
    """Return what makes the engine of the nodes that ``config.train_nodes`` leaves out; None where none is needed.

    ``folder`` has the start weights, ``make`` makes an engine like the policy's. Raises ConfigError where ``engine`` is an
    object or a server, which cannot be had twice, and does not keep its start weights.
    """
    if not config.train_nodes or config.other_nodes != "frozen":
        return None
    model = config.frozen_model
    if is_address(model):
        return functools.partial(FrozenEngine, functools.partial(_server, model, config.call_timeout), -1)
    is_server = is_address(engine)
    if is_server or not isinstance(engine, str):
        only = make(folder, config)
        if model is not None or not isinstance(only, ServesVersions) or not only.keeps_start():
            what = (
                without_keys(f"{engine!r} is one server")
                if is_server
                else f"{type(engine).__name__}(...) is one object"
            )
            raise ConfigError(
                f"train_nodes={config.train_nodes} needs a second engine for the other nodes, and engine={what}; give "
                "frozen_model='http://HOST:PORT/v1', an engine by name, or other_nodes='policy'"
            )
    start = folder if model is None else model_folder(model)
    return functools.partial(FrozenEngine, functools.partial(make, start, config), 0 if model is None else -1)
