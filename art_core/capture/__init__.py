"""A recording, OpenAI-compatible address for every rollout. Read ``server.py`` first."""

from art_core.capture.admission import Gate
from art_core.capture.dialect import Dialect, Paths
from art_core.capture.http import BODY_SECONDS, Exchange, Refused, RelayedCall
from art_core.capture.listening import LimitedHeadProtocol, address_of, http_server, is_loopback, listen
from art_core.capture.record import ANSWER, merge_delta
from art_core.capture.server import CHAT, MODELS, CaptureApp, stopping_error
from art_core.capture.upstream import TIMED_OUT, UNREACHABLE, FixedVersion, HttpUpstream

__all__ = [
    "ANSWER",
    "BODY_SECONDS",
    "CHAT",
    "MODELS",
    "TIMED_OUT",
    "UNREACHABLE",
    "CaptureApp",
    "Dialect",
    "Exchange",
    "FixedVersion",
    "Gate",
    "HttpUpstream",
    "LimitedHeadProtocol",
    "Paths",
    "Refused",
    "RelayedCall",
    "address_of",
    "http_server",
    "is_loopback",
    "listen",
    "merge_delta",
    "stopping_error",
]
