"""``executor="ray"``: agents run in a pool of Ray worker processes, wherever Ray places them. Knows nothing about learning.

Placement is Ray's: each process is an actor with its share of CPUs, spread over the nodes. Restarts are Ray's: a process that
dies is started again, on another node where its own is gone. The runs that it held are not retried by Ray, because a run that
was begun has calls at its address: each raises RolloutLost, and the core makes it again under a new address.

Actors rather than a task for every run: importing an agent's framework takes seconds and its memory, and a run mostly waits
for model calls, so one process holds many (docs/scale-ray.md has the figures).
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

from art_core.capture import is_loopback
from art_core.config import TrainConfig
from art_core.errors import CaptureError, ConfigError, RolloutLost
from art_core.plugins import Plugins
from art_core.types import RolloutAddress, RunAgent
from art_ray.agents import AgentWorker
from art_ray.cluster import Cluster
from art_ray.options import ExecutorOptions, parsed
from art_ray.travel import Agent

logger = logging.getLogger("art_ray")

RUNS_PER_WORKER = 8
"""Of the runs at a time for which a process more is worth its memory, where ``workers`` does not say."""


@dataclass
class Worker:
    """A process that runs agents, as it is known here."""

    actor: ActorHandle
    ready: bool = False
    runs: int = 0
    """Under way."""
    lost: str | None = None
    """Why it will not come back."""


class RayExecutor:
    """Runs agents on a Ray cluster; ``async with`` starts the processes and ends them."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.options = parsed(ExecutorOptions, "executor_args", config.executor_args)
        self._workers: list[Worker] = []
        self._watching: set[asyncio.Task[None]] = set()

    def adapt(self, agent: object) -> RunAgent:
        """Return the function that runs ``agent`` once on the cluster. AgentError where it cannot be sent or nobody adapts it.

        A name, ``"MODULE:NAME"`` or ``"FILE.py:NAME"``, is looked up on the cluster.
        """
        sent = Agent.of(agent)
        if sent.named is None:
            Plugins().adapt(agent)  # so that a mistake is refused before anything runs
        key = hashlib.sha256(sent.pickled or str(sent.named).encode()).hexdigest()
        references: list[ray.ObjectRef] = []

        async def run(given: Any, address: RolloutAddress) -> Any:
            if not references:
                references.append(ray.put(sent))
            return await self._run(key, references[:1], given, address)

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
        """Raise ConfigError where agents on other nodes cannot reach the policy at the address that they are told."""
        host, here = self.config.host, cluster.here
        others = sorted({node["NodeManagerAddress"] for node in cluster.nodes} - {here})
        if others and (is_loopback(host) or host in ("0.0.0.0", "::")):
            raise ConfigError(
                f"host={host!r} is where agents are told to reach the policy, and the Ray cluster has nodes that cannot reach "
                f"this machine there ({', '.join(others[:3])}); give host={here!r}, this machine's address in the cluster"
            )

    async def _start(self) -> None:
        at_once = -(-self.config.max_concurrent // RUNS_PER_WORKER)
        count = self.options.workers or max(1, min(at_once, self._cluster.total("CPU") // 2))
        kind = ray.remote(AgentWorker).options(
            num_cpus=self.options.cpus, max_restarts=-1, max_concurrency=self.config.max_concurrent + 1,
            scheduling_strategy="SPREAD", runtime_env=dict(self.options.runtime_env) or None,
        )  # fmt: skip
        self._changed = asyncio.Condition()
        self._workers = [Worker(kind.remote()) for _ in range(count)]
        for worker in self._workers:
            self._watch(worker)
        begun = time.monotonic()
        try:
            await asyncio.wait_for(self._any_ready(), self.options.start_seconds)
        except TimeoutError as error:
            raise ConfigError(
                f"Ray has started none of {count} processes for agents after {self.options.start_seconds:g} seconds; each asks "
                f"for {self.options.cpus:g} CPUs of {self._cluster.total('CPU')} in the cluster, which others may hold ('ray "
                "status' says who). Give fewer in executor_args={'workers': N, 'cpus': N}"
            ) from error

        # The others get as long again, so that the first runs are spread; who comes later takes part from then on.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_ready(), time.monotonic() - begun + 1)

    def _watch(self, worker: Worker) -> None:
        """Note when the worker is there, or there again."""
        task = asyncio.create_task(self._note(worker))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _note(self, worker: Worker) -> None:
        try:
            # Retried by Ray across restarts: it is answered by the process that comes next.
            await worker.actor.ready.options(max_task_retries=-1).remote()
            worker.ready = True
        except RayError as error:
            worker.lost = " ".join(str(error).split())
            logger.warning("a Ray worker for agents is gone for good: %s", worker.lost)
        async with self._changed:
            self._changed.notify_all()

    async def _any_ready(self) -> Worker:
        """Return the worker with the fewest runs of those that are there; CaptureError where none can be any more."""
        async with self._changed:
            while not (ready := [worker for worker in self._workers if worker.ready]):
                if all(worker.lost for worker in self._workers):
                    raise CaptureError(
                        f"no Ray worker is left to run agents: {self._workers[0].lost}; look at 'ray status' and the workers' "
                        "logs. What was finished is kept: train again with the same run_dir"
                    )
                await self._changed.wait()
        return min(ready, key=lambda worker: worker.runs)

    async def _all_ready(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(worker.ready or worker.lost for worker in self._workers))

    async def _run(self, key: str, agent: list[ray.ObjectRef], given: Any, address: RolloutAddress) -> Any:
        worker = await self._any_ready()
        worker.runs += 1
        running = worker.actor.run.remote(key, agent, given, address)
        try:
            outcome = await running
        except asyncio.CancelledError:
            ray.cancel(running)
            raise
        except RayTaskError:
            raise  # of what was sent: it could not be read there
        except RayError as error:
            if isinstance(error, RayActorError) and worker.ready:
                worker.ready = False
                self._watch(worker)
            what = " ".join(str(error).split())
            raise RolloutLost(f"the Ray worker that ran the agent is gone: {what}") from error
        finally:
            worker.runs -= 1
        return outcome.arrived()
