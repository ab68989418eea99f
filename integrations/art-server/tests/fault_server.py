"""A server whose engine and learner are stand-ins, as a process: ``python fault_server.py RUN_DIR PORT LEASE [NAME=VALUE]``.

An answer is the last message with a number that never comes twice, so that it shows whether what the agent saw is what was
recorded.
"""

import asyncio
import itertools
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from art_core.testing import CountingLearner, FakeEngine
from art_server.serve import Plan, serve_forever

_numbers = itertools.count()


def reply(request: dict) -> str:
    """Answer a request."""
    return f"{request['messages'][-1]['content']} #{os.getpid()}.{next(_numbers)}"


def main() -> None:
    """Serve until the process is ended."""
    run_dir, port, lease, *settings = sys.argv[1:]
    given = {name: json.loads(value) for name, value in (it.split("=", 1) for it in settings)}
    plan = Plan(
        Path(run_dir), port=int(port), lease=float(lease),
        settings={"model": "tiny", "engine": FakeEngine(reply), "learner": CountingLearner(), **given},
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # as the command does
        asyncio.run(serve_forever(plan))


if __name__ == "__main__":
    main()
