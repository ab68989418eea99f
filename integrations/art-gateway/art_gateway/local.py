"""The embedded engine as an upstream in this process, for use without a model server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from art_core import TrainConfig
from art_core.capture import FixedVersion
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins, model_folder
from art_core.store import recorded_settings
from art_core.store.run_folder import checkpoint_step, last_checkpoint
from art_core.types import JsonDict, Weights

if TYPE_CHECKING:
    from art_gateway.routing import Server

FORMATS = ("tool_parser", "tool_format", "reasoning_parser", "max_context", "max_tokens")
"""Settings of a run that its model is served with."""


class LocalUpstream(FixedVersion):
    """Answers with ``model``: ``"tiny"``, a causal LM's folder, a hub name, or a run folder (its last checkpoint).

    Raises ConfigError if the folder doesn't exist or is a run folder without a checkpoint; ``start`` raises it if the folder
    has no causal LM.
    """

    def __init__(self, model: str, plugins: Plugins) -> None:
        self._model = model
        if Path(model).expanduser().is_symlink():  # it may lead elsewhere tomorrow
            model = str(Path(model).expanduser().resolve())
        self.folder = model
        begun = recorded_settings(model)
        newest = last_checkpoint(Path(model).expanduser())
        if begun and newest is None:
            raise ConfigError(f"{model} is a run folder without a checkpoint; wait for its first step, or pass a model")
        self.base_url = f"the embedded engine with {newest or model}"
        whole = newest is not None and (newest / "config.json").is_file()
        served = str(newest) if whole else begun.get("model") or model
        self._adapter = Weights(checkpoint_step(newest), newest / "adapter") if newest and not whole else None
        formats = {
            name: value for name, value in begun.get("config", {}).items() if name in FORMATS and value is not None
        }
        factory = plugins.choose("register_engines", "embedded")
        engine = factory(model_folder(served), TrainConfig(model=served, **formats))
        super().__init__(engine, checkpoint_step(newest) if newest else 0)

    async def start(self) -> None:
        """Load the model."""
        await super().start()
        if self._adapter is not None:
            await self._engine.load(self._adapter)

    async def models(self) -> JsonDict:
        """Return the model as OpenAI's list of models."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
        return {"object": "list", "data": [model]}


class Link:
    """A symbolic link to a run folder, such as ``art retrain`` keeps."""

    def __init__(self, path: Path, plugins: Plugins) -> None:
        self._path, self._plugins = path, plugins

    def __call__(self, served: Server) -> LocalUpstream | None:
        """Return an upstream for the run that it leads to; None if that is ``served``, or if the link was removed.

        Raises ConfigError as LocalUpstream.
        """
        if not os.path.lexists(self._path):
            return None
        folder = str(self._path.resolve())
        served_folder = served.folder if isinstance(served, LocalUpstream) else None
        return None if folder == served_folder else LocalUpstream(folder, self._plugins)
