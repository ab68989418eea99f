"""The embedded engine, which serves any transformers causal LM in-process, and the model ``"tiny"``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.errors import ConfigError
from art_core.plugin_api import Register

if TYPE_CHECKING:
    from art_core import TrainConfig
    from art_embedded.engine import EmbeddedEngine

TINY = Path(__file__).parent / "models" / "tiny"
"""Folder of the model ``"tiny"``, about one million parameters, created by ``tiny/make.py`` next to this package."""


@hookimpl
def register_engines(register: Register) -> None:
    """Register ``engine="embedded"``."""
    register("embedded", embedded_engine)


def embedded_engine(model_folder: str, config: TrainConfig) -> EmbeddedEngine:
    """Return the embedded engine. Raises ConfigError if torch or transformers is missing."""
    try:
        from art_embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise ConfigError(
            f"the embedded engine needs torch and transformers ({error}); install art-core[train], see docs/install.md"
        ) from error
    return EmbeddedEngine(model_folder, config)
