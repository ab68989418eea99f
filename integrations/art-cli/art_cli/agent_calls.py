"""`art doctor --agent`: runs an agent once, and says where each of its model calls goes."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Column, Table

from art_cli.arguments import load_agent
from art_cli.summary import failures
from art_core import open_run
from art_core.testing import CountingLearner, FakeEngine, scripted_reply
from art_core.types import JsonDict, Trajectory

POLICY = "the policy"
OUTCOMES = {"refused": "refused before they leave: {}", "failed": "refused by the policy: {}", "passed": "to {}"}
SECONDS = 120.0
"""Time limit of the agent's run."""


class ModelCall(NamedTuple):
    """Calls that are alike; what isn't known is ``-``."""

    model: str
    by: str
    """The node or agent that calls."""
    where: str


def show_calls(where: str, task: str, call_tools: bool) -> None:
    """Run the agent that ``where`` names once, inside a rollout so that nothing leaves, and print where its model calls go.

    The answers are made up. They call a tool only with ``call_tools``: then each one that is offered, once. Exit with 1 if a call
    doesn't reach the policy, or if the agent failed.
    """
    trajectory = asyncio.run(_run(load_agent(where), _input(task), scripted_reply if call_tools else text_only))
    calls, error = calls_of(trajectory), trajectory.error
    table = Table("calls", "model", "by", Column("where they go", overflow="fold"))
    for call, number in calls.items():
        table.add_row(str(number), *call)
    console = Console(markup=False, soft_wrap=True)
    console.print(table if calls else "the agent made no model call that was seen")
    if error:
        console.print(f"the agent failed: {failures([trajectory])[1]}")
        console.print(f"its task was {task!r}; --task passes another, as text or JSON")
    if not call_tools and (offered := _offered(trajectory)):
        lack = ", and the agent may have failed for that" if error else ""
        calling = "--tools calls each once, for real, with made-up arguments"
        console.print(f"tools were not called ({', '.join(offered)}){lack}; {calling}")
    if error or {call.where for call in calls} != {POLICY}:
        raise typer.Exit(1)


def text_only(request: JsonDict) -> JsonDict:
    """Return a made-up answer that calls no tool, not even one that the request demands."""
    return scripted_reply({**request, "tools": None, "tool_choice": None})


def calls_of(trajectory: Trajectory) -> Counter[ModelCall]:
    """Return the model calls of a rollout, recorded or not."""
    calls = Counter(
        ModelCall(str(call.request.get("model", "-")), call.agent or "-", POLICY) for call in trajectory.calls
    )
    for outcome, counts in trajectory.unrecorded.items():
        calls.update({ModelCall("-", "-", OUTCOMES[outcome].format(text)): n for text, n in counts.items()})
    return calls


def _offered(trajectory: Trajectory) -> list[str]:
    """Return the names of the tools that the model calls offered."""
    tools = [tool for call in trajectory.calls for tool in call.request.get("tools") or () if "function" in tool]
    return list(dict.fromkeys(tool["function"]["name"] for tool in tools))


def _input(task: str) -> Any:
    try:
        return json.loads(task)
    except ValueError:
        return task


async def _run(agent: object, task_input: object, reply: Callable[[JsonDict], JsonDict]) -> Trajectory:
    with tempfile.TemporaryDirectory() as folder:
        # Nothing loads this model, and none need be installed.
        (Path(folder) / "config.json").write_text("{}")
        parts = {"engine": FakeEngine(reply), "learner": CountingLearner(), "model": folder}
        async with open_run(Path(folder) / "run", rollout_timeout=SECONDS, **parts) as run:
            [group] = await run.collect(agent, [task_input], group_size=1, allow_no_calls=True)
            return group.trajectories[0]
