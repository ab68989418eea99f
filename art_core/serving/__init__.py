"""Starts what serves the policy, in a child process by default, and commands it."""

from art_core.serving.engine_base import EngineBase
from art_core.serving.process import start_early
from art_core.serving.proxy import ServingProxy

__all__ = ["EngineBase", "ServingProxy", "start_early"]
