"""Starts what serves the policy, in a child process by default, and commands it."""

from art_core.serving.process import start_early
from art_core.serving.proxy import ServingProxy

__all__ = ["ServingProxy", "start_early"]
