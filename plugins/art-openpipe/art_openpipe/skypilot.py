"""``art.skypilot``: refused."""

from art_openpipe.refused import SkyPilotBackend

__all__ = ["SkyPilotBackend"]
