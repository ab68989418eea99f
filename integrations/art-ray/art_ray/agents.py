"""A Ray worker process that runs many agents concurrently."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from art_core.errors import failure_of
from art_core.plugin_api import Plugins, inside_rollout, redirect_clients, run_in_child_processes, use_rollout_executor
from art_core.types import RolloutAddress, RunAgent
from art_ray.travel import Agent, Outcome


class AgentWorker:
    """Runs agents: async ones share this process's event loop, blocking ones have a thread each."""

    def __init__(self) -> None:
        self._agents: dict[str, RunAgent] = {}
        self._adapting = asyncio.Lock()
        redirect_clients()
        run_in_child_processes(redirect_clients)

    async def ready(self) -> str:
        """Return the address of this node; called again after every restart."""
        use_rollout_executor()
        return ray.util.get_node_ip_address()

    async def run(self, key: str, agent: list[ray.ObjectRef], task: Any, address: RolloutAddress) -> Outcome:
        """Run the agent called ``key`` once.

        ``agent`` holds a reference to the agent. It is in a list so that Ray doesn't fetch it for every rollout; it is
        fetched for the first one in this process.
        """
        try:
            run = await self._adapted(key, agent[0])
            with inside_rollout(address):
                return Outcome.of(await run(task, address))
        except BaseException as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            return Outcome.of_error(failure_of(error))

    async def _adapted(self, key: str, agent: ray.ObjectRef) -> RunAgent:
        async with self._adapting:
            if key not in self._agents:
                shipped: Agent = await agent
                self._agents[key] = Plugins().adapt(shipped.load())
        return self._agents[key]
