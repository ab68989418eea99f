"""Thinking Machines' training service: refused."""

from art_openpipe.refused import TinkerBackend, TinkerNativeBackend

__all__ = ["TinkerBackend", "TinkerNativeBackend"]
