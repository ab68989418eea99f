"""Which rollout is this code running in, and where do its model calls go?

The current rollout is a context variable. Tasks inherit it; while any rollout is live, threads, executors and child processes
carry it too. Outside rollouts no function is wrapped.
"""

from __future__ import annotations

from art_core.attribution.executor import rollouts_have_threads
from art_core.attribution.guard import TO_DO, elsewhere
from art_core.attribution.names import agent_name, caller_headers, name_agents, name_threads
from art_core.attribution.rollouts import current_rollout, destination, exempt, running
from art_core.attribution.workers import in_child_processes
from art_core.attribution.wrapping import when_imported

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
    "when_imported",
]
