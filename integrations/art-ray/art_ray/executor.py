"""``executor="ray"``: agents run in a pool of Ray worker processes, wherever Ray places them.

Ray places the processes: each is an actor with its share of CPUs, spread over the nodes. Ray also restarts them: a process that
dies is started again, on another node if its own is gone. Ray doesn't retry the rollouts that it ran, because their calls are
recorded at their addresses: each raises RolloutLost, and the core repeats it under a new address.

The processes are actors rather than a task for every rollout: importing an agent's framework takes seconds and memory, and a
rollout mostly waits for model calls, so one process runs many (docs/scale-ray.md has the figures).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from art_core import TrainConfig
from art_core.capture import is_loopback
from art_core.errors import CaptureError, ConfigError, RolloutLost
from art_core.plugin_api import Plugins
from art_core.types import RolloutAddress, RunAgent
from art_ray.agents import AgentWorker
from art_ray.cluster import Cluster
from art_ray.options import ExecutorOptions, parsed
from art_ray.travel import Agent

logger = logging.getLogger("art_ray")

ROLLOUTS_PER_WORKER = 8
"""Concurrent rollouts that justify the memory of another process, if ``workers`` isn't set."""


@dataclass
class Worker:
    """A process that runs agents."""

    actor: ActorHandle
    ready: bool = False
    rollouts: int = 0
    """Rollouts in progress."""
    lost: str | None = None
    """Why the process won't come back; None while it may."""


class RayExecutor:
    """Runs agents on a Ray cluster; ``async with`` starts and ends the processes."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.options = parsed(ExecutorOptions, "executor_args", config.executor_args)
        self._workers: list[Worker] = []
        self._watching: set[asyncio.Task[None]] = set()

    def adapt(self, agent: object) -> RunAgent:
        """Return a function that runs ``agent`` once on the cluster.

        ``agent`` may be a name, ``"MODULE:NAME"`` or ``"FILE.py:NAME"``, which is looked up on the cluster. Raises AgentError
        if the agent can't be sent or no plugin adapts it.
        """
        shipped = Agent.of(agent)
        if shipped.name is None:
            Plugins().adapt(agent)  # so that a mistake is refused before anything runs
        key = hashlib.sha256(shipped.pickled or str(shipped.name).encode()).hexdigest()
        references: list[ray.ObjectRef] = []

        async def run(task: Any, address: RolloutAddress) -> Any:
            if not references:
                references.append(ray.put(shipped))
            return await self._run(key, references[:1], task, address)

        return run

    async def __aenter__(self) -> RayExecutor:
        self._cluster = await asyncio.to_thread(Cluster)
        try:
            self.check_address(self._cluster)
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watching:
            task.cancel()
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers.clear()
        await asyncio.to_thread(self._cluster.leave)

    def check_address(self, cluster: Cluster) -> None:
        """Raise ConfigError if agents on other nodes can't reach the policy at ``config.host``."""
        host, here = self.config.host, cluster.here
        others = sorted({node["NodeManagerAddress"] for node in cluster.nodes} - {here})
        if others and (is_loopback(host) or host in ("0.0.0.0", "::")):
            raise ConfigError(
                f"agents call the policy at host={host!r}, but other nodes of the Ray cluster can't reach this machine there "
                f"({', '.join(others[:3])}); pass host={here!r}, this machine's address in the cluster"
            )

    async def _start(self) -> None:
        useful = -(-self.config.max_concurrent // ROLLOUTS_PER_WORKER)
        count = self.options.workers or max(1, min(useful, self._cluster.total("CPU") // 2))
        kind = ray.remote(AgentWorker).options(
            num_cpus=self.options.cpus, max_restarts=-1, max_concurrency=self.config.max_concurrent + 1,
            scheduling_strategy="SPREAD", runtime_env=dict(self.options.runtime_env) or None,
        )  # fmt: skip
        self._changed = asyncio.Condition()
        self._workers = [Worker(kind.remote()) for _ in range(count)]
        for worker in self._workers:
            self._watch(worker)
        started = time.monotonic()
        try:
            await asyncio.wait_for(self._any_ready(), self.options.start_seconds)
        except TimeoutError as error:
            raise ConfigError(
                f"Ray started none of {count} agent processes within {self.options.start_seconds:g} seconds; each needs "
                f"{self.options.cpus:g} of the cluster's {self._cluster.total('CPU')} CPUs, which other jobs may use ('ray "
                "status' lists them). Ask for fewer with executor_args={'workers': N, 'cpus': N}"
            ) from error

        # Wait as long again for the others, so that the first rollouts are spread. Later ones join when they are ready.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_ready(), time.monotonic() - started + 1)

    def _watch(self, worker: Worker) -> None:
        """Update the worker, in the background, when its process has started or restarted."""
        task = asyncio.create_task(self._await_ready(worker))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _await_ready(self, worker: Worker) -> None:
        try:
            # Ray retries this call across restarts: the next process answers it.
            await worker.actor.ready.options(max_task_retries=-1).remote()
            worker.ready = True
        except RayError as error:
            worker.lost = " ".join(str(error).split())
            logger.warning("lost a Ray worker for agents for good: %s", worker.lost)
        async with self._changed:
            self._changed.notify_all()

    async def _any_ready(self) -> Worker:
        """Return the ready worker with the fewest rollouts; wait for one if necessary. CaptureError if all are lost."""
        async with self._changed:
            while not (ready := [worker for worker in self._workers if worker.ready]):
                if all(worker.lost for worker in self._workers):
                    raise CaptureError(
                        f"all Ray workers for agents are lost: {self._workers[0].lost}; check 'ray status' and the workers' "
                        "logs. Finished rollouts are kept: train again with the same run_dir"
                    )
                await self._changed.wait()
        return min(ready, key=lambda worker: worker.rollouts)

    async def _all_ready(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(worker.ready or worker.lost for worker in self._workers))

    async def _run(self, key: str, agent: list[ray.ObjectRef], task: Any, address: RolloutAddress) -> Any:
        worker = await self._any_ready()
        worker.rollouts += 1
        running = worker.actor.run.remote(key, agent, task, address)
        try:
            outcome = await running
        except asyncio.CancelledError:
            ray.cancel(running)
            raise
        except RayTaskError:
            raise  # the worker couldn't unpickle the agent
        except RayError as error:
            if isinstance(error, RayActorError) and worker.ready:
                worker.ready = False
                self._watch(worker)
            reason = " ".join(str(error).split())
            raise RolloutLost(f"the Ray worker that ran the agent is gone: {reason}") from error
        finally:
            worker.rollouts -= 1
        return outcome.output()
