"""Starts the engine and its server, in a child process by default, and commands them."""

from art_core.capture.admission import CallsSnapshot
from art_core.serving.process import start_early
from art_core.serving.proxy import ServingProxy

__all__ = ["CallsSnapshot", "ServingProxy", "start_early"]
