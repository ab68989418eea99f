"""A run on a server, with ``collect``, ``score`` and ``learn`` as in ``open_run``."""

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

from art_core import exempt, scoring
from art_core.errors import ArtError, CaptureError, ConfigError
from art_core.plugin_api import Output, check_tasks, reward_name, score_all, task_id, task_input, without_keys
from art_core.store.values import from_json, to_json
from art_core.types import Group, GroupReward, Reward, Sampling
from art_server.client import LOST, NO_USER, TrainingClient
from art_server.loops import background_loop
from art_server.settings import load_settings
from art_server.wire import group_from_wire, scores_to_wire

CONCURRENT_FETCHES = 8
"""Groups that are fetched at the same time."""
WAIT = 20.0
"""Seconds that a request for a job's state waits on the server for the job to end (long polling)."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=WAIT + 60)
"""Without a limit on the whole answer, because a group with its tokens may be large and the network slow."""
STARTUP_PATIENCE = 60.0
"""Seconds that the first request waits for a server that is starting."""
PATIENCE = 600.0
"""Seconds that a server may be unreachable, for example during a restart, before a call fails."""


class ServerError(ArtError):
    """The server refused a request, or a job there failed."""


class RemoteRun:
    """A server's run; open it with ``async with``."""

    def __init__(self, url: str, *, token: str | None, workers: int, patience: float, progress: bool) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} isn't the address of a server; pass one such as http://127.0.0.1:8000")
        if "@" in urlsplit(url).netloc:
            raise ConfigError(NO_USER)
        self.url, self._token, self._workers, self._patience = url.rstrip("/"), token, workers, patience
        self._progress = progress
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> RemoteRun:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=TIMEOUT)
        try:
            await self._request("GET", "/status", patience=min(self._patience, STARTUP_PATIENCE))
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def status(self) -> dict[str, Any]:
        """Return the server's ``run`` and counts: ``step``, ``active_clients``, ``episodes_queued``, ``results_available``."""
        return await self._request("GET", "/status")

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
        """Run an agent ``group_size`` times on every task; return one group per task, in order. See ``Run.collect``.

        If ``agent`` is None, the workers of ``pool`` run theirs (``art worker``). Otherwise this process runs it, and its model
        calls go to the server. ``key`` identifies the collection: after a failure here, the same call with the same key
        continues it. Without a key, cancelling this call also cancels the collection on the server. ``to_output`` is applied in
        this process.

        Raises ServerError if the server refuses the request, is unreachable for ``patience`` seconds, or the collection fails;
        CaptureError if calls can't be recorded.
        """
        check_tasks(tasks)
        for task in tasks:
            task_id(task)  # raises if JSON can't express the task
        has_key, key, local_worker = key is not None, key or uuid.uuid4().hex, None
        async with AsyncExitStack() as stack:
            if agent is not None:
                # Derived from the key, so that a restarted script makes the same request.
                pool = f"local-{task_id(key)}"
                local_worker = await stack.enter_async_context(self._working(agent, pool))
            request = {
                "kind": "collect", "tasks": list(tasks), "group_size": group_size, "split": split, "step": step,
                "inputs": None if to_input is task_input else [to_input(task) for task in tasks],
                "sampling": None if sampling is None else asdict(sampling), "pool": pool, "allow_no_calls": allow_no_calls,
            }  # fmt: skip
            bar = stack.enter_context(Progress(console=Output(stderr=True), transient=True, disable=not self._progress))
            task = bar.add_task("rollouts on the server", total=None)
            job = self._job(key, request, lambda finished, total: bar.update(task, completed=finished, total=total))
            try:
                await (job if local_worker is None else self._while_working(local_worker, job))
            except asyncio.CancelledError:
                if not has_key:
                    with suppress(ServerError):  # the server is unreachable, or the collection has ended
                        await asyncio.shield(self._request("DELETE", f"/api/jobs/{key}", patience=0))
                raise
        groups = await self._groups(key, len(tasks))
        return groups if to_output is None else [_with_outputs(group, to_output) for group in groups]

    async def score(self, groups: Sequence[Group], reward: str | Reward | GroupReward) -> list[Group]:
        """Return the groups with rewards and advantages; the scores are stored on the server.

        ``reward`` is the name of a reward on the server, or a reward that is called in this process.
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
        return [_scored(group, scores) for group, scores in zip(groups, result["groups"], strict=True)]

    async def learn(self, groups: Sequence[Group], *, key: str | None = None) -> dict[str, float]:
        """Make one optimizer step on the groups that have contrast, serve the new weights, and return the step's metrics."""
        scores = [scores_to_wire(group) for group in groups]
        result = await self._job(key or uuid.uuid4().hex, {"kind": "learn", "groups": scores})
        return result["metrics"]

    @asynccontextmanager
    async def _working(self, agent: object, pool: str):
        """Run a worker for ``agent`` in this process, as the only one of ``pool``; yield the worker's future."""
        worker = TrainingClient(
            f"local-{uuid.uuid4().hex[:12]}", self.url, agent=agent, token=self._token, workers=self._workers, pool=pool,
            agent_loop=asyncio.get_running_loop(),
        )  # fmt: skip
        with background_loop("art-worker") as loop:
            work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(worker.run(), loop))
            try:
                yield work
            finally:
                work.cancel()
                await asyncio.wait([asyncio.wrap_future(asyncio.run_coroutine_threadsafe(worker.close(), loop))])

    async def _while_working(self, work: asyncio.Future[None], job: Coroutine[Any, Any, Any]) -> None:
        """Await ``job``, which needs this process's worker; if the worker ends first, raise its error."""
        job_task = asyncio.create_task(job)
        try:
            await asyncio.wait([job_task, work], return_when=asyncio.FIRST_COMPLETED)
            if not job_task.done():
                work.result()
                raise ServerError(
                    f"{self.url} shut down the worker in this process, and no other worker runs this agent; call collect again"
                )
            job_task.result()
        finally:
            job_task.cancel()
            await asyncio.wait([job_task])

    async def _job(
        self, key: str, request: dict[str, Any], on_rollout: Callable[[int, int], None] = lambda finished, total: None
    ) -> dict[str, Any]:
        path = f"/api/jobs/{quote(key, safe='')}"
        wait = 1 if request["kind"] == "collect" else WAIT  # a collection's progress is shown
        state = await self._request("PUT", path, request)
        while state["state"] == "running":
            state = await self._request("GET", f"{path}?wait={wait}")
            on_rollout(state["finished"], state["total"])
        if state["state"] == "failed":
            kind, _, text = state["error"].partition(": ")
            raise (CaptureError if kind == "CaptureError" else ServerError)(f"{self.url}: {text or kind}")
        return state["result"]

    async def _groups(self, key: str, count: int) -> list[Group]:
        gate = asyncio.Semaphore(CONCURRENT_FETCHES)

        async def fetch(index: int) -> Group:
            async with gate:
                return group_from_wire(await self._request("GET", f"/api/jobs/{quote(key, safe='')}/groups/{index}"))

        return list(await asyncio.gather(*(fetch(index) for index in range(count))))

    async def _request(self, method: str, path: str, body: Any = None, *, patience: float | None = None) -> Any:
        """Send a request, and retry while the server is unreachable; all our requests may be sent twice."""
        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.2, max=10), retry=retry_if_exception_type((*LOST, _Unavailable)),
            stop=stop_after_delay(self._patience if patience is None else patience), reraise=True,
        )  # fmt: skip
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._once(method, path, body)
        except LOST as error:
            raise ServerError(
                f"can't reach {self.url} ({type(error).__name__}: {error}); is art serve running?"
            ) from None  # the traceback of the HTTP client adds nothing

    async def _once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else to_json(body)
        headers = {"content-type": "application/json"}
        async with self._http.request(method, self.url + path, data=data, headers=headers) as answer:
            content = await answer.read()
            if answer.status in (502, 503, 504):
                raise _Unavailable(f"{self.url}{path} answered {answer.status}")
            if answer.status == 401:
                raise ConfigError(f"{self.url} refused the token: pass connect(url, token=...) or set ART_SERVER_TOKEN")
            if answer.status == 404 and path == "/status":
                raise ConfigError(f"{self.url} answers, but isn't the address of art serve")
            if answer.status >= 400:
                raise ServerError(f"{method} {path} was refused ({answer.status}): {self._redacted(content)[:2000]}")
            try:
                return from_json(content)
            except ValueError:
                raise ServerError(
                    f"{method} {self.url}{path} returned invalid JSON: {self._redacted(content)[:200]!r}"
                ) from None

    def _redacted(self, content: bytes) -> str:
        """Return an answer's text without our token, which a proxy before the server may echo."""
        return without_keys(content.decode(errors="replace"), self._token)


