"""`art doctor --agent`: runs an agent once, and says where each of its model calls goes."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import typer
from rich.console import Console
from rich.table import Column, Table

from art_cli.arguments import load_agent
from art_core import open_run
from art_core.testing import CountingLearner, FakeEngine, scripted_reply
from art_core.types import Trajectory

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


def show_calls(where: str, task: str) -> None:
    """Print where the agent's model calls go; exit with 1 if one doesn't reach the policy, or if the agent failed."""
    calls, error = calls_of(where, task)
    table = Table("calls", "model", "by", Column("where they go", overflow="fold"))
    for call, number in calls.items():
        table.add_row(str(number), *call)
    console = Console(markup=False, soft_wrap=True)
    console.print(table if calls else "the agent made no model call that was seen")
    if error:
        console.print(f"the agent failed: {error}")
    if error or {call.where for call in calls} != {POLICY}:
        raise typer.Exit(1)


def calls_of(where: str, task: str) -> tuple[Counter[ModelCall], str | None]:
    """Run the agent that ``where`` names once with ``task``, and return its model calls and its error.

    Inside a rollout, so nothing leaves. The answers are made up: every tool is called once, and schemas are filled in.
    """
    try:
        task_input = json.loads(task)
    except ValueError:
        task_input = task
    trajectory = asyncio.run(_run(load_agent(where), task_input))
    calls = Counter(
        ModelCall(str(call.request.get("model", "-")), call.agent or "-", POLICY) for call in trajectory.calls
    )
    for outcome, counts in trajectory.unrecorded.items():
        calls.update({ModelCall("-", "-", OUTCOMES[outcome].format(text)): n for text, n in counts.items()})
    return calls, trajectory.error


async def _run(agent: object, task_input: object) -> Trajectory:
    with tempfile.TemporaryDirectory() as folder:
        # Nothing loads this model, and none need be installed.
        (Path(folder) / "config.json").write_text("{}")
        parts = {"engine": FakeEngine(scripted_reply), "learner": CountingLearner(), "model": folder}
        async with open_run(Path(folder) / "run", rollout_timeout=SECONDS, **parts) as run:
            [group] = await run.collect(agent, [task_input], group_size=1, allow_no_calls=True)
            return group.trajectories[0]
