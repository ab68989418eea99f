"""The embedded engine, which serves any transformers causal LM without a server, and the model ``"tiny"``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.errors import ConfigError
from art_core.hookspecs import Register

if TYPE_CHECKING:
    from art_core.config import TrainConfig
    from art_embedded.engine import EmbeddedEngine

TINY = Path(__file__).parent / "models" / "tiny"
"""The folder of the model ``"tiny"``: about one million parameters, made by ``tiny/make.py`` beside this package."""


@hookimpl
def register_engines(register: Register) -> None:
    """Offer ``engine="embedded"``."""
    register("embedded", embedded_engine)


def embedded_engine(model_folder: str, config: TrainConfig) -> EmbeddedEngine:
    """Return the embedded engine. Raises ConfigError if torch or transformers is missing."""
    try:
        from art_embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise ConfigError(
            f"the embedded engine needs torch and transformers ({error}); install art-core[train], as docs/install.md says"
        ) from error
    return EmbeddedEngine(model_folder, config)
