"""The one door: a recording, OpenAI-compatible address for every rollout. Knows nothing about who runs behind it."""

from art_core.capture.admission import Gate
from art_core.capture.header_limits import BoundedHead
from art_core.capture.http import BODY_SECONDS, Exchange, Refused
from art_core.capture.listening import address_of, http_server, is_loopback, listen
from art_core.capture.record import ANSWER
from art_core.capture.server import CHAT, MODELS, CaptureApp, Dialect, stopping
from art_core.capture.stamped import Stamped
from art_core.capture.upstream import TIMED_OUT, UNREACHABLE, HttpUpstream

__all__ = [
    "ANSWER",
    "BODY_SECONDS",
    "CHAT",
    "MODELS",
    "TIMED_OUT",
    "UNREACHABLE",
    "BoundedHead",
    "CaptureApp",
    "Dialect",
    "Exchange",
    "Gate",
    "HttpUpstream",
    "Refused",
    "Stamped",
    "address_of",
    "http_server",
    "is_loopback",
    "listen",
    "stopping",
]
