"""Train the agent you already have.

``import art_core as art`` is light: torch, transformers and the clients of agents are loaded when they are needed.
"""

from art_core.attribution import (
    agent_name,
    caller_headers,
    destination,
    exempt,
    name_agents,
    name_threads,
    when_imported,
)
from art_core.config import TrainConfig
from art_core.errors import ArtError
from art_core.hookspecs import hookimpl
from art_core.loop.evaluate import evaluate, evaluate_sync
from art_core.loop.open_run import open_run
from art_core.loop.report import Report, TrainResult
from art_core.loop.rewards import weighted
from art_core.loop.run import Run
from art_core.loop.sft import load_trajectories
from art_core.loop.tasks import tasks
from art_core.loop.train import train, train_sync
from art_core.types import Call, Group, Trajectory

__all__ = [
    "ArtError",
    "Call",
    "Group",
    "Report",
    "Run",
    "TrainConfig",
    "TrainResult",
    "Trajectory",
    "agent_name",
    "caller_headers",
    "destination",
    "evaluate",
    "evaluate_sync",
    "exempt",
    "hookimpl",
    "load_trajectories",
    "name_agents",
    "name_threads",
    "open_run",
    "tasks",
    "train",
    "train_sync",
    "weighted",
    "when_imported",
]
