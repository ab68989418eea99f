"""Hands episodes to workers, and sees to it that each ends once, whatever becomes of the worker.

Every episode that is handed over is a lease: its holder prolongs it by heartbeats, and its result is taken once. Knows
nothing about rollouts, routes or models.
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
from art_server.clients import CAME_BACK, REPLACED, TOO_BAD, Client, Pending, Socket, closed
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
"""Seconds without a word after which a worker's episodes are given to others."""
MOST_BAD = 20
"""Bad messages of one connection, after which it is closed."""
ATTEMPTS = 5
"""Workers that one episode may lose. Then its agent may be what ends them, and the episode has failed."""
CLASSIC_CAPACITY = 4
"""Episodes at a time of a worker that does not say how many it takes."""


class TrainingServer:
    """The workers and the episodes. All methods belong to one event loop."""

    def __init__(self, *, lease: float = LEASE) -> None:
        self.lease = lease
        """Seconds without a word after which a worker's episodes are given to others."""
        self.training_queue: deque[Pending] = deque()
        """Episodes that wait for a worker."""
        self.results_queue: list[dict[str, Any]] = []
        """Results of ``distribute_episodes``, oldest first, each once; whoever reads them takes them out."""
        self._model_state: ModelState | None = None
        self._clients: dict[str, Client] = {}
        self._gates: WeakValueDictionary[str, Gate] = WeakValueDictionary()  # as long as somebody runs episodes there
        self._assigning = False
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def active_clients(self) -> dict[str, Socket]:
        """Connected workers, by id."""
        return {name: it.socket for name, it in self._clients.items() if it.socket is not None}

    async def serve_client(self, client_id: str, websocket: WebSocket) -> None:
        """Accept a worker's WebSocket and hear it to its end."""
        await websocket.accept()
        await self.register_client(client_id, websocket, websocket.headers.get(SESSION))
        try:
            while True:
                said = await websocket.receive()
                client = self._clients.get(client_id)
                if said["type"] == "websocket.disconnect" or client is None or client.socket is not websocket:
                    return
                await self.handle(client_id, said.get("text") or said.get("bytes") or "")
        except RuntimeError as error:  # it was closed here meanwhile
            log.debug("worker %s: %r", client_id, error)
        finally:
            await self.unregister_client(client_id, websocket)

    async def register_client(self, client_id: str, websocket: Socket, session: str | None = None) -> None:
        """Take over a connected worker's socket for sending; ``handle`` is to be given what it says.

        ``session`` is what its status updates will name; a classic client has none.
        """
        client = self._clients.setdefault(client_id, Client(client_id, capacity=CLASSIC_CAPACITY))
        if session is not None and session == client.session:
            client.disconnect(CAME_BACK, "you have connected again")
        else:
            client.disconnect(REPLACED, f"another worker has connected as {client_id}")
        client.connect(websocket)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        log.info("worker %s connected", client_id)
        self.gate(client.pool).admit()
        self._assign_soon()

    async def unregister_client(self, client_id: str, websocket: Socket) -> None:
        """Note that the connection is gone. Leases stay until they end: the worker may come back."""
        client = self._clients.get(client_id)
        if client is None or client.socket not in (websocket, None):
            return
        client.gone()
        log.info("worker %s disconnected, holding %d episodes", client_id, len(client.held))
        if not client.leases:
            self._lose(client, client.held, "disconnected")
        if client.state == "left":
            del self._clients[client_id]

    async def distribute_episodes(self, episodes: Iterable[dict[str, Any]]) -> None:
        """Queue episodes for the connected workers and those to come; their results come into ``results_queue``.

        An episode is a dict with ``episode_id``. It is given to another worker where its own is lost. They live in this
        process only. Raises ConfigError for one without an id, or whose id is under way.
        """
        episodes = [dict(episode) for episode in episodes]
        ids = [episode.get("episode_id") for episode in episodes]
        under_way = {it.episode_id for it in (*self.training_queue, *self._held())}
        for place, name in enumerate(ids):
            if not isinstance(name, str) or not name or name in under_way:
                raise ConfigError(f"episode {place} has episode_id={name!r}; give each one a text of its own")
            if episodes[place].get("rollout") is not None:
                raise ConfigError(f"episode {name!r} names a rollout, which only a run opens; leave the key out")
            under_way.add(name)
        for episode in episodes:
            pending = Pending(dict(episode), "default", asyncio.get_running_loop().create_future(), again=True)
            pending.outcome.add_done_callback(self._keep_result)
            self._queue(pending)

    async def send_to_client(self, client_id: str, message: dict[str, Any] | BaseModel) -> None:
        """Send a message; ConfigError where no such worker is connected."""
        client = self._clients.get(client_id)
        if client is None or client.socket is None:
            raise ConfigError(f"no worker {client_id!r} is connected; connected are: {', '.join(self.active_clients)}")
        client.say(message if isinstance(message, BaseModel) else _AsGiven.model_validate(message))

    async def run(self, body: dict[str, Any], pool: str = "default") -> dict[str, Any]:
        """Let a worker of ``pool`` run an episode once and return its result.

        Raises RolloutLost where the worker, or its way to the server, is lost, CaptureError where it says that nothing can be
        recorded there. Cancelling gives the episode up.
        """
        pending = Pending(body, pool, asyncio.get_running_loop().create_future(), again=False)
        self._queue(pending)
        try:
            result = await pending.outcome
        finally:
            self._give_up(pending)
        if result.get("lost"):
            raise RolloutLost(f"worker {result['client_id']} could not reach the server: {result.get('error')}")
        if result.get("capture_error"):
            raise CaptureError(result.get("error") or "the worker cannot record its agent's calls")
        return result

    def gate(self, pool: str) -> Gate:
        """Return what lets in as many as the connected workers of ``pool`` can run."""
        gate = self._gates.get(pool)
        if gate is None:
            gate = self._gates[pool] = Gate(lambda: self._capacity(pool))
        return gate

    def publish(self, model_state: ModelState) -> None:
        """Tell every worker, and those to come, which weights are served."""
        self._model_state = model_state
        for client in self._clients.values():
            self._tell_model(client)

    @property
    def queued(self) -> int:
        """Episodes that wait for a worker."""
        return len(self.training_queue) + sum(gate.waiting for gate in list(self._gates.values()))

    def workers(self) -> list[dict[str, Any]]:
        """Return what is known of every worker, for people."""
        return [
            {
                "id": it.client_id, "state": it.shown, "pool": it.pool, "capacity": it.capacity,
                "running": len(it.held), "finished": it.finished, "lost": it.lost, "version": it.version,
                "last_seen": it.last_seen,
            }
            for it in self._clients.values()
        ]  # fmt: skip

    async def handle(self, client_id: str, text: str | bytes) -> None:
        """Take what a worker said. A bad message is answered with an error and logged; too many end the connection."""
        client = self._clients[client_id]
        client.last_seen = time.time()
        try:
            message = read(text, "worker")
            if message.client_id not in (None, client_id):
                raise BadMessage(f"client_id is {message.client_id!r:.80}, but this is the connection of {client_id!r}")
        except BadMessage as error:
            client.bad += 1
            log.warning("worker %s said what is no message: %s", client_id, error)
            client.say(ErrorMessage(code="bad_message", message=str(error)))
            if client.bad >= MOST_BAD:
                client.disconnect(TOO_BAD, f"{MOST_BAD} bad messages")
            return
        if isinstance(message, StatusUpdate):
            self._take_status(client, message)
        else:
            self._take_results(client, message)
        self._assign_soon()

    async def close(self, reason: str = "the server ends") -> None:
        """Tell every worker to come back later, and cancel whatever waits."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for client in self._clients.values():
            client.disconnect(1012, reason)
        for pending in (*self.training_queue, *self._held()):
            pending.outcome.cancel()
        await closed()

    def _take_status(self, client: Client, status: StatusUpdate) -> None:
        client.leases = status.v is not None
        if client.leases:
            client.pool, client.capacity = status.pool, status.capacity
            if status.session != client.session:
                self._lose(client, client.held, "started anew")
                client.session = status.session
            self._lose(client, client.prolong(status.running, self.lease), "does not have it")
            if unknown := [lease for lease in status.running if lease not in client.held]:
                client.say(CancelEpisodes(leases=unknown))
        client.state = status.status
        if status.status == "left":
            self._lose(client, client.held, "has left")
        if status.status == "connected":
            log.info("worker %s takes %d at a time", client.client_id, client.capacity)
            self._tell_model(client)
        self.gate(client.pool).admit()

    def _take_results(self, client: Client, message: EpisodeResult) -> None:
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
            client.say(Ack(leases=acked, stale=stale))

    def _lose(self, client: Client, leases: Iterable[str], why: str) -> None:
        """Take these leases from a worker that will not end them."""
        taken = [client.release(lease) for lease in list(leases)]
        lost = [pending for pending in taken if pending is not None and not pending.outcome.done()]
        said = f"worker {client.client_id} {why}"
        if lost:
            log.warning("%s: %d episodes go to others", said, len(lost))
        for pending in lost:
            client.lost += 1
            pending.attempts += 1
            if not pending.again:
                pending.outcome.set_exception(RolloutLost(said))
            elif pending.attempts >= ATTEMPTS:
                error = f"{ATTEMPTS} workers were lost with it; the last: {said}"
                pending.outcome.set_result({"episode_id": pending.episode_id, "error": error})
            else:
                self.training_queue.appendleft(pending)
        self._assign_soon()

    async def _sweep(self) -> None:
        """Take what silent workers hold; forget those that are gone for long."""
        pause = self.lease / 8
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            late = time.monotonic() - began - pause
            for client in list(self._clients.values()):
                client.forgive(late)  # while this loop was held up, nobody could be heard
                if client.leases and (ended := client.ended()):
                    client.state = "silent"  # until it says something: it gets nothing more
                    self._lose(client, ended, f"was silent for {self.lease:g} seconds")
                if client.socket is None and not client.held and client.last_seen < time.time() - 10 * self.lease:
                    del self._clients[client.client_id]
            self._lose_hopeless()

    def _lose_hopeless(self) -> None:
        """Take runs out of the queue that no worker is there for: their time is counted, and it is not the agent's."""
        late = time.monotonic() - self.lease
        for pending in [it for it in self.training_queue if not it.again and it.queued < late]:
            if not self._capacity(pending.pool):
                self.training_queue.remove(pending)
                pending.outcome.set_exception(RolloutLost(f"no worker of pool {pending.pool} was there to take it"))

    def _give_up(self, pending: Pending) -> None:
        """Forget an episode that nobody waits for."""
        if pending in self.training_queue:
            self.training_queue.remove(pending)
        if (client := pending.holder) is not None:
            client.release(pending.lease)
            if client.leases:
                client.say(CancelEpisodes(leases=[pending.lease]))
            self._assign_soon()

    def _queue(self, pending: Pending) -> None:
        self.training_queue.append(pending)
        self._assign_soon()

    def _assign_soon(self) -> None:
        """Hand out at the loop's next turn, so that what is queued together is sent together."""
        if not self._assigning and self.training_queue:
            self._assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        """Give waiting episodes to the workers with free places, in turns."""
        self._assigning = False
        ready: dict[str, deque[Client]] = defaultdict(deque)
        for client in self._clients.values():
            if client.free > 0:
                ready[client.pool].append(client)
        given: dict[Client, list[Episode]] = defaultdict(list)
        left: deque[Pending] = deque()
        while self.training_queue:
            pending = self.training_queue.popleft()
            if not ready[pending.pool]:
                left.append(pending)
                continue
            client = ready[pending.pool].popleft()
            lease = client.grant(pending, self.lease)
            given[client].append(Episode.model_validate({**pending.body, "lease": lease}))
            if client.free > 0:
                ready[pending.pool].append(client)
        self.training_queue = left
        for client, episodes in given.items():
            client.say(TrainEpisodes(client_id=client.client_id, episodes=episodes, lease_seconds=self.lease))

    def _capacity(self, pool: str) -> int:
        # What a worker holds counts though it is away or leaves: whoever runs that has a place already, and takes nobody else's.
        return sum(max(it.places, len(it.held)) for it in self._clients.values() if it.pool == pool)

    def _held(self) -> list[Pending]:
        return [pending for client in self._clients.values() for pending in client.held.values()]

    def _keep_result(self, outcome: asyncio.Future[dict[str, Any]]) -> None:
        if not outcome.cancelled():
            result = outcome.result()
            client_id = result.pop("client_id", None)
            self.results_queue.append({"type": "episode_result", "results": [result], "client_id": client_id})

    def _tell_model(self, client: Client) -> None:
        if self._model_state is not None and client.socket is not None and client.leases:
            client.version = self._model_state.version
            client.say(UpdateModel(model_state=self._model_state))


class _AsGiven(BaseModel, extra="allow"):
    """A message as the caller made it."""
