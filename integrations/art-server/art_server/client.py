"""A worker: connects to a server, runs the episodes that it is given, and sends what came of them until it is acknowledged.

Knows nothing about how an agent is adapted or where a rollout's calls go.
"""

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

from art_core.errors import ArtError, ConfigError, StoreError
from art_core.redaction import describe_error
from art_core.store.values import from_json, to_json
from art_server import messages
from art_server.clients import REPLACED
from art_server.episodes import ClassicEpisodes, RecordedAgent
from art_server.messages import MAX_MESSAGE, MOST_RESULTS, SESSION, Episode, Result, read, write
from art_server.weights import fetch_checkpoint

log = logging.getLogger("art_server.worker")

HEARTBEAT = 10.0
"""Seconds; a third of the lease where the server says one that is shorter."""
PING = 10.0
"""Seconds between two pings of the connection; one that is not answered in half of it is lost."""
PAUSE = 15.0
"""Seconds, the longest between two attempts to connect."""
HANDSHAKE = 15.0
"""Seconds that connecting may take at first, and twice as long at every further attempt, up to ``LONGEST``: where a busy server
takes longer for a thousand at once, it would otherwise be asked by all of them again and again, and answer nobody in time."""
LONGEST = 120.0
BRIEF = 5.0
"""Seconds; after a connection that was lost sooner a worker pauses, so that it does not knock without end."""
NO_USER = "the server's address has a user or password in it, which would stand in logs and messages; give the token as token="
LOST = (aiohttp.ClientError, OSError, TimeoutError)


class WorkerReplaced(ArtError):
    """Another process has connected under this worker's name."""


