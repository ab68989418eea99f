"""Which rollout is this code running in, and where do its model calls go?

The current rollout is a context variable. Tasks inherit it; while any rollout is live, threads, executors and child processes
carry it too. Outside rollouts no function is wrapped.
"""

from __future__ import annotations

from art_core.attribution.executor import use_rollout_executor
from art_core.attribution.guard import TO_DO, USE_ADDRESS, Target, elsewhere, redirect_requests
from art_core.attribution.names import agent_name, caller_headers, name_agents, name_threads
from art_core.attribution.rollouts import current_rollout, destination, exempt, inside_rollout
from art_core.attribution.workers import run_in_child_processes
from art_core.attribution.wrapping import when_imported

__all__ = [
    "TO_DO",
    "USE_ADDRESS",
    "Target",
    "agent_name",
    "caller_headers",
    "current_rollout",
    "destination",
    "elsewhere",
    "exempt",
    "inside_rollout",
    "name_agents",
    "name_threads",
    "redirect_requests",
    "run_in_child_processes",
    "use_rollout_executor",
    "when_imported",
]
