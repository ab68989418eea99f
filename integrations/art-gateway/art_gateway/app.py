"""The gateway as an ASGI application: keys, rollouts that open by themselves, and commands (pause, resume, status, finish).

Model calls are answered and recorded by ``art_core.capture``.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from art_core.capture import MODELS, CaptureApp, Dialect, Exchange, Gate, Paths, Refused, stopping_error
from art_core.types import Call, JsonDict, Sampling
from art_gateway.checks import MAX_COMMAND_BYTES, check_id, check_page, read_command, read_feedback, wrong_key

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from art_core.store import Store
    from art_gateway.routing import Pool

log = logging.getLogger("art_gateway")

SPLIT = "train"
"""The split of recorded rollouts; the default of ``art.load_trajectories``."""
LONGEST_ID = 512
FINISH = "/finish"
FEEDBACK = "/feedback"
COMMANDS = frozenset({"/pause", "/resume", "/status", FEEDBACK})
BACKLOG = 400
"""Writes that may wait for the disk; each call takes two."""


@dataclass(frozen=True)
class Limits:
    """How much the gateway accepts."""

    calls: int = 1024
    """Calls being answered at a time."""
    waiting: int = 8192
    """Calls that may wait for their turn."""
    body: int = 64 * 2**20
    """Bytes per request."""
    seconds: float | None = None
    """For an upstream's whole answer, or between two chunks of a stream; None: as long as the upstream itself allows."""


class Ledger:
    """A Recorder that adds a rollout to the store with its first call, and counts.

    Nothing signals the end of a rollout, so each call counts as its last until the next one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._flushing: asyncio.Task[None] | None = None
        self.split_of: Callable[[str], str] = lambda _: SPLIT
        """Rollout id -> the split that it is recorded in."""
        self.tasks: dict[str, str] = {}
        """Rollout id -> the task that the harness sent, while a call of the rollout is in flight."""
        self.calls = 0
        self.aborted = 0
        self.begun = 0
        """Rollouts begun since the gateway started."""

    async def keep_up(self) -> None:
        """Wait if so many writes are pending that memory would fill up. Raises StoreError if they can't be written."""
        if self._store.is_behind(BACKLOG):
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(asyncio.to_thread(self._store.flush))
            await asyncio.shield(self._flushing)

    def record(self, rollout_id: str, call: Call) -> None:
        """Record a call, and its rollout if the call is its first."""
        if not self._store.has_rollout(rollout_id):
            self._store.add_rollout(
                rollout_id, task=self.tasks.get(rollout_id, rollout_id), split=self.split_of(rollout_id)
            )
            self.begun += 1
        self._store.record(rollout_id, call)
        self._store.touch_rollout(rollout_id)
        self.calls += 1
        self.aborted += call.finish_reason == "aborted"

    def finish(self, rollout_id: str, outcome: JsonDict) -> None:
        """Record what a harness reports about a finished rollout. Raises Refused (404) for an unknown one."""
        self._check_known(rollout_id)
        self._store.finish_rollout(rollout_id, output=outcome.get("output"), error=outcome.get("error"))
        self._store.touch_rollout(rollout_id)
        if outcome.get("reward") is not None or outcome.get("metrics"):
            self._store.add_scores(
                [rollout_id], [outcome.get("reward")], metrics=[outcome.get("metrics") or {}], by="gateway"
            )

    def add_feedback(self, rollout_id: str, score: float, metrics: Mapping[str, float], by: str) -> None:
        """Record what a user or a judge thinks of a conversation. Raises Refused (404) for an unknown one."""
        self._check_known(rollout_id)
        self._store.add_scores([rollout_id], [score], metrics=[metrics], by=by)

    def _check_known(self, rollout_id: str) -> None:
        if not self._store.has_rollout(rollout_id):
            raise Refused(f"rollout {rollout_id!r} has no recorded call", status=404, code="rollout_unknown")

    def saved(self) -> Future[None]:
        """Return a future that completes when everything recorded so far would survive this process."""
        return self._store.saved()

    def flush(self) -> None:
        """Block until everything recorded so far is saved."""
        self._store.flush()

    def close(self) -> None:
        """Do nothing: the store belongs to whoever opened it."""


