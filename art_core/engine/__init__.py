"""Serves the policy from a transformers model. ``EmbeddedEngine`` is all that others need."""

from art_core.errors import ConfigError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the embedded engine needs torch and transformers ({error}); in the checkout of art, run: pip install -e '.[train]'"
    ) from error

from art_core.engine.embedded import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
