"""W&B's training service: refused."""

from art_openpipe.serverless import ServerlessBackend, ServerlessTrainResult

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]
