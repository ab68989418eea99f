"""Which rollout is this code running in? Asked by client wrappers at every model call; knows nothing about clients.

The current rollout is a context variable. Tasks inherit it by themselves; while a rollout is live, executor submits, thread
starts and child processes carry it too. Nothing is touched while no rollout is live.
"""

from __future__ import annotations

from art_core.attribution import threads
from art_core.attribution.executor import rollouts_have_threads
from art_core.attribution.guard import TO_DO, elsewhere
from art_core.attribution.imports import when_imported
from art_core.attribution.live import current_rollout, running
from art_core.attribution.names import agent_name, caller_headers, name_agents, name_threads
from art_core.attribution.processes import in_child_processes
from art_core.attribution.redirection import destination, exempt

__all__ = [
    "TO_DO",
    "agent_name",
    "caller_headers",
    "current_rollout",
    "destination",
    "elsewhere",
    "exempt",
    "in_child_processes",
    "name_agents",
    "name_threads",
    "rollouts_have_threads",
    "running",
    "threads",
    "when_imported",
]
