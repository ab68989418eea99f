"""Distributes episodes to workers, and ensures that each ends exactly once, whatever happens to the worker.

A worker holds an episode by a lease. It renews the lease with heartbeats, and the lease's result is accepted once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel
from starlette.websockets import WebSocket

from art_core.errors import CaptureError, ConfigError, RolloutLost
from art_core.plugin_api import plural
from art_server.clients import RECONNECTED, REPLACED, TOO_MANY_BAD, Client, Pending, Socket, sockets_closed
from art_server.gate import Gate
from art_server.messages import (
    SESSION,
    Ack,
    BadMessage,
    CancelEpisodes,
    Episode,
    EpisodeResult,
    ErrorMessage,
    ModelState,
    StatusUpdate,
    TrainEpisodes,
    UpdateModel,
    read,
)

log = logging.getLogger("art_server")

LEASE = 30.0
"""Seconds of silence after which a worker's episodes go to other workers."""
NO_WORKER = 5.0
"""Seconds that rollouts wait before a pool without workers is logged."""
MAX_BAD_MESSAGES = 20
"""Bad messages in one connection after which it is closed."""
ATTEMPTS = 5
"""Workers that one episode may lose. Then its agent may be what ends them, and the episode has failed."""
CLASSIC_CAPACITY = 4
"""Concurrent episodes of a classic client, which doesn't send its capacity."""


