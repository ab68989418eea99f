"""The embedded engine as an upstream in this process, for those who have no server at hand. Knows nothing about HTTP."""

from __future__ import annotations

from art_core.capture import Stamped
from art_core.config import TrainConfig, model_folder
from art_core.plugins import Plugins
from art_core.types import JsonDict


class LocalUpstream(Stamped):
    """Answers with ``model``: ``"tiny"``, a folder with a Hugging Face causal LM (a checkpoint of a run is one), or a name.

    Raises ConfigError where there is no such folder, and ``start`` where it has no causal LM.
    """

    def __init__(self, model: str, plugins: Plugins) -> None:
        self.base_url = f"the embedded engine with {model}"
        self._model = model
        factory = plugins.choose("register_engines", "embedded")
        super().__init__(factory(model_folder(model), TrainConfig(model=model)), 0)

    async def models(self) -> JsonDict:
        """Return the one model, as OpenAI lists them."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
        return {"object": "list", "data": [model]}
