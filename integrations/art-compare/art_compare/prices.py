"""What a model's calls cost: a price that was passed, or that of LiteLLM's table, which lists providers' models.

The table is read from the installed package without importing it, which takes seconds.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.types import Call

UNKNOWN = float("nan")
TABLE = "model_prices_and_context_window_backup.json"
Price = tuple[float, float]
"""US dollars per million prompt tokens, and per million sampled ones."""


def read_prices(texts: Sequence[str]) -> dict[str, Price]:
    """Read ``NAME=PROMPT/SAMPLED``. Raises ConfigError."""
    prices: dict[str, Price] = {}
    for text in texts:
        name, _, price = text.partition("=")
        try:
            prompt, sampled = map(float, price.split("/"))
        except ValueError:
            prompt = sampled = UNKNOWN
        if not (0 <= prompt < math.inf and 0 <= sampled < math.inf):
            raise ConfigError(
                f"--price {text}: pass NAME=PROMPT/SAMPLED, in US dollars per million tokens, such as live=0.15/0.60"
            )
        prices[name] = prompt, sampled
    return prices


def listed_cost(call: Call) -> float:
    """Return the US dollars of a call that was recorded as text; NaN if its model or its tokens aren't known."""
    listed = _table().get(_model(call))
    usage = call.usage
    if listed is None or "prompt_tokens" not in usage or "completion_tokens" not in usage:
        return UNKNOWN
    prompt, sampled = listed["input_cost_per_token"], listed["output_cost_per_token"]
    cached, written = usage.get("cached_tokens", 0.0), usage.get("cache_write_tokens", 0.0)
    of_cache = cached * listed.get("cache_read_input_token_cost", prompt)
    of_cache += written * listed.get("cache_creation_input_token_cost", prompt)
    return (usage["prompt_tokens"] - cached - written) * prompt + of_cache + usage["completion_tokens"] * sampled


def _model(call: Call) -> str:
    model = str(call.request.get("model") or "")
    return model if model in _table() else model.rpartition("/")[2]


@functools.cache
def _table() -> dict[str, Any]:
    spec = importlib.util.find_spec("litellm")
    file = Path(spec.origin).parent / TABLE if spec and spec.origin else None
    if file is None or not file.is_file():
        return {}
    models = json.loads(file.read_text())
    return {name: it for name, it in models.items() if {"input_cost_per_token", "output_cost_per_token"} <= it.keys()}
