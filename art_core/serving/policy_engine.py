"""The engines of a run: the policy's, passed by name, address or object, and that of the untrained nodes."""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.capture import FixedVersion, HttpUpstream
from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError
from art_core.redaction import without_keys
from art_core.serving.proxy import ServingProxy
from art_core.store import Store
from art_core.types import Engine, EngineBase, with_defaults

if TYPE_CHECKING:
    from art_core.hookspecs import Offer

HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
"""An address without its scheme."""


@dataclass(frozen=True)
class PolicyEngine:
    """The engine of a run, before it is started. ``choose`` returns what is registered under a name."""

    engine: str | Engine
    choose: Callable[[str], Offer]

    def _offer(self) -> Offer:
        """Return what is registered for a name or an address."""
        if self.engine == "http" or HOST_AND_PORT.match(self.engine):
            raise ConfigError(
                f"engine={self.engine!r} isn't a complete address; pass the one that the server's clients use: "
                "engine='http://HOST:PORT/v1'"
            )
        return self.choose("http" if is_address(self.engine) else self.engine)

    def _factory(self) -> Any:
        return self._offer().thing if isinstance(self.engine, str) else self.engine

    @property
    def loads_files(self) -> bool:
        """Whether it only accepts weights that have a path."""
        return bool(getattr(self._factory(), "loads_files", False))

    def check(self) -> None:
        """Raise ConfigError if it cannot work here."""
        if isinstance(self.engine, str):
            self._offer().check()

    async def start(self, folder: str, config: TrainConfig, run_dir: Path, dialects: Mapping[str, Any]) -> ServingProxy:
        """Start the engine with the weights in ``folder``, and answer agents."""
        frozen = self._frozen(folder, config)
        return await ServingProxy.start(
            self._maker(folder, config),
            functools.partial(Store, run_dir / "run.sqlite"),
            # An object can't move to another process, so a thread serves it.
            process=isinstance(self.engine, str),
            timeout=config.engine_timeout,
            host=config.host,
            port=config.port,
            trained_nodes=config.train_nodes,
            frozen=frozen,
            frozen_start=frozen is not None and config.frozen_model is None,
            dialects=dialects,
            folder=run_dir,
            call_timeout=config.call_timeout,
        )

    def _maker(self, folder: str, config: TrainConfig) -> Callable[[], Engine]:
        """Return the factory of the engine with the weights in ``folder``. For a name or an address it can be
        pickled."""
        if not isinstance(self.engine, str):
            return lambda: self.engine
        address = {"base_url": self.engine} if is_address(self.engine) else {}
        return functools.partial(self._factory(), folder, config, **address)

    def _frozen(self, folder: str, config: TrainConfig) -> Callable[[], Engine] | None:
        """Return the factory of the engine for the nodes that aren't in ``config.train_nodes``; None if they need none.

        ``folder`` has the start weights. Raises ConfigError if the policy's engine is an object or a server, so that
        there can't be a second one, and doesn't keep its start weights.
        """
        model = config.frozen_model
        if not config.train_nodes or config.other_nodes != "frozen":
            return None
        if is_address(model):
            return functools.partial(FrozenEngine, functools.partial(_server, model, config.call_timeout), -1)
        unique = is_address(self.engine) or not isinstance(self.engine, str)
        if unique and (model is not None or not with_defaults(self._maker(folder, config)(), EngineBase).keeps_start()):
            server = isinstance(self.engine, str)
            one = f"{self.engine!r} is one server" if server else f"{type(self.engine).__name__}(...) is one object"
            raise ConfigError(
                f"train_nodes={config.train_nodes} needs a second engine for the other nodes, but "
                f"engine={without_keys(one)}; pass frozen_model='http://HOST:PORT/v1', an engine by name, or "
                "other_nodes='policy'"
            )
        make = self._maker(folder if model is None else model_folder(model), config)
        return functools.partial(FrozenEngine, make, 0 if model is None else -1)


class FrozenEngine(FixedVersion):
    """An engine whose weights never change: every answer has the same version."""

    def __init__(self, make: Callable[[], Engine], version: int) -> None:
        super().__init__(make(), version)

    async def start(self) -> None:
        await super().start()
        if isinstance(self._engine, HttpUpstream):
            models = (await self._engine.models()).get("data") or ()
            if len(models) == 1:  # with several, the agent's own model name chooses
                self._engine.model = models[0]["id"]


def _server(base_url: str, timeout: float | None) -> HttpUpstream:
    return HttpUpstream(base_url, api_key=os.environ.get("ART_UPSTREAM_API_KEY"), timeout=timeout)


def is_address(engine: object) -> bool:
    """Whether this is a server's address rather than a name, a folder or an object."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


def sampling_seed(seed: int, openings: int) -> int:
    """Return the engine's seed for a run that was opened ``openings`` times before; the first time, the run's own."""
    return random.Random(f"{seed}/{openings}").getrandbits(31) if openings else seed
