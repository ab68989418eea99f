"""A worker: connects to a server, runs the episodes that it gets, and sends their results until they are acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from art_core.errors import ArtError, ConfigError, StoreError, failure_of
from art_core.plugin_api import describe_error
from art_core.store.values import from_json, to_json
from art_server import messages
from art_server.clients import REPLACED
from art_server.episodes import ClassicEpisodes, RecordedAgent
from art_server.messages import MAX_MESSAGE, MAX_RESULTS, SESSION, Episode, Result, read, write
from art_server.weights import fetch_checkpoint

log = logging.getLogger("art_server.worker")

HEARTBEAT = 10.0
"""Seconds between two status updates; a third of the lease if that is shorter."""
PING = 10.0
"""Seconds between two pings; a connection without an answer within half of that is lost."""
MAX_PAUSE = 15.0
"""Seconds between two attempts to connect, at most."""
HANDSHAKE_TIMEOUT = 15.0
"""Seconds for the first attempt to connect; doubled for each further one up to ``MAX_HANDSHAKE_TIMEOUT``. With a fixed timeout, a
thousand workers that reconnect to a busy server would all keep timing out and retrying."""
MAX_HANDSHAKE_TIMEOUT = 120.0
BRIEF = 5.0
"""Seconds; a worker pauses after a shorter connection, so that it doesn't reconnect in a tight loop."""
NO_USER = "the server's address contains a user or password, which would appear in logs and messages; pass the token as token="
LOST = (aiohttp.ClientError, OSError, TimeoutError)


class WorkerReplaced(ArtError):
    """Another process has connected under this worker's name."""


