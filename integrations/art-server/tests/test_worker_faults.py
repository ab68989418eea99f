"""Workers in this process behind a faulty proxy: what becomes of what they run."""

import asyncio
import math
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
from faulty_proxy import FaultyProxy

from art_core.errors import CaptureError
from art_server import TrainingClient
from art_server.client import WorkerReplaced
from art_server.episodes import unanswered

WS, CALL = b"GET /ws/", b"POST /rollouts/"
LONG = 60.0
"""Seconds of a lease that no test waits for."""


@pytest.fixture
def behind(serving):
    """``async with behind() as (server, proxy, worker)``; ``worker(name, agent)`` connects through the proxy."""

    @asynccontextmanager
    async def start(**options):
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving(**{"lease": LONG, **options}))
            proxy = await stack.enter_async_context(FaultyProxy(int(server.url.rpartition(":")[2])))
            works = []

            async def worker(name, agent=None, **options):
                client = TrainingClient(name, proxy.url, agent=agent, **options)
                works.append(asyncio.create_task(client.run()))
                await until(lambda: name in server.roster.active_clients or works[-1].done())
                client.work = works[-1]
                return client

            try:
                yield server, proxy, worker
            finally:
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)

    return start


async def until(true):
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


async def ask(text):
    client = openai.AsyncOpenAI(api_key="x")
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(text)}])
    return answer.choices[0].message.content


async def collect(server, *, tasks=("a", "b"), size=2):
    async with server.connect() as run:
        return await run.collect(None, list(tasks), group_size=size, key="c")


def stored(server):
    """How the rollouts ended."""
    return [it.error for it in server.run.store.rollouts() if it.finished]


@pytest.mark.system
async def test_a_result_whose_acknowledgement_is_lost_is_sent_again_and_counts_once(behind):
    async with behind() as (server, proxy, worker):
        lost = proxy.drop("to client", b'"type":"ack"', WS)
        client = await worker("w", ask)
        groups = await collect(server)
        assert lost.is_set()
        await until(lambda: not client._unacknowledged)
        assert [len(group.trajectories) for group in groups] == [2, 2]
        assert stored(server) == [None] * 4


@pytest.mark.system
@pytest.mark.parametrize("half", [0, 1])
async def test_episodes_whose_message_was_cut_are_given_again_when_the_worker_is_back(behind, half):
    async with behind() as (server, proxy, worker):
        cut = (proxy.halve if half else proxy.drop)("to client", b'"type":"train_episodes"', WS)
        await worker("w", ask)
        async with asyncio.timeout(20):
            groups = await collect(server)
        assert cut.is_set()
        assert [[t.error for t in group.trajectories] for group in groups] == [[None] * 2] * 2
        assert sorted(map(str, stored(server)))[:4] == ["None"] * 4


@pytest.mark.system
@pytest.mark.parametrize("direction", ["to server", "to client"])
async def test_half_a_model_call_is_made_again_and_recorded_once(behind, direction):
    async with behind() as (server, proxy, worker):
        cuts = [proxy.halve(direction, b"", CALL) for _ in range(2)]
        await worker("w", ask)
        groups = await collect(server)
        assert all(cut.is_set() for cut in cuts)
        assert [len(t.calls) for group in groups for t in group.trajectories] == [1] * 4
        assert stored(server) == [None] * 4


@pytest.mark.system
async def test_an_agent_that_cannot_reach_the_model_has_not_failed_though_its_worker_is_connected(behind):
    async with behind() as (server, proxy, worker):
        client = await worker("w", ask)
        await proxy.refuse()
        proxy.cut(CALL)
        collecting = asyncio.create_task(collect(server, tasks=["a"], size=2))
        await until(lambda: client.finished)
        await proxy.accept()
        [group] = await collecting
        assert [t.error for t in group.trajectories] == [None, None]
        assert client.connected
        assert any("could not reach the server" in str(error) for error in stored(server))


@pytest.mark.system
async def test_runs_that_no_worker_is_there_for_have_not_used_their_time(behind):
    asked = asyncio.Event()

    async def slow(task):
        asked.set()
        await asyncio.sleep(3600)

    async with behind(lease=1, rollout_timeout=4) as (server, _, worker):
        first = await worker("first", slow)
        collecting = asyncio.create_task(collect(server, tasks=["a"]))
        await asked.wait()
        first.work.cancel()
        await until(lambda: not server.roster.active_clients)
        await asyncio.sleep(6)
        await worker("second", ask)
        [group] = await collecting
        assert [t.error for t in group.trajectories] == [None, None]


