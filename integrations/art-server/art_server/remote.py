"""A run that another machine holds: ``collect``, ``score``, ``learn`` as ``open_run`` has them. Knows nothing about sockets."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from rich.progress import Progress
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from art_core import scoring
from art_core.attribution import exempt
from art_core.config import check_tasks
from art_core.errors import ArtError, CaptureError, ConfigError
from art_core.loop.display import Output
from art_core.loop.rewards import reward_name, score_all
from art_core.loop.rollout import task_id, task_input
from art_core.redaction import without_keys
from art_core.store.values import from_json, to_json
from art_core.types import Group, GroupReward, Reward, Sampling
from art_server.client import LOST, NO_USER, TrainingClient
from art_server.loops import loop_beside
from art_server.settings import load_settings
from art_server.wire import group_from_wire, scores_to_wire

AT_A_TIME = 8
"""Groups fetched."""
WAIT = 20.0
"""Seconds that the server holds a question back until a job has ended."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=WAIT + 60)
"""Not of a whole answer: a group with its tokens may be large, and the way slow."""
STARTING = 60.0
"""Seconds that a server may take to start, where it is asked for the first time."""
PATIENCE = 600.0
"""Seconds that a server may be away, for a restart say, before a call gives up."""


class ServerError(ArtError):
    """The server refused a request, or a job there failed."""


class RemoteRun:
    """A server's run; opened and closed by ``async with``."""

    def __init__(self, url: str, *, token: str | None, workers: int, patience: float, progress: bool) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no server's address; give one such as http://127.0.0.1:8000")
        if "@" in urlsplit(url).netloc:
            raise ConfigError(NO_USER)
        self.url, self._token, self._workers, self._patience = url.rstrip("/"), token, workers, patience
        self._progress = progress
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> RemoteRun:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=TIMEOUT)
        try:
            await self._ask("GET", "/status", patience=min(self._patience, STARTING))
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def status(self) -> dict[str, Any]:
        """Return the server in numbers: ``step``, ``active_clients``, ``episodes_queued``, ``results_available``, ``run``."""
        return await self._ask("GET", "/status")

    async def collect(
        self,
        agent: object,
        tasks: Sequence[Any],
        *,
        group_size: int | None = None,
        split: str = "train",
        sampling: Sampling | None = None,
        to_input: Callable[[Any], Any] = task_input,
        to_output: Callable[[Any], Any] | None = None,
        step: int | None = None,
        allow_no_calls: bool = False,
        pool: str = "default",
        key: str | None = None,
    ) -> list[Group]:
        """Run an agent ``group_size`` times on every task and return a group per task, in order; see ``Run.collect``.

        ``agent`` None: the workers of ``pool`` run theirs (``art worker``). Otherwise this process runs it, its model calls
        going to the server. ``key`` names the collection: after a failure here, the same call with the same key finds what
        was done; without one, the server gives up a collection that is cancelled here. ``to_output`` is applied here, to
        what came back.
        """
        check_tasks(tasks)
        for task in tasks:
            task_id(task)  # raises for what JSON cannot say
        nameless, key, here = key is None, key or uuid.uuid4().hex, None
        async with AsyncExitStack() as stack:
            if agent is not None:
                # By the key, so that the same call from a script that was started again asks for the same.
                pool = f"here-{task_id(key)}"
                here = await stack.enter_async_context(self._working(agent, pool))
            request = {
                "kind": "collect", "tasks": list(tasks), "group_size": group_size, "split": split, "step": step,
                "inputs": None if to_input is task_input else [to_input(task) for task in tasks],
                "sampling": None if sampling is None else asdict(sampling), "pool": pool, "allow_no_calls": allow_no_calls,
            }  # fmt: skip
            bar = stack.enter_context(Progress(console=Output(stderr=True), transient=True, disable=not self._progress))
            task = bar.add_task("rollouts on the server", total=None)
            job = self._job(key, request, lambda finished, total: bar.update(task, completed=finished, total=total))
            try:
                await (job if here is None else self._while_working(here, job))
            except asyncio.CancelledError:
                if nameless:
                    with suppress(ServerError):  # it is away, or has ended it: nobody can say it better
                        await asyncio.shield(self._ask("DELETE", f"/api/jobs/{key}", patience=0))
                raise
        groups = await self._groups(key, len(tasks))
        return groups if to_output is None else [_with_outputs(group, to_output) for group in groups]

    async def score(self, groups: Sequence[Group], reward: str | Reward | GroupReward) -> list[Group]:
        """Return the groups with rewards and advantages; what was scored is stored on the server.

        A name is a reward of the server's; anything else is called here.
        """
        if isinstance(reward, str):
            ids = [[t.rollout_id for t in group.trajectories] for group in groups]
            request: dict[str, Any] = {"kind": "score", "groups": ids, "reward": reward}
        else:
            with exempt():
                groups = await score_all(groups, lambda group: scoring.score(group, reward), lambda group: group)
            scores = [scores_to_wire(group)["trajectories"] for group in groups]
            request = {"kind": "scores", "groups": scores, "by": reward_name(reward)}
        result = await self._job(uuid.uuid4().hex, request)
        return [_scored(group, told) for group, told in zip(groups, result["groups"], strict=True)]

    async def learn(self, groups: Sequence[Group], *, key: str | None = None) -> dict[str, float]:
        """Take one optimizer step on the groups that have contrast, serve the new weights, and return metrics."""
        told = [scores_to_wire(group) for group in groups]
        result = await self._job(key or uuid.uuid4().hex, {"kind": "learn", "groups": told})
        return result["metrics"]

    @asynccontextmanager
    async def _working(self, agent: object, pool: str):
        """Be a worker of a pool of one's own meanwhile; yield the work."""
        worker = TrainingClient(
            f"here-{uuid.uuid4().hex[:12]}", self.url, agent=agent, token=self._token, workers=self._workers, pool=pool,
            agent_loop=asyncio.get_running_loop(),
        )  # fmt: skip
        with loop_beside("art-worker") as loop:
            work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(worker.run(), loop))
            try:
                yield work
            finally:
                work.cancel()
                await asyncio.wait([asyncio.wrap_future(asyncio.run_coroutine_threadsafe(worker.close(), loop))])

    async def _while_working(self, work: asyncio.Future[None], job: Coroutine[Any, Any, Any]) -> None:
        """Await ``job``, which needs the worker here; raise why that ended, where it does not last as long."""
        doing = asyncio.create_task(job)
        try:
            await asyncio.wait([doing, work], return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                work.result()
                raise ServerError(f"{self.url} told the worker in this process to end, and nobody else runs this agent")
            doing.result()
        finally:
            doing.cancel()
            await asyncio.wait([doing])

    async def _job(
        self, key: str, request: dict[str, Any], on_rollout: Callable[[int, int], None] = lambda finished, total: None
    ) -> dict[str, Any]:
        path = f"/api/jobs/{quote(key, safe='')}"
        wait = 1 if request["kind"] == "collect" else WAIT  # a collection tells how far it is
        state = await self._ask("PUT", path, request)
        while state["state"] == "running":
            state = await self._ask("GET", f"{path}?wait={wait}")
            on_rollout(state["finished"], state["total"])
        if state["state"] == "failed":
            kind, _, text = state["error"].partition(": ")
            raise (CaptureError if kind == "CaptureError" else ServerError)(f"{self.url}: {text or kind}")
        return state["result"]

    async def _groups(self, key: str, count: int) -> list[Group]:
        gate = asyncio.Semaphore(AT_A_TIME)

        async def fetch(place: int) -> Group:
            async with gate:
                return group_from_wire(await self._ask("GET", f"/api/jobs/{quote(key, safe='')}/groups/{place}"))

        return list(await asyncio.gather(*(fetch(place) for place in range(count))))

    async def _ask(self, method: str, path: str, body: Any = None, *, patience: float | None = None) -> Any:
        """Ask, again while the server is away: every request of ours may be sent twice."""
        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.2, max=10), retry=retry_if_exception_type((*LOST, _Away)),
            stop=stop_after_delay(self._patience if patience is None else patience), reraise=True,
        )  # fmt: skip
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._once(method, path, body)
        except LOST as error:
            raise ServerError(
                f"{self.url} cannot be reached ({type(error).__name__}: {error}); is art serve running?"
            ) from None  # what is below says no more

    async def _once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else to_json(body)
        headers = {"content-type": "application/json"}
        async with self._http.request(method, self.url + path, data=data, headers=headers) as answer:
            told = await answer.read()
            if answer.status in (502, 503, 504):
                raise _Away(f"{self.url}{path} answered {answer.status}")
            if answer.status == 401:
                raise ConfigError(f"{self.url} wants another token: connect(url, token=...)")
            if answer.status == 404 and path == "/status":
                raise ConfigError(f"{self.url} answers, but is not the address of art serve")
            if answer.status >= 400:
                raise ServerError(f"{method} {path} was refused ({answer.status}): {self._shown(told)[:2000]}")
            try:
                return from_json(told)
            except ValueError:
                raise ServerError(
                    f"{method} {self.url}{path} was answered with what is no JSON: {self._shown(told)[:200]!r}"
                ) from None

    def _shown(self, told: bytes) -> str:
        """Return what was answered without our token, which what stands before a server may say back."""
        return without_keys(told.decode(errors="replace"), self._token)


