"""The embedded engine as an upstream in this process, for use without a model server."""

from __future__ import annotations

from art_core import TrainConfig
from art_core.capture import FixedVersion
from art_core.plugin_api import Plugins, model_folder
from art_core.types import JsonDict


class LocalUpstream(FixedVersion):
    """Answers with ``model``: ``"tiny"``, a folder with a Hugging Face causal LM (such as a run's checkpoint), or a hub name.

    Raises ConfigError if the folder doesn't exist; ``start`` raises it if the folder has no causal LM.
    """

    def __init__(self, model: str, plugins: Plugins) -> None:
        self.base_url = f"the embedded engine with {model}"
        self._model = model
        factory = plugins.choose("register_engines", "embedded")
        super().__init__(factory(model_folder(model), TrainConfig(model=model)), 0)

    async def models(self) -> JsonDict:
        """Return the model as OpenAI's list of models."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
        return {"object": "list", "data": [model]}