def broke_off(url, *, cause=None, status=None):
    request = SimpleNamespace(url=url)
    error = type("BrokeOff", (Exception,), {})("x")
    error.request, error.__cause__ = request, cause
    if status is not None:
        error.response = SimpleNamespace(status_code=status)
    return error


BASE = "http://h/rollouts/r/v1"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (broke_off(f"{BASE}/chat/completions"), True),
        (broke_off(f"{BASE}/chat/completions", status=503), True),
        (broke_off(f"{BASE}/chat/completions", status=400), False),
        (broke_off(f"{BASE}/chat/completions", status=500), False),
        (broke_off(f"{BASE}/chat/completions", cause=TimeoutError()), False),
        (broke_off("http://elsewhere/v1/chat/completions"), False),
        (broke_off("http://h/rollouts/other/v1/chat/completions"), False),
        (ConnectionRefusedError(), False),
        (httpx.ConnectError("no request"), False),
        (httpx.ConnectError("x", request=httpx.Request("POST", f"{BASE}/chat/completions")), True),
        (httpx.ReadTimeout("x", request=httpx.Request("POST", f"{BASE}/chat/completions")), False),
    ],
)
def test_only_a_call_to_the_rollout_that_got_no_answer_is_no_fault_of_the_agent(error, lost):
    assert unanswered(error, BASE) is lost
    wrapped = RuntimeError("the framework's own")
    wrapped.__cause__ = error
    assert unanswered(wrapped, BASE) is lost


@pytest.mark.system
async def test_a_worker_that_is_called_back_by_an_old_connection_of_its_own_goes_on(behind):
    async with behind() as (server, _, worker):
        client = await worker("w", ask)
        first = server.roster.active_clients["w"]
        async with client._http.ws_connect(client.server_url, headers={"x-art-session": client._session_id}) as late:
            await until(lambda: server.roster.active_clients.get("w") not in (first, None))
            await until(lambda: server.roster.active_clients.get("w") not in (first, late, None) or client.work.done())
        groups = await collect(server)
        assert not client.work.done()
        assert len(groups) == 2


async def test_a_second_worker_of_the_name_ends_the_first_with_the_reason(behind):
    async with behind() as (_, _, worker):
        first = await worker("w", ask)
        await worker("w", ask)
        with pytest.raises(WorkerReplaced, match="start each worker with its own --id"):
            await asyncio.wait_for(first.work, 10)


@pytest.mark.system
async def test_a_handshake_that_is_never_answered_is_given_up(behind, monkeypatch):
    monkeypatch.setattr("art_server.client.HANDSHAKE_TIMEOUT", 0.2)
    async with behind() as (server, proxy, worker):
        client = await worker("w", ask)
        proxy.swallow()
        proxy.cut()
        await until(lambda: client.work.done() or not client.connected)
        await asyncio.sleep(0.5)
        proxy.cut()
        proxy.go_on()
        assert len(await asyncio.wait_for(collect(server), 20)) == 2


@pytest.mark.system
async def test_a_worker_of_a_pool_is_never_given_what_another_pool_waits_for(behind):
    async with behind() as (server, proxy, worker):
        collecting = asyncio.create_task(collect(server))
        await until(lambda: server.roster.queued)
        client = await worker("gpu", ask, pool="gpu")
        for _ in range(5):
            seen = server.roster.active_clients.get("gpu")
            proxy.cut()
            await until(lambda seen=seen: server.roster.active_clients.get("gpu") not in (None, seen))
        assert client.finished == 0
        await worker("any", ask)
        await collecting
        assert client.finished == 0


async def test_a_worker_that_ends_gives_back_what_it_runs_at_once(behind):
    asked = asyncio.Event()

    async def slow(task):
        asked.set()
        await asyncio.sleep(3600)

    async with behind() as (server, _, worker):
        first = await worker("first", slow)
        collecting = asyncio.create_task(collect(server))
        await asked.wait()
        first.work.cancel()
        await worker("second", ask)
        async with asyncio.timeout(20):
            groups = await collecting
        assert [[t.error for t in group.trajectories] for group in groups] == [[None] * 2] * 2