class TrainingClient:
    """A worker named ``client_id`` of the server at ``server_url`` (``ws://HOST:PORT``, ``wss://`` with TLS).

    ``agent`` is what ``train`` takes; without one it runs classic episodes, ``Agent`` in ``Environment``, with one of
    ``models``. ``await run()`` works until the server says shutdown; ``connect`` and ``handle_server_messages`` are one
    connection of it. ``agent_loop`` is the running event loop, of another thread, in which the agent runs; None: this one's.
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
            raise ConfigError(f"{server_url!r} is no server's address; give one such as ws://127.0.0.1:8000")
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
        """Which weights the server serves, as it last said."""
        self.status = "idle"
        self.finished = 0
        """Episodes that ended here."""
        self._recorded = None if agent is None else RecordedAgent(agent, self.http_url, token, agent_loop)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session_id = uuid.uuid4().hex
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unacknowledged: dict[str, Result] = {}
        self._cuts = 0
        """How often a connection was lost."""
        self._heartbeat = HEARTBEAT
        self._sooner = asyncio.Event()
        """Set where the heartbeat is too slow for the server's lease."""

    @property
    def connected(self) -> bool:
        return self.websocket is not None and not self.websocket.closed

    async def run(self) -> None:
        """Work until the server says shutdown or ``leave`` is done, over as many connections as it takes.

        Raises ConfigError where the server refuses this worker, WorkerReplaced where another has taken its name.
        """
        try:
            ended = False
            while not ended:
                # Away from the server's restart: many workers come back at once.
                pause = wait_random_exponential(multiplier=0.5, max=PAUSE)
                async for attempt in AsyncRetrying(
                    wait=pause, retry=retry_if_exception_type(LOST), before_sleep=_say_why
                ):
                    with attempt:
                        await self.connect(HANDSHAKE * 2 ** (attempt.retry_state.attempt_number - 1))
                begun = time.monotonic()
                ended = await self.handle_server_messages()
                if not ended and time.monotonic() - begun < BRIEF:
                    await asyncio.sleep(random.uniform(0, 1))
        finally:
            await self.close()

    async def connect(self, seconds: float = HANDSHAKE) -> None:
        """Connect within ``seconds``, say who this is, and send again what was not acknowledged."""
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(min(seconds, LONGEST)):
                self.websocket = await self._http.ws_connect(
                    self.server_url, heartbeat=PING, max_msg_size=MAX_MESSAGE, headers={SESSION: self._session_id},
                    timeout=aiohttp.ClientWSTimeout(ws_close=5),
                )  # fmt: skip
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403, 404, 421):
                token = "it wants another token: --token, or ART_SERVER_TOKEN"
                why = token if error.status == 401 else "is it the address of art serve?"
                raise ConfigError(f"{self.server_url} refused this worker (HTTP {error.status}): {why}") from error
            raise
        log.info("connected to %s as %s", self.http_url, self.client_id)
        await self._say_status("leaving" if self.status == "leaving" else "connected")
        await self._send_results(list(self._unacknowledged))

    async def handle_server_messages(self) -> bool:
        """Do what the server says until the connection ends; return whether there is nothing more to come."""
        assert self.websocket is not None, "connect() first"
        socket, beating = self.websocket, asyncio.create_task(self._beat(self.websocket))
        try:
            async for told in socket:
                if told.type is aiohttp.WSMsgType.TEXT and await self._handle(told.data):
                    return True
        except LOST as error:
            log.info("the connection broke: %s", describe_error(error))
        finally:
            beating.cancel()
            self._cuts += 1
        if socket.close_code == REPLACED:
            raise WorkerReplaced(
                f"another worker has connected to {self.http_url} as {self.client_id!r}; give each one an --id of its own"
            )
        log.info("disconnected (%s); %d episodes go on", socket.close_code, len(self._running))
        return self.status == "leaving" and not (self._running or self._unacknowledged)

    async def leave(self) -> None:
        """Take no more episodes; return when those that run have ended and are acknowledged."""
        self.status = "leaving"
        await self._say_status()
        while self._running or self._unacknowledged:
            await asyncio.sleep(0.05)
        log.info("every run has ended and arrived, %d in all", self.finished)
        if self.websocket is not None:
            await self._say_status("left")
            await self.websocket.close()

    async def close(self) -> None:
        """Give up what runs, say so, and close the connection."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self.websocket is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._say_status("left"), 2)
            await self.websocket.close()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def send_message(self, message: dict[str, Any]) -> None:
        """Send a message as it is."""
        await self._send(to_json(message).decode())

    async def process_episodes(self, episodes: Iterable[Episode | dict[str, Any]]) -> None:
        """Run episodes, all at the same time; their results are sent as each one ends. Returns when they are begun."""
        for given in episodes:
            episode = given if isinstance(given, Episode) else Episode.model_validate(given)
            lease = episode.lease or episode.episode_id
            if lease not in self._running and lease not in self._unacknowledged:
                self._running[lease] = asyncio.create_task(self._process(lease, episode))

    async def run_episode(self, episode_config: dict[str, Any]) -> dict[str, Any]:
        """Run a classic episode: ``Agent(model_name)`` in ``Environment(env_config)``."""
        return await self._classic(episode_config)

    async def update_model(self, model_state: dict[str, Any]) -> None:
        """Note which weights are served: ``version``, and the ``url`` of their files, which ``fetch_model`` copies."""
        self.model_state = model_state

    async def fetch_model(self, folder: str | Path) -> Path:
        """Copy the newest checkpoint into ``folder`` and return where it is; for agents that want the weights themselves.

        Raises StoreError where there is none yet.
        """
        url = (self.model_state or {}).get("url")
        if url is None or self._http is None:
            raise StoreError("the server has told of no checkpoint yet; the first is written after the first step")
        return await fetch_checkpoint(self._http, self.http_url, url, Path(folder))

    async def _handle(self, text: str) -> bool:
        """Do what one message says; return whether it was the last."""
        try:
            message = read(text, "server")
        except messages.BadMessage as error:
            log.warning("%s said what is no message: %s", self.http_url, error)
            return False
        if isinstance(message, messages.TrainEpisodes):
            await self._take(message)
        elif isinstance(message, messages.CancelEpisodes | messages.Ack):
            self._drop(message)
        elif isinstance(message, messages.UpdateModel):
            await self.update_model(message.model_state.model_dump())
        elif isinstance(message, messages.ErrorMessage):
            log.error("%s: %s", self.http_url, message.message)
        return isinstance(message, messages.Shutdown)

    async def _take(self, message: messages.TrainEpisodes) -> None:
        heartbeat, self._heartbeat = self._heartbeat, min(HEARTBEAT, (message.lease_seconds or 3 * HEARTBEAT) / 3)
        if self._heartbeat < heartbeat:
            self._sooner.set()
        await self.process_episodes(message.episodes)

    def _drop(self, message: messages.CancelEpisodes | messages.Ack) -> None:
        for lease in message.leases:
            self._unacknowledged.pop(lease, None)
            if (task := self._running.get(lease)) is not None and isinstance(message, messages.CancelEpisodes):
                task.cancel()

    async def _process(self, lease: str, episode: Episode) -> None:
        cuts = self._cuts
        try:
            result = await self._result(episode)
            if result.error and not result.capture_error and not result.lost:
                result.lost = not await self._reaches_server() or self._cuts != cuts
        finally:
            self._running.pop(lease, None)
        self.finished += 1
        self._unacknowledged[lease] = result
        await self._send_results([lease])

    async def _result(self, episode: Episode) -> Result:
        if episode.rollout is not None:
            if self._recorded is not None:
                return await self._recorded(episode)
            error = "the server wants an agent run, and this worker was given none; start it with --agent FILE.py:NAME"
            return Result(episode_id=episode.episode_id, lease=episode.lease, error=error, capture_error=True)
        try:
            told = await self.run_episode(episode.model_dump(exclude={"lease", "rollout", "input"}))
            return Result.model_validate({**from_json(to_json(told)), "lease": episode.lease})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            return Result(episode_id=episode.episode_id, lease=episode.lease, error=describe_error(error))

    async def _reaches_server(self) -> bool:
        """Whether the server answers: an agent that failed because it does not says nothing about itself."""
        assert self._http is not None
        try:
            async with self._http.get(f"{self.http_url}/status", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status < 500
        except LOST:
            return False

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while not socket.closed:
            self._sooner.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), self._heartbeat)
            await self._say_status()

    async def _say_status(self, status: str | None = None) -> None:
        held = [*self._running, *self._unacknowledged]
        if self.status != "leaving":
            self.status = "running" if held else "idle"
        told = messages.StatusUpdate(
            v=messages.VERSION, client_id=self.client_id, status=status or self.status, session=self._session_id,
            capacity=self.workers, pool=self.pool, running=held,
        )  # fmt: skip
        await self._send(write(told))

    async def _send_results(self, leases: list[str]) -> None:
        results = [self._unacknowledged[lease] for lease in leases if lease in self._unacknowledged]
        for part in _parts(results):
            await self._send(write(messages.EpisodeResult(v=messages.VERSION, client_id=self.client_id, results=part)))

    async def _send(self, text: str) -> None:
        """Send a text; where the connection is lost it is said again in the next, whatever it was."""
        if self.websocket is None or self.websocket.closed:
            return
        try:
            await self.websocket.send_str(text)
        except LOST as error:
            log.info("not sent: %s", describe_error(error))


def _parts(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Yield the results in parts that fit into a message each."""
    part: list[Result] = []
    room = MAX_MESSAGE // 2
    for result in results:
        size = len(write(result)) if len(results) > 1 else 0
        if part and (size > room or len(part) == MOST_RESULTS):
            yield part
            part, room = [], MAX_MESSAGE // 2
        part.append(result)
        room -= size
    if part:
        yield part


def _say_why(state: Any) -> None:
    pause = state.next_action.sleep if state.next_action else 0
    log.warning("cannot connect (%s); again in %.1f s", describe_error(state.outcome.exception()), pause)
