"""What the tests of child processes let their children do: functions of a module, so that they travel by name."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

from art_core.attribution import agent_name, destination

ENVIRONMENT = (
    "ART_ROLLOUT_ID",
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "OPENAI_AGENTS_DISABLE_TRACING",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_URL",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_BEDROCK_BASE_URL",
    "AWS_ENDPOINT_URL_BEDROCK_RUNTIME",
    "GOOGLE_GEMINI_BASE_URL",
    "GOOGLE_VERTEX_BASE_URL",
    "OLLAMA_HOST",
)
"""What a rollout's child process finds in its environment."""
PRINT = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {ENVIRONMENT}}}))"
"""A program that prints what its environment says of its rollout."""
prepared = []


def prepare() -> None:
    prepared.append(os.getpid())


def seen(_: object = None, *, model: str = "gpt") -> str | None:
    """Return which rollout a call of this code would go to."""
    time.sleep(0.001)  # so that more than one worker of a pool gets work
    address = destination(model)
    return address.rollout_id if address else None


def everything(_: object = None) -> dict[str, object]:
    """Return what there is to know of the rollout in this process."""
    on_threads: list[str | None] = []
    thread = threading.Thread(target=lambda: on_threads.append(seen()))
    thread.start()
    thread.join()
    program = json.loads(subprocess.check_output([sys.executable, "-c", PRINT]))
    return {
        "here": seen(),
        "agent": agent_name(),
        "thread": on_threads[0],
        "program": program["ART_ROLLOUT_ID"],
        "own": os.environ.get("ART_ROLLOUT_ID"),
        "prepared": prepared == [os.getpid()],
    }


def send(connection, answer=everything) -> None:
    connection.send(answer())
    connection.close()


def end_badly() -> None:
    sys.exit(7)


class Sending(multiprocessing.get_context("spawn").Process):
    """A process whose work is its own ``run``."""

    def __init__(self, connection) -> None:
        super().__init__(daemon=True)
        self.connection = connection

    def run(self) -> None:
        send(self.connection)