class TrainingClient:
    """A worker named ``client_id`` of the server at ``server_url`` (``ws://HOST:PORT``, ``wss://`` with TLS).

    ``agent`` is an agent as for ``train``. Without one, the worker runs classic episodes (``Agent`` in ``Environment``) with one
    of ``models``. ``workers`` is the number of concurrent episodes. ``await run()`` works until the server shuts the worker down,
    over several connections if necessary; ``connect`` and ``handle_server_messages`` are one connection. ``agent_loop`` is the
    running event loop of another thread, in which the agent runs; None: the current loop.

    Raises ConfigError for an invalid ``server_url``.
    """

    def __init__(
        self,
        client_id: str,
        server_url: str = "ws://localhost:8000",
        *,
        agent: object = None,
        token: str | None = None,
        workers: int = 4,
        pool: str = "default",
        models: Collection[str] = ("tiny",),
        agent_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        parts = urlsplit(server_url)
        if parts.scheme not in ("ws", "wss", "http", "https") or not parts.netloc:
            raise ConfigError(f"{server_url!r} isn't the address of a server; pass one such as ws://127.0.0.1:8000")
        if "@" in parts.netloc:
            raise ConfigError(NO_USER)
        secure = parts.scheme in ("wss", "https")
        base = parts.netloc + parts.path.rstrip("/")
        self.client_id, self.workers, self.pool = client_id, workers, pool
        self.server_url = f"{'wss' if secure else 'ws'}://{base}/ws/{quote(client_id, safe='')}"
        self.http_url = f"{'https' if secure else 'http'}://{base}"
        self.websocket: aiohttp.ClientWebSocketResponse | None = None
        self._classic = ClassicEpisodes(models)
        self.model_state: dict[str, Any] | None = None
        """The weights that the server serves, from its last message."""
        self.status = "idle"
        self.finished = 0
        """Episodes that this worker has finished."""
        self._recorded = None if agent is None else RecordedAgent(agent, self.http_url, token, agent_loop)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session_id = uuid.uuid4().hex
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unacknowledged: dict[str, Result] = {}
        self._disconnects = 0
        """Connections lost so far."""
        self._heartbeat = HEARTBEAT
        self._heartbeat_shortened = asyncio.Event()
        """Set when the server's lease needs a shorter heartbeat."""

    @property
    def connected(self) -> bool:
        return self.websocket is not None and not self.websocket.closed

    async def run(self) -> None:
        """Work until the server shuts this worker down or ``leave`` is done, reconnecting as often as necessary.

        Raises ConfigError if the server refuses this worker, WorkerReplaced if another worker has connected under its name.
        """
        try:
            ended = False
            while not ended:
                # Random, because many workers reconnect at once when the server restarts.
                pause = wait_random_exponential(multiplier=0.5, max=MAX_PAUSE)
                async for attempt in AsyncRetrying(
                    wait=pause, retry=retry_if_exception_type(LOST), before_sleep=_log_retry
                ):
                    # The exponent is bounded, because after a long outage the power would overflow a float.
                    doubled = min(attempt.retry_state.attempt_number - 1, 16)
                    with attempt:
                        await self.connect(HANDSHAKE_TIMEOUT * 2**doubled)
                connected = time.monotonic()
                ended = await self.handle_server_messages()
                if not ended and time.monotonic() - connected < BRIEF:
                    await asyncio.sleep(random.uniform(0, 1))
        finally:
            await self.close()

    async def connect(self, seconds: float = HANDSHAKE_TIMEOUT) -> None:
        """Connect within ``seconds``, send this worker's status, and send unacknowledged results again."""
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(min(seconds, MAX_HANDSHAKE_TIMEOUT)):
                self.websocket = await self._http.ws_connect(
                    self.server_url, heartbeat=PING, max_msg_size=MAX_MESSAGE, headers={SESSION: self._session_id},
                    timeout=aiohttp.ClientWSTimeout(ws_close=5),
                )  # fmt: skip
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403, 404, 421):
                hint = "missing or wrong token: set --token or ART_SERVER_TOKEN"
                if error.status != 401:
                    hint = "is it the address of art serve?"
                raise ConfigError(f"{self.server_url} refused this worker (HTTP {error.status}): {hint}") from error
            raise
        log.info("connected to %s as %s", self.http_url, self.client_id)
        await self._send_status("leaving" if self.status == "leaving" else "connected")
        await self._send_results(list(self._unacknowledged))

    async def handle_server_messages(self) -> bool:
        """Handle the server's messages until the connection ends; return whether this worker is done."""
        assert self.websocket is not None, "connect() first"
        socket, heartbeat = self.websocket, asyncio.create_task(self._send_heartbeats(self.websocket))
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT and await self._handle(message.data):
                    return True
        except LOST as error:
            log.info("lost the connection: %s", describe_error(error))
        finally:
            heartbeat.cancel()
            self._disconnects += 1
        if socket.close_code == REPLACED:
            raise WorkerReplaced(
                f"another worker has connected to {self.http_url} as {self.client_id!r}; start each worker with its own --id"
            )
        log.info("disconnected (%s); %d rollouts continue", socket.close_code, len(self._running))
        return self.status == "leaving" and not (self._running or self._unacknowledged)

    async def leave(self) -> None:
        """Accept no more episodes; return when the running ones have finished and are acknowledged."""
        self.status = "leaving"
        await self._send_status()
        while self._running or self._unacknowledged:
            await asyncio.sleep(0.05)
        log.info("all rollouts have finished and are acknowledged, %d in total", self.finished)
        if self.websocket is not None:
            await self._send_status("left")
            await self.websocket.close()

    async def close(self) -> None:
        """Abort the running episodes, notify the server, and close the connection."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self.websocket is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._send_status("left"), 2)
            await self.websocket.close()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def send_message(self, message: dict[str, Any]) -> None:
        """Send a message unchanged."""
        await self._send(to_json(message).decode())

    async def process_episodes(self, episodes: Iterable[Episode | dict[str, Any]]) -> None:
        """Start episodes, all at the same time, and return; each result is sent when its episode ends."""
        for item in episodes:
            episode = item if isinstance(item, Episode) else Episode.model_validate(item)
            lease = episode.lease or episode.episode_id
            if lease not in self._running and lease not in self._unacknowledged:
                self._running[lease] = asyncio.create_task(self._process(lease, episode))

    async def run_episode(self, episode_config: dict[str, Any]) -> dict[str, Any]:
        """Run a classic episode: ``Agent(model_name)`` in ``Environment(env_config)``."""
        return await self._classic(episode_config)

    async def update_model(self, model_state: dict[str, Any]) -> None:
        """Store which weights are served: their ``version``, and the ``url`` of their files for ``fetch_model``."""
        self.model_state = model_state

    async def fetch_model(self, folder: str | Path) -> Path:
        """Copy the newest checkpoint to a folder in ``folder`` and return its path, for agents that need the weights themselves.

        Raises StoreError if there is none yet.
        """
        url = (self.model_state or {}).get("url")
        if url is None or self._http is None:
            raise StoreError("the server has no checkpoint yet; the first is written after the first step")
        return await fetch_checkpoint(self._http, self.http_url, url, Path(folder))

    async def _handle(self, text: str) -> bool:
        """Handle one message; return whether it was the last."""
        try:
            message = read(text, "server")
        except messages.BadMessage as error:
            log.warning("bad message from %s: %s", self.http_url, error)
            return False
        if isinstance(message, messages.TrainEpisodes):
            await self._start(message)
        elif isinstance(message, messages.CancelEpisodes | messages.Ack):
            self._release(message)
        elif isinstance(message, messages.UpdateModel):
            await self.update_model(message.model_state.model_dump())
        elif isinstance(message, messages.ErrorMessage):
            log.error("%s: %s", self.http_url, message.message)
        return isinstance(message, messages.Shutdown)

    async def _start(self, message: messages.TrainEpisodes) -> None:
        heartbeat, self._heartbeat = self._heartbeat, min(HEARTBEAT, (message.lease_seconds or 3 * HEARTBEAT) / 3)
        if self._heartbeat < heartbeat:
            self._heartbeat_shortened.set()
        await self.process_episodes(message.episodes)

    def _release(self, message: messages.CancelEpisodes | messages.Ack) -> None:
        for lease in message.leases:
            self._unacknowledged.pop(lease, None)
            if (task := self._running.get(lease)) is not None and isinstance(message, messages.CancelEpisodes):
                task.cancel()

    async def _process(self, lease: str, episode: Episode) -> None:
        disconnects = self._disconnects
        try:
            result = await self._result(episode)
            if result.error and not result.capture_error and not result.lost:
                result.lost = not await self._reaches_server() or self._disconnects != disconnects
        finally:
            self._running.pop(lease, None)
        self.finished += 1
        self._unacknowledged[lease] = result
        await self._send_results([lease])

    async def _result(self, episode: Episode) -> Result:
        if episode.rollout is not None and self._recorded is None:
            error = "the server requested a rollout, but this worker has no agent; start it with --agent FILE.py:NAME"
            return Result(episode_id=episode.episode_id, lease=episode.lease, error=error, capture_error=True)
        try:
            if episode.rollout is not None:
                return await self._recorded(episode)
            outcome = await self.run_episode(episode.model_dump(exclude={"lease", "rollout", "input"}))
            return Result.model_validate({**from_json(to_json(outcome)), "lease": episode.lease})
        except BaseException as raised:  # noqa: BLE001 - the boundary to the agent: its failures are data
            error = describe_error(failure_of(raised))
            return Result(episode_id=episode.episode_id, lease=episode.lease, error=error)

    async def _reaches_server(self) -> bool:
        """Whether the server answers. If it doesn't, an agent's failure isn't the agent's fault."""
        assert self._http is not None
        try:
            async with self._http.get(f"{self.http_url}/status", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status < 500
        except LOST:
            return False

    async def _send_heartbeats(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while not socket.closed:
            self._heartbeat_shortened.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._heartbeat_shortened.wait(), self._heartbeat)
            await self._send_status()

    async def _send_status(self, status: str | None = None) -> None:
        held = [*self._running, *self._unacknowledged]
        if self.status != "leaving":
            self.status = "running" if held else "idle"
        update = messages.StatusUpdate(
            v=messages.VERSION, client_id=self.client_id, status=status or self.status, session=self._session_id,
            capacity=self.workers, pool=self.pool, running=held,
        )  # fmt: skip
        await self._send(write(update))

    async def _send_results(self, leases: list[str]) -> None:
        results = [self._unacknowledged[lease] for lease in leases if lease in self._unacknowledged]
        for part in _parts(results):
            await self._send(write(messages.EpisodeResult(v=messages.VERSION, client_id=self.client_id, results=part)))

    async def _send(self, text: str) -> None:
        """Send a text if connected. Nothing is lost otherwise: the next connection sends status and results again."""
        if self.websocket is None or self.websocket.closed:
            return
        try:
            await self.websocket.send_str(text)
        except LOST as error:
            log.info("not sent: %s", describe_error(error))


def _parts(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Yield the results in parts that each fit into a message."""
    part: list[Result] = []
    room = MAX_MESSAGE // 2
    for result in results:
        size = len(write(result)) if len(results) > 1 else 0
        if part and (size > room or len(part) == MAX_RESULTS):
            yield part
            part, room = [], MAX_MESSAGE // 2
        part.append(result)
        room -= size
    if part:
        yield part


def _log_retry(state: Any) -> None:
    pause = state.next_action.sleep if state.next_action else 0
    log.warning("can't connect (%s); retrying in %.1f s", describe_error(state.outcome.exception()), pause)
