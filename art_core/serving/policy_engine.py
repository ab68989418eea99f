"""Which engine answers whom: by name, by address, or an object; and the door that it is put behind.

Knows nothing about what engines do.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.serving import Door
from art_core.serving.untrained_nodes import EngineFactory, frozen_engine, is_address
from art_core.store import Store
from art_core.types import Engine

HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
"""An address without its beginning."""


@dataclass(frozen=True)
class PolicyEngine:
    """The engine of a run, before it is started. ``choose`` returns the engine factory of a name."""

    engine: str | Engine
    choose: Callable[[str], Any]

    @property
    def made_by(self) -> Any:
        """The factory of an engine that is given by name or address; an object as it is."""
        if not isinstance(self.engine, str):
            return self.engine
        if self.engine == "http" or HOST_AND_PORT.match(self.engine):
            raise ConfigError(
                f"engine={self.engine!r} is no whole address; give the one that clients of the server use: "
                "engine='http://HOST:PORT/v1'"
            )
        return self.choose("http" if is_address(self.engine) else self.engine)

    @property
    def loads_files(self) -> bool:
        """Whether it only takes weights that have a path."""
        return bool(getattr(self.made_by, "loads_files", False))

    def check(self) -> None:
        """Raise ConfigError where it cannot work here."""
        if isinstance(self.engine, str):
            getattr(self.made_by, "check", lambda: None)()

    @property
    def _factory(self) -> EngineFactory:
        """What makes it from a model folder and the config; it travels to the process that serves."""
        engine, made_by = self.engine, self.made_by
        if not isinstance(engine, str):
            return lambda folder, config: engine
        return functools.partial(made_by, base_url=engine) if is_address(engine) else made_by

    async def open_door(self, folder: str, config: TrainConfig, run_dir: Path, dialects: Mapping[str, Any]) -> Door:
        """Start it with the weights in ``folder``, and answer agents."""
        frozen = frozen_engine(self.engine, self._factory, folder, config)
        return await Door.start(
            functools.partial(self._factory, folder, config),
            functools.partial(Store, run_dir / "run.sqlite"),
            host=config.host,
            port=config.port,
            # An object is in this process already, so capture runs in a thread beside it.
            process=isinstance(self.engine, str),
            trained_nodes=config.train_nodes,
            frozen=frozen,
            frozen_start=frozen is not None and config.frozen_model is None,
            dialects=dialects,
            folder=run_dir,
            call_timeout=config.call_timeout,
            timeout=config.engine_timeout,
        )


def sampling_seed(seed: int, openings: int) -> int:
    """Return what the engine draws from in a run that was opened so often before; the first time it is the run's own seed."""
    return random.Random(f"{seed}/{openings}").getrandbits(31) if openings else seed
