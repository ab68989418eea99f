"""What OpenPipe ART runs at W&B: refused, with the reason."""

from __future__ import annotations

from typing import Any

from art_core.errors import ConfigError
from art_openpipe.types import TrainResult as ServerlessTrainResult

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]


class ServerlessBackend:
    """Refused: it is W&B's service, and art trains where it runs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            "ServerlessBackend trains at W&B's service, with its account and weights; art trains on machines of your own. Use "
            "art.local.LocalBackend here, or art_server.connect(url) for a machine with a GPU ('art serve' there)"
        )
