"""A Ray worker process that runs agents, many at a time. Knows nothing about who asks, groups or the store."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from art_core.attribution import in_child_processes, rollouts_have_threads, running
from art_core.plugins import Plugins, redirect_clients
from art_core.types import RolloutAddress, RunAgent
from art_ray.travel import Agent, Outcome


class AgentWorker:
    """Async agents share this process's event loop, blocking ones have a thread each."""

    def __init__(self) -> None:
        self._agents: dict[str, RunAgent] = {}
        self._adapting = asyncio.Lock()
        redirect_clients()
        in_child_processes(redirect_clients)

    async def ready(self) -> str:
        """Return the address of this node; asked again after every restart."""
        rollouts_have_threads()
        return ray.util.get_node_ip_address()

    async def run(self, key: str, agent: list[ray.ObjectRef], given: Any, address: RolloutAddress) -> Outcome:
        """Run the agent that ``key`` stands for once. ``agent`` holds a reference to it: in a list, so that it is fetched
        by the first run here only."""
        try:
            run = await self._adapted(key, agent[0])
            with running(address):
                return Outcome.of(await run(given, address))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            return Outcome.of_error(error)

    async def _adapted(self, key: str, agent: ray.ObjectRef) -> RunAgent:
        async with self._adapting:
            if key not in self._agents:
                sent: Agent = await agent
                self._agents[key] = Plugins().adapt(sent.arrived())
        return self._agents[key]