class Odd:
    def __init__(self):
        self.itself = self


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("\ud800 half a pair", "\ud800 half a pair"),
        ({"big": 2**80, "none": None, "text": "日本"}, {"big": 2**80, "none": None, "text": "日本"}),
        ([math.inf], [math.inf]),
        (object, "<class 'object'>"),
        (CIRCLE, "[[...]]"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
    ],
)
async def test_whatever_an_agent_returns_arrives_as_it_would_here(behind, output, told):
    async def agent(task):
        await ask(task)
        return output

    async with behind() as (server, _, worker):
        await worker("w", agent)
        groups = await collect(server)
        assert [t.output for group in groups for t in group.trajectories] == [told] * 4


@pytest.mark.system
async def test_an_output_over_the_limit_is_the_failure_of_its_run_alone(behind):
    async def agent(task):
        await ask(task)
        return "x" * (17 * 2**20 if task == "big" else 10)

    async with behind() as (server, _, worker):
        await worker("w", agent)
        big, small = await collect(server, tasks=["big", "small"])
        assert {t.output for t in small.trajectories} == {"x" * 10}
        assert {t.error for t in big.trajectories} == {
            "ValueError: the agent returned 17825794 bytes of JSON; the maximum is 16777216"
        }


@pytest.mark.system
async def test_results_that_do_not_fit_in_one_message_come_in_several(behind, monkeypatch):
    monkeypatch.setattr("art_server.client.MAX_MESSAGE", 8 * 2**20)  # the server in this process takes twice as much
    output = "x" * 3 * 2**20

    async def agent(task):
        await ask(task)
        return output

    async with behind() as (server, proxy, worker):
        client = await worker("w", agent, workers=6)
        acks = [proxy.drop("to client", b'"type":"ack"', WS) for _ in range(2)]
        [group] = await collect(server, tasks=["a"], size=6)
        await until(lambda: not client._unacknowledged)
        assert any(ack.is_set() for ack in acks)
        assert [t.output == output for t in group.trajectories] == [True] * 6


class Panic(BaseException):
    """As extensions in Rust and test runners raise."""


@pytest.mark.parametrize("how", ["exit", "panic", "cancelled", "cancels itself"])
async def test_what_an_agent_raises_ends_its_run_and_neither_the_worker_nor_its_other_runs(behind, how):
    async def agent(task):
        answer = await ask(task)
        if task == "bad":
            if how == "panic":
                raise Panic("3")
            if how == "exit":
                sys.exit(3)
            cancelled = asyncio.current_task() if how == "cancels itself" else asyncio.ensure_future(asyncio.sleep(60))
            cancelled.cancel()
            await (asyncio.sleep(0) if how == "cancels itself" else cancelled)
        return answer

    said = {"exit": "SystemExit: 3", "panic": "Panic: 3"}.get(
        how, "RuntimeError: CancelledError was raised: it awaited something that was cancelled"
    )
    async with behind() as (server, _, worker):
        client = await worker("w", agent)
        bad, good = await collect(server, tasks=["bad", "good"])
        assert {t.error for t in bad.trajectories} == {said}
        assert {t.error for t in good.trajectories} == {None}
        assert not client.work.done()


@pytest.mark.system
async def test_a_failure_of_ten_megabytes_is_told_in_part(behind):
    async def agent(task):
        await ask(task)
        raise ValueError("\udfff" + "x" * 10**7)

    async with behind() as (server, _, worker):
        await worker("w", agent)
        groups = await collect(server)
        assert {len(t.error) for group in groups for t in group.trajectories} == {2**16}


class Refused(TrainingClient):
    """A worker whose server refuses that many connections, and then shuts it down."""

    refusals = 0

    async def connect(self, seconds=0.0):
        if self.refusals:
            self.refusals -= 1
            raise ConnectionRefusedError

    async def handle_server_messages(self):
        return True


async def test_a_worker_outlasts_two_hours_of_refused_connections(monkeypatch):
    monkeypatch.setattr("art_server.client.MAX_PAUSE", 0.0)
    worker = Refused("w", "ws://127.0.0.1:1")
    worker.refusals = 1200
    await worker.run()
    assert not worker.refusals


async def test_a_worker_without_an_agent_ends_the_collection_with_what_to_do(behind):
    async with behind() as (server, _, worker):
        await worker("w")
        with pytest.raises(CaptureError, match="start it with --agent"):
            await collect(server)
