"""W&B's training service: refused."""

from art_openpipe.refused import ServerlessBackend
from art_openpipe.types import TrainResult as ServerlessTrainResult

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]