class Gateway:
    """Answers ``/rollouts/{rollout_id}/v1/...`` for any id, ``/v1/models``, and the commands. Lives in one event loop."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        *,
        dialects: Mapping[str, Dialect] | None = None,
        api_key: str | None = None,
        local: bool = True,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        ledger: Ledger | None = None,
        gate: Gate | None = None,
    ) -> None:
        """``local``: only this machine can reach the gateway, so commands are allowed even without a key.

        ``ledger`` and ``gate`` are shared with another gateway.
        """
        limits = limits or Limits()
        self.pool = pool
        self.ledger = ledger or self._make_ledger(store)
        self.gate = gate or Gate(limits.calls, limits.waiting)
        self.max_body = limits.body
        self._capture = CaptureApp(
            pool.route(""),
            self.ledger,
            dialects=dialects,
            max_body=limits.body,
            gate=self.gate,
            call_timeout=limits.seconds,
        )
        self._dialects = self._capture.dialects
        self._paths = Paths([*self._dialects, MODELS, FINISH])
        self._key = None if api_key is None else api_key.encode()
        self._local = local
        self._sampling = sampling or Sampling()
        self._inside: dict[str, int] = {}
        """Rollout id -> its requests in flight. An idle rollout has no entry, so it takes no memory here."""
        self.stopping = False
        """Whether to refuse new calls."""

    _make_ledger: Callable[[Store], Ledger] = Ledger
    commands = COMMANDS

    @property
    def rollouts_inside(self) -> frozenset[str]:
        """Rollouts with a request in flight."""
        return frozenset(self._inside)

    @property
    def pools(self) -> Sequence[Pool]:
        """All upstreams, to be started before the gateway and stopped after it; those of the policy last."""
        return (self.pool,)

    def notes(self) -> Sequence[str]:
        """Return what is to be said when the gateway starts."""
        return ()

    def chores(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs beside the gateway until it stops."""
        return ()

    async def abort(self) -> None:
        """Abort the calls in flight; what they have sampled is recorded as aborted."""
        await self._capture.close_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id, path = self._split(scope["path"])
        exchange = Exchange(scope, receive, send)
        exchange.dialect = self._dialects.get(path, exchange.dialect)
        async with exchange.answering_errors(log, "a request failed inside the gateway"):
            check_id(scope, rollout_id)
            self._check_page(exchange)
            if rollout_id and exchange.method == "POST" and path in self._dialects:
                self._admit(exchange)
                await self.ledger.keep_up()
                await self._call(rollout_id, exchange)
            else:
                await self._other(exchange, rollout_id, path)

    def _split(self, path: str) -> tuple[str | None, str]:
        """Return the rollout's id and the path at its address; None and the path if it isn't at one, "" for an invalid id."""
        found = self._paths.split(path)
        if found is None:
            return None, path
        return (found[0] if len(found[0]) <= LONGEST_ID else ""), found[1]

    async def _call(self, rollout_id: str, exchange: Exchange) -> None:
        inside = self._inside.get(rollout_id, 0)
        if not inside:
            self._capture.open(rollout_id, self._sampling, self.pool.route(rollout_id))
        self._inside[rollout_id] = inside + 1
        if (task := exchange.headers.get("x-art-task")) is not None:
            self.ledger.tasks[rollout_id] = unquote(task)
        try:
            await self._capture.answer(exchange)
        finally:
            self._inside[rollout_id] -= 1
            if not self._inside[rollout_id]:
                del self._inside[rollout_id]
                self.ledger.tasks.pop(rollout_id, None)
                self._capture.release(rollout_id)

    def _check_page(self, exchange: Exchange) -> None:
        if self._key is None:
            check_page(exchange, local=self._local)

    def _admit(self, exchange: Exchange) -> None:
        """Raise Refused if a call may not be answered."""
        if not self._has_key(exchange):
            raise wrong_key()
        if self.stopping:
            raise stopping_error()

    def _has_key(self, exchange: Exchange) -> bool:
        if self._key is None:
            return True
        api_key = exchange.headers.get("x-api-key")
        bearer = exchange.headers.get("authorization") or ""
        keys = [] if api_key is None else [api_key]
        if bearer[:7].lower() == "bearer ":
            keys.append(bearer[7:].strip())
        return any([hmac.compare_digest(key.encode("latin-1"), self._key) for key in keys])

    async def _other(self, exchange: Exchange, rollout_id: str | None, path: str) -> None:
        """Answer everything except model calls."""
        request = (exchange.method, path)
        if request == ("GET", "/health"):
            return await exchange.answer(200, {"status": "ok"})
        if not self._has_key(exchange):
            raise wrong_key()
        if request == ("GET", MODELS):
            return await exchange.answer(200, await self.pool.models())
        if path in self.commands or (rollout_id and path == FINISH):
            return await exchange.answer(200, await self._command(exchange, rollout_id, path))
        self._refuse_path(exchange, rollout_id)

    async def _command(self, exchange: Exchange, rollout_id: str | None, path: str) -> JsonDict:
        self._check_commander()
        if path == "/status" and exchange.method == "GET":
            return self.status()
        if path == "/status" or exchange.method != "POST":
            raise Refused(
                "use GET /status, POST /pause, POST /resume, POST /feedback or POST /rollouts/{rollout_id}/finish",
                status=405,
            )
        content = await exchange.body(MAX_COMMAND_BYTES)
        if path == FEEDBACK:
            self.ledger.add_feedback(*read_feedback(content))
            await asyncio.wrap_future(self.ledger.saved())
            return self.status()
        body = read_command(content)
        if path == FINISH:
            self.ledger.finish(rollout_id, body)
        elif path == "/pause":
            await self.gate.pause()
        else:
            for backend in self.pools[-1].backends:
                backend.upstream.policy_version = body.get("policy_version", backend.upstream.policy_version)
            await self.gate.resume()
        return self.status()

    def _check_commander(self) -> None:
        if self._key is None and not self._local:
            raise Refused(
                "other machines can reach this gateway, so this path needs a key: start the gateway with --api-key",
                status=403,
                code="no_key_set",
            )

    def status(self) -> JsonDict:
        """Return the answer to ``GET /status``."""
        return {
            "paused": self.gate.paused,
            "calls": self.ledger.calls,
            "aborted": self.ledger.aborted,
            "rollouts": self.ledger.begun,
            "in_flight": self.gate.inside,
            "waiting": self.gate.waiting,
            "retried": self.pool.retried,
            "upstreams": [
                {
                    "url": backend.upstream.base_url,
                    "up": backend.up,
                    "in_flight": backend.inside,
                    "policy_version": backend.upstream.policy_version,
                }
                for pool in self.pools
                for backend in pool.backends
            ],
        }

    def _refuse_path(self, exchange: Exchange, rollout_id: str | None) -> None:
        paths = ", ".join(f"POST /rollouts/{{rollout_id}}{path}" for path in self._dialects)
        hint = ""
        if exchange.path.startswith("/v1/"):
            hint = "a call must name its rollout: use a separate base URL for every rollout, /rollouts/NAME/v1 with any NAME; "
        elif rollout_id == "":
            hint = f"a rollout's id must have 1 to {LONGEST_ID} characters; "
        raise Refused(
            f"{exchange.method} {exchange.path} doesn't exist: {hint}available: {paths}, GET {MODELS}, "
            "GET /rollouts/{rollout_id}/v1/models, POST /rollouts/{rollout_id}/finish, POST /feedback, GET /status, POST /pause, "
            "POST /resume",
            status=404,
            code="unknown_path",
        )