class _Unavailable(ServerError):
    """The server, or a proxy before it, answered that the server is unavailable."""


def connect(
    url: str, *, token: str | None = None, workers: int = 64, patience: float = PATIENCE, progress: bool = True
) -> RemoteRun:
    """Return the run of the server at ``url``, ``http://HOST:PORT``; open it with ``async with``.

    ``workers``: concurrent rollouts in this process, if ``collect`` gets an agent. ``patience``: seconds that the server may be
    unreachable before a call raises ServerError. ``token`` None: ``ART_SERVER_TOKEN`` from the environment or ``.env``, if set.
    ``progress``: show a progress bar. Raises ConfigError for an invalid ``url``.
    """
    default = load_settings().server_token
    token = token or (default.get_secret_value() if default else None)
    return RemoteRun(url, token=token, workers=workers, patience=patience, progress=progress)


def _scored(group: Group, scores: dict[str, Any]) -> Group:
    trajectories = []
    for trajectory, score in zip(group.trajectories, scores["trajectories"], strict=True):
        rewards = score["call_rewards"]
        calls = tuple(replace(call, reward=rewards.get(str(index))) for index, call in enumerate(trajectory.calls))
        fields = {name: score[name] for name in ("reward", "metrics", "notes")}
        trajectories.append(replace(trajectory, calls=calls, **fields))
    return replace(
        group,
        trajectories=tuple(trajectories),
        advantages=tuple(scores["advantages"]),
        call_advantages=tuple(map(tuple, scores["call_advantages"])),
    )


def _with_outputs(group: Group, to_output: Callable[[Any], Any]) -> Group:
    trajectories = [t if t.error else replace(t, output=to_output(t.output)) for t in group.trajectories]
    return replace(group, trajectories=tuple(trajectories))
