"""The embedded engine as an upstream in this process, for those who have no server at hand. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from art_core.config import make_config, model_folder
from art_core.plugins import Plugins
from art_core.types import Engine, JsonDict


class LocalUpstream:
    """Answers with ``model``: ``"tiny"``, a folder with a Hugging Face causal LM (a checkpoint of a run is one), or a name.

    Raises ConfigError where there is no such folder.
    """

    def __init__(self, model: str, plugins: Plugins) -> None:
        self.base_url = f"the embedded engine with {model}"
        self.policy_version = 0
        self._model = model
        factory = plugins.choose("register_engines", "embedded")
        self._engine: Engine = factory(model_folder(model), make_config({"model": model}))

    async def start(self) -> None:
        """Load the model. Raises ConfigError where the folder has no causal LM."""
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    async def models(self) -> JsonDict:
        """Return the one model, as OpenAI lists them."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
        return {"object": "list", "data": [model]}

    async def chat(self, request: JsonDict) -> JsonDict:
        return {**await self._engine.chat(request), "policy_version": self.policy_version}

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield {**chunk, "policy_version": self.policy_version}
