"""The one door: a recording, OpenAI-compatible address for every rollout. Knows nothing about who runs behind it."""

from art_core.capture.door import Door
from art_core.capture.server import CaptureApp, Dialect
from art_core.capture.upstream import HttpUpstream

__all__ = ["CaptureApp", "Dialect", "Door", "HttpUpstream"]