class TrainingServer:
    """The workers and their episodes. All methods must be called in one event loop."""

    def __init__(self, *, lease: float = LEASE) -> None:
        self.lease = lease
        """Seconds of silence after which a worker's episodes go to other workers."""
        self.training_queue: deque[Pending] = deque()
        """Episodes that wait for a worker."""
        self.results_queue: list[dict[str, Any]] = []
        """Results of ``distribute_episodes``, oldest first, each once; the reader removes them."""
        self._model_state: ModelState | None = None
        self._clients: dict[str, Client] = {}
        self._gates: WeakValueDictionary[str, Gate] = WeakValueDictionary()  # a pool's gate lives while it is used
        self._assignment_scheduled = False
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def active_clients(self) -> dict[str, Socket]:
        """Connected workers, by id."""
        return {name: client.socket for name, client in self._clients.items() if client.socket is not None}

    async def serve_client(self, client_id: str, websocket: WebSocket) -> None:
        """Accept a worker's WebSocket and handle its messages until it disconnects."""
        await websocket.accept()
        await self.register_client(client_id, websocket, websocket.headers.get(SESSION))
        try:
            while True:
                message = await websocket.receive()
                client = self._clients.get(client_id)
                if message["type"] == "websocket.disconnect" or client is None or client.socket is not websocket:
                    return
                await self.handle(client_id, message.get("text") or message.get("bytes") or "")
        except RuntimeError as error:  # the server has closed it meanwhile
            log.debug("worker %s: %r", client_id, error)
        finally:
            await self.unregister_client(client_id, websocket)

    async def register_client(self, client_id: str, websocket: Socket, session: str | None = None) -> None:
        """Register a connected worker's socket for sending; the caller passes the worker's messages to ``handle``.

        ``session`` is the session in its status updates; None for a classic client.
        """
        client = self._clients.setdefault(client_id, Client(client_id, capacity=CLASSIC_CAPACITY))
        if session is not None and session == client.session:
            client.disconnect(RECONNECTED, "this worker has reconnected")
        else:
            client.disconnect(REPLACED, f"another worker has connected as {client_id}")
        client.connect(websocket)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        log.info("worker %s connected", client_id)
        self.gate(client.pool).admit()
        self._schedule_assignment()

    async def unregister_client(self, client_id: str, websocket: Socket) -> None:
        """Handle the end of a connection. Leases remain until they expire, because the worker may reconnect."""
        client = self._clients.get(client_id)
        if client is None or client.socket not in (websocket, None):
            return
        client.mark_disconnected()
        log.info("worker %s disconnected, holding %d rollouts", client_id, len(client.held))
        if not client.leases:
            self._lose(client, client.held, "disconnected")
        if client.state == "left":
            del self._clients[client_id]

    async def distribute_episodes(self, episodes: Iterable[dict[str, Any]]) -> None:
        """Queue episodes for the connected and future workers; their results are added to ``results_queue``.

        An episode is a dict with ``episode_id``. If its worker is lost, another worker repeats it. Episodes live only in this
        process. Raises ConfigError for one without an id, or whose id is in use.
        """
        episodes = [dict(episode) for episode in episodes]
        used_ids = {pending.episode_id for pending in (*self.training_queue, *self._held())}
        for index, episode in enumerate(episodes):
            episode_id = episode.get("episode_id")
            if not isinstance(episode_id, str) or not episode_id or episode_id in used_ids:
                raise ConfigError(
                    f"episode {index} has episode_id={episode_id!r}; it must be a unique non-empty string"
                )
            if episode.get("rollout") is not None:
                raise ConfigError(
                    f"episode {episode_id!r} has the key 'rollout', which is reserved for runs; leave it out"
                )
            used_ids.add(episode_id)
        for episode in episodes:
            pending = Pending(episode, "default", asyncio.get_running_loop().create_future(), repeatable=True)
            pending.outcome.add_done_callback(self._store_result)
            self._queue(pending)

    async def send_to_client(self, client_id: str, message: dict[str, Any] | BaseModel) -> None:
        """Send a message; ConfigError if no such worker is connected."""
        client = self._clients.get(client_id)
        if client is None or client.socket is None:
            raise ConfigError(f"no worker {client_id!r} is connected; connected: {', '.join(self.active_clients)}")
        client.send(message if isinstance(message, BaseModel) else _AnyMessage.model_validate(message))

    async def run(self, body: dict[str, Any], pool: str = "default") -> dict[str, Any]:
        """Let a worker of ``pool`` run an episode once and return its result.

        Raises RolloutLost if the worker or its connection to the server is lost, CaptureError if the worker can't record its
        agent's calls. Cancelling this cancels the episode.
        """
        pending = Pending(body, pool, asyncio.get_running_loop().create_future(), repeatable=False)
        self._queue(pending)
        try:
            result = await pending.outcome
        finally:
            self._cancel(pending)
        if result.get("lost"):
            raise RolloutLost(f"worker {result['client_id']} could not reach the server: {result.get('error')}")
        if result.get("capture_error"):
            raise CaptureError(result.get("error") or "the worker can't record its agent's calls")
        return result

    def gate(self, pool: str) -> Gate:
        """Return the gate that admits as many rollouts as the connected workers of ``pool`` can run."""
        gate = self._gates.get(pool)
        if gate is None:
            gate = self._gates[pool] = Gate(lambda: self._capacity(pool))
        return gate

    def warn_without_worker(self, pool: str) -> None:
        """Log after ``NO_WORKER`` seconds that rollouts wait, if ``pool`` has no worker then."""

        def warn() -> None:
            gate = self._gates.get(pool)
            if gate and gate.waiting and not self._capacity(pool):
                log.warning(
                    "%s wait, because no worker serves pool %s; start one: art worker SERVER --id NAME --agent AGENT --pool %s",
                    plural(gate.waiting, "rollout"), pool, pool,
                )  # fmt: skip

        asyncio.get_running_loop().call_later(NO_WORKER, warn)

    def publish(self, model_state: ModelState) -> None:
        """Notify every connected and future worker which weights are served."""
        self._model_state = model_state
        for client in self._clients.values():
            self._send_model(client)

    @property
    def queued(self) -> int:
        """Episodes that wait for a worker."""
        return len(self.training_queue) + sum(gate.waiting for gate in list(self._gates.values()))

    def workers(self) -> list[dict[str, Any]]:
        """Return every worker's state and counts, for the dashboard."""
        return [
            {
                "id": client.client_id, "state": client.display_state, "pool": client.pool, "capacity": client.capacity,
                "running": len(client.held), "finished": client.finished, "lost": client.lost, "version": client.version,
                "last_seen": client.last_seen,
            }
            for client in self._clients.values()
        ]  # fmt: skip

    async def handle(self, client_id: str, text: str | bytes) -> None:
        """Handle a worker's message. Bad ones are logged and answered with an error; too many end the connection."""
        client = self._clients[client_id]
        client.last_seen = time.time()
        try:
            message = read(text, "worker")
            if message.client_id not in (None, client_id):
                raise BadMessage(f"client_id is {message.client_id!r:.80}, but this is the connection of {client_id!r}")
        except BadMessage as error:
            client.bad_messages += 1
            log.warning("bad message from worker %s: %s", client_id, error)
            client.send(ErrorMessage(code="bad_message", message=str(error)))
            if client.bad_messages >= MAX_BAD_MESSAGES:
                client.disconnect(TOO_MANY_BAD, f"{MAX_BAD_MESSAGES} bad messages")
            return
        if isinstance(message, StatusUpdate):
            self._handle_status(client, message)
        else:
            self._handle_results(client, message)
        self._schedule_assignment()

    async def close(self, reason: str = "the server is stopping") -> None:
        """Disconnect every worker with code 1012 (reconnect later), and cancel all episodes."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for client in self._clients.values():
            client.disconnect(1012, reason)
        for pending in (*self.training_queue, *self._held()):
            pending.outcome.cancel()
        await sockets_closed()

    def _handle_status(self, client: Client, status: StatusUpdate) -> None:
        client.leases = status.v is not None
        if client.leases:
            client.pool, client.capacity = status.pool, status.capacity
            if status.session != client.session:
                self._lose(client, client.held, "was restarted")
                client.session = status.session
            self._lose(client, client.renew(status.running, self.lease), "no longer has it")
            if unknown := [lease for lease in status.running if lease not in client.held]:
                client.send(CancelEpisodes(leases=unknown))
        client.state = status.status
        if status.status == "left":
            self._lose(client, client.held, "has left")
        if status.status == "connected":
            log.info("worker %s runs up to %d rollouts concurrently", client.client_id, client.capacity)
            self._send_model(client)
        self.gate(client.pool).admit()

    def _handle_results(self, client: Client, message: EpisodeResult) -> None:
        acked, stale = [], []
        for result in message.results:
            lease = result.lease or client.lease_of(result.episode_id)
            acked.append(lease)
            pending = client.release(lease)
            if pending is None or pending.outcome.done():
                stale.append(lease)
                continue
            client.finished += 1
            pending.outcome.set_result({**result.model_dump(exclude={"lease"}), "client_id": client.client_id})
        if client.leases:
            client.send(Ack(leases=acked, stale=stale))

    def _lose(self, client: Client, leases: Iterable[str], reason: str) -> None:
        """End the leases of a worker that won't finish their episodes."""
        released = [client.release(lease) for lease in list(leases)]
        lost = [pending for pending in released if pending is not None and not pending.outcome.done()]
        message = f"worker {client.client_id} {reason}"
        if lost:
            log.warning("%s: %d rollouts go to other workers", message, len(lost))
        for pending in lost:
            client.lost += 1
            pending.attempts += 1
            if not pending.repeatable:
                pending.outcome.set_exception(RolloutLost(message))
            elif pending.attempts >= ATTEMPTS:
                error = f"{ATTEMPTS} workers were lost while running it; the last one: {message}"
                pending.outcome.set_result({"episode_id": pending.episode_id, "error": error})
            else:
                self.training_queue.appendleft(pending)
        self._schedule_assignment()

    async def _sweep(self) -> None:
        """Reclaim the episodes of silent workers, and forget workers that have been gone for long."""
        pause = self.lease / 8
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            late = time.monotonic() - began - pause
            for client in list(self._clients.values()):
                client.extend_all(late)  # while this event loop was blocked, no heartbeat could be handled
                if client.leases and (expired := client.expired()):
                    client.state = "silent"  # it gets no episodes until its next message
                    self._lose(client, expired, f"was silent for {self.lease:g} seconds")
                if client.socket is None and not client.held and client.last_seen < time.time() - 10 * self.lease:
                    del self._clients[client.client_id]
            self._lose_unserved()

    def _lose_unserved(self) -> None:
        """Fail queued rollouts that no worker can run: their time limit is running, but not their agent."""
        oldest = time.monotonic() - self.lease
        overdue = [each for each in self.training_queue if not each.repeatable and each.queued < oldest]
        for pending in overdue:
            if not self._capacity(pending.pool):
                self.training_queue.remove(pending)
                pending.outcome.set_exception(RolloutLost(f"pool {pending.pool} has no worker"))

    def _cancel(self, pending: Pending) -> None:
        """Drop an episode whose result is no longer awaited."""
        if pending in self.training_queue:
            self.training_queue.remove(pending)
        if (client := pending.holder) is not None:
            client.release(pending.lease)
            if client.leases:
                client.send(CancelEpisodes(leases=[pending.lease]))
            self._schedule_assignment()

    def _queue(self, pending: Pending) -> None:
        self.training_queue.append(pending)
        self._schedule_assignment()

    def _schedule_assignment(self) -> None:
        """Assign in the event loop's next iteration, so that episodes queued together are sent together."""
        if not self._assignment_scheduled and self.training_queue:
            self._assignment_scheduled = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        """Assign waiting episodes to the workers with free slots, round-robin."""
        self._assignment_scheduled = False
        ready: dict[str, deque[Client]] = defaultdict(deque)
        for client in self._clients.values():
            if client.free > 0:
                ready[client.pool].append(client)
        assigned: dict[Client, list[Episode]] = defaultdict(list)
        unassigned: deque[Pending] = deque()
        while self.training_queue:
            pending = self.training_queue.popleft()
            if not ready[pending.pool]:
                unassigned.append(pending)
                continue
            client = ready[pending.pool].popleft()
            lease = client.grant(pending, self.lease)
            assigned[client].append(Episode.model_validate({**pending.body, "lease": lease}))
            if client.free > 0:
                ready[pending.pool].append(client)
        self.training_queue = unassigned
        for client, episodes in assigned.items():
            client.send(TrainEpisodes(client_id=client.client_id, episodes=episodes, lease_seconds=self.lease))

    def _capacity(self, pool: str) -> int:
        # Held episodes count even if their worker is disconnected or leaving, because they still occupy slots of the gate.
        return sum(max(client.slots, len(client.held)) for client in self._clients.values() if client.pool == pool)

    def _held(self) -> list[Pending]:
        return [pending for client in self._clients.values() for pending in client.held.values()]

    def _store_result(self, outcome: asyncio.Future[dict[str, Any]]) -> None:
        if not outcome.cancelled():
            result = outcome.result()
            client_id = result.pop("client_id", None)
            self.results_queue.append({"type": "episode_result", "results": [result], "client_id": client_id})

    def _send_model(self, client: Client) -> None:
        if self._model_state is not None and client.socket is not None and client.leases:
            client.version = self._model_state.version
            client.send(UpdateModel(model_state=self._model_state))


class _AnyMessage(BaseModel, extra="allow"):
    """A message with any fields."""
