"""What art-http adds to a model call in its client: httpx's time with a connection that answers at once, in and out of a rollout.

    python -m bench.redirect

Microseconds of CPU per call, the median and the smallest of interleaved rounds.
"""

from __future__ import annotations

import statistics
import time

import httpcore
import httpx
import orjson

import art_http
from art_core.plugin_api import inside_rollout
from art_core.types import RolloutAddress
from bench.capture import QUESTION, SYSTEM, TOOLS

ADDRESS = RolloutAddress("r", "http://127.0.0.1:8000/rollouts/r/v1", "key", "policy")
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
BODY = orjson.dumps({"model": "gpt", "messages": MESSAGES, "tools": TOOLS})
HEADERS = {"authorization": "Bearer key", "content-type": "application/json"}
ROUNDS, CALLS = 21, 1000


def microseconds(client: httpx.Client) -> float:
    """Return the CPU time of a call."""
    begin = time.process_time()
    for _ in range(CALLS):
        client.post("https://api.openai.com/v1/chat/completions", content=BODY, headers=HEADERS)
    return (time.process_time() - begin) / CALLS * 1e6


def main() -> None:
    """Print what a call takes outside a rollout, and what it takes more inside one."""
    httpcore.ConnectionPool.handle_request = lambda pool, request: httpcore.Response(200, content=b"{}")  # type: ignore[method-assign]
    art_http.redirect_clients()
    outside, added = [], []
    with httpx.Client() as client:
        for _ in range(ROUNDS):
            outside.append(microseconds(client))
            with inside_rollout(ADDRESS):
                added.append(microseconds(client) - outside[-1])
    for name, values in (("outside a rollout", outside), ("added inside", added)):
        print(f"{name}: {statistics.median(values):.1f} us (smallest {min(values):.1f})")


if __name__ == "__main__":
    main()
