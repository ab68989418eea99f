"""A recording, OpenAI-compatible address for every rollout. Read ``server.py`` first."""

from art_core.capture.admission import Gate
from art_core.capture.dialect import Dialect
from art_core.capture.http import BODY_SECONDS, Exchange, Refused
from art_core.capture.listening import BoundedHead, address_of, http_server, is_loopback, listen
from art_core.capture.record import ANSWER
from art_core.capture.server import CHAT, MODELS, CaptureApp, stopping
from art_core.capture.upstream import TIMED_OUT, UNREACHABLE, HttpUpstream, Stamped

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
