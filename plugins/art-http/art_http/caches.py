"""Keeps LiteLLM's cache out of rollouts: a cached answer was not sampled, so there would be nothing to learn from it."""

from __future__ import annotations

import functools
from typing import Any

from art_core import destination, when_imported

CALLS = ("completion", "responses", "messages")
"""Ends of the names of LiteLLM's functions that ask a model; the others embed, transcribe or rank."""


@functools.cache
def wrap_caches() -> None:
    """Let LiteLLM's cache neither answer nor keep a call that the policy answers."""
    when_imported("litellm.caching.caching_handler", _wrap)


def _wrap(module: Any) -> None:
    # One is made for each call, with the arguments that the call is then made with.
    handler = module.LLMCachingHandler
    original = handler.__init__

    @functools.wraps(original)
    def uncached(self: Any, original_function: Any, request_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        asks = module.litellm.cache is not None and original_function.__name__.endswith(CALLS)
        if asks and destination(request_kwargs.get("model"), request_kwargs.get("api_base")):
            request_kwargs["cache"] = {"no-cache": True, "no-store": True}
        original(self, original_function, request_kwargs, *args, **kwargs)

    handler.__init__ = uncached