class _Away(ServerError):
    """Something before the server answered that it is not there."""


def connect(
    url: str, *, token: str | None = None, workers: int = 64, patience: float = PATIENCE, progress: bool = True
) -> RemoteRun:
    """Return the run of the server at ``url``, ``http://HOST:PORT``, to open with ``async with``.

    ``workers``: runs of an agent at a time that this process makes, where ``collect`` is given one. ``patience``: seconds
    that the server may be away before a call raises ServerError. ``token`` None: ``ART_SERVER_TOKEN`` of the environment or
    ``.env``, where that is set.
    """
    known = load_settings().server_token
    token = token or (known.get_secret_value() if known else None)
    return RemoteRun(url, token=token, workers=workers, patience=patience, progress=progress)


def _scored(group: Group, told: dict[str, Any]) -> Group:
    runs = []
    for trajectory, given in zip(group.trajectories, told["trajectories"], strict=True):
        rewards = given["call_rewards"]
        calls = tuple(replace(call, reward=rewards.get(str(index))) for index, call in enumerate(trajectory.calls))
        kept = {name: given[name] for name in ("reward", "metrics", "notes")}
        runs.append(replace(trajectory, calls=calls, **kept))
    by_call = tuple(map(tuple, told["call_advantages"]))
    return replace(group, trajectories=tuple(runs), advantages=tuple(told["advantages"]), call_advantages=by_call)


def _with_outputs(group: Group, to_output: Callable[[Any], Any]) -> Group:
    runs = [t if t.error else replace(t, output=to_output(t.output)) for t in group.trajectories]
    return replace(group, trajectories=tuple(runs))
