"""Starts the engine and its server, in a child process by default, and commands them."""

from art_core.serving.engine_base import EngineBase
from art_core.serving.process import start_early
from art_core.serving.proxy import ServingProxy

__all__ = ["EngineBase", "ServingProxy", "start_early"]
