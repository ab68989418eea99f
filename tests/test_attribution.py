"""Which rollout code runs in, through executors, tasks and threads, and what happens where nobody can tell."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from art_core.attribution import agent_name, caller_headers, current_rollout, destination, exempt, inside_rollout, names
from art_core.errors import CaptureError
from art_core.types import RolloutAddress


def address(name: str, *passthrough: str) -> RolloutAddress:
    return RolloutAddress(name, f"http://127.0.0.1:1/rollouts/{name}/v1", "key", "policy", frozenset(passthrough))


def on_a_thread(function, *args):
    """Run on a bare thread; what it raises is returned."""
    result = []

    def run() -> None:
        try:
            result.append(function(*args))
        except CaptureError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


class Worker:
    """A thread that was started before any rollout and takes orders through plain events."""

    def __init__(self) -> None:
        self._order, self._done, self._stop = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._order.wait() and not self._stop:
            self._order.clear()
            try:
                self._result = destination("gpt")
            except CaptureError as error:
                self._result = error
            self._done.set()

    def ask(self):
        self._done.clear()
        self._order.set()
        self._done.wait()
        return self._result

    def end(self) -> None:
        self._stop = True
        self._order.set()
        self._thread.join()


@pytest.fixture
def early_worker():
    worker = Worker()
    yield worker
    worker.end()


def test_outside_every_rollout_nothing_is_touched(early_worker):
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start
    assert destination("gpt") is None
    assert early_worker.ask() is None
    with inside_rollout(address("r1")):
        assert ThreadPoolExecutor.submit is not submit
    assert (ThreadPoolExecutor.submit, threading.Thread.start) == (submit, start)
    assert early_worker.ask() is None


def test_a_model_that_passes_through_goes_where_the_agent_sends_it():
    with inside_rollout(address("r1", "judge-model")):
        assert destination("judge-model") is None
        assert destination("gpt") == address("r1", "judge-model")
        assert destination(None) == address("r1", "judge-model")


@pytest.mark.parametrize("named", ["judge", "openai/judge", "openrouter/openai/judge"])
def test_a_model_passes_through_whoever_puts_its_providers_name_before_it(named):
    with inside_rollout(address("r1", named)):
        assert destination("judge") is None
        assert destination("litellm/openai/judge") is None
        assert destination("openai/another").rollout_id == "r1"


def test_a_rollout_inside_a_rollout_is_its_own():
    with inside_rollout(address("outer")):
        with inside_rollout(address("inner")):
            assert destination("gpt").rollout_id == "inner"
        assert destination("gpt").rollout_id == "outer"
        assert on_a_thread(destination, "gpt").rollout_id == "outer"


async def test_sixty_four_rollouts_on_executors_tasks_and_threads_see_their_own_address():
    loop = asyncio.get_running_loop()
    arrived = asyncio.Barrier(64)
    with ThreadPoolExecutor(8) as pool:

        async def rollout(number: int) -> None:
            name = f"r{number}"
            with inside_rollout(address(name)):
                await arrived.wait()
                for _ in range(3):
                    seen = [
                        await loop.run_in_executor(pool, destination, "gpt"),
                        await loop.run_in_executor(None, destination, "gpt"),
                        await asyncio.to_thread(destination, "gpt"),
                        await asyncio.to_thread(on_a_thread, destination, "gpt"),
                        await asyncio.wrap_future(pool.submit(destination, model="gpt")),
                        await asyncio.wrap_future(pool.submit(on_a_thread, destination, "gpt")),
                        *await asyncio.gather(asyncio.sleep(0, destination("gpt"))),
                        on_a_thread(destination, "gpt"),
                    ]
                    assert [one.rollout_id for one in seen] == [name] * len(seen)

        async with asyncio.TaskGroup() as tasks:
            for number in range(64):
                tasks.create_task(rollout(number))
        assert destination("gpt") is None


async def test_a_pools_worker_does_not_stay_in_the_rollout_that_started_it():
    with ThreadPoolExecutor(1) as pool:
        with inside_rollout(address("r1")):
            assert pool.submit(destination, "gpt").result().rollout_id == "r1"
        assert pool.submit(destination, "gpt").result() is None
        with inside_rollout(address("r2")):
            fresh = contextvars.Context().run(pool.submit, destination, "gpt")
            with pytest.raises(CaptureError, match=r"address\.base_url"):
                fresh.result()


async def test_a_thread_from_before_the_rollouts_cannot_be_attributed(early_worker):
    with inside_rollout(address("r1")):
        error = early_worker.ask()
    assert isinstance(error, CaptureError)
    assert "base_url=address.base_url" in str(error)
    assert "'gpt'" in str(error)


async def test_the_loops_thread_outside_a_rollout_is_left_alone():
    def loop_in_a_thread() -> object:
        async def main() -> object:
            inside, ended = asyncio.Event(), asyncio.Event()

            async def rollout() -> None:
                with inside_rollout(address("r1")):
                    inside.set()
                    await ended.wait()

            task = asyncio.create_task(rollout())
            await inside.wait()
            seen = destination("gpt")
            ended.set()
            await task
            return seen

        return asyncio.run(main())

    assert await asyncio.to_thread(loop_in_a_thread) is None


async def test_a_judges_calls_are_left_alone_on_whatever_thread_they_are_made():
    with ThreadPoolExecutor(1) as pool, inside_rollout(address("r1")):
        with exempt():
            assert destination("gpt") is None
            assert pool.submit(destination, "gpt").result() is None
            assert on_a_thread(destination, "gpt") is None
        assert pool.submit(destination, "gpt").result().rollout_id == "r1"


def test_a_thread_that_outlives_its_rollout_still_names_it():
    go, seen = threading.Event(), []

    def late() -> None:
        go.wait()
        seen.append(destination("gpt"))

    with inside_rollout(address("r1")):
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join()
    assert seen[0].rollout_id == "r1"


def test_somebody_elses_wrapper_is_not_undone(monkeypatch):
    with inside_rollout(address("r1")):
        ours = ThreadPoolExecutor.submit

        def theirs(self, function, /, *args, **kwargs):
            return ours(self, function, *args, **kwargs)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", theirs)
    assert ThreadPoolExecutor.submit is theirs
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(destination, "gpt").result() is None
        with inside_rollout(address("r2")):
            assert pool.submit(destination, "gpt").result().rollout_id == "r2"
    assert current_rollout.get() is None
    monkeypatch.undo()
    ThreadPoolExecutor.submit = ours.__wrapped__


def test_threads_carry_the_name_of_the_node_that_started_them(monkeypatch):
    node = contextvars.ContextVar("node", default=None)
    monkeypatch.setattr(names, "_agent_sources", [node.get])
    with inside_rollout(address("r1")), ThreadPoolExecutor(1) as pool:
        for name in ("planner", "writer"):
            node.set(name)
            assert on_a_thread(agent_name) == name
            assert pool.submit(agent_name).result() == name


def test_threads_carry_the_frameworks_thread_of_who_started_them(monkeypatch):
    thread = contextvars.ContextVar("thread", default=None)
    monkeypatch.setattr(names, "_thread_sources", [thread.get])
    with inside_rollout(address("r1")), ThreadPoolExecutor(1) as pool:
        for name in ("t 1", "t 2"):
            thread.set(name)
            assert on_a_thread(caller_headers) == {"x-art-thread": name}
            assert pool.submit(caller_headers).result() == {"x-art-thread": name}
        thread.set(None)
        assert on_a_thread(caller_headers) == {}


def test_the_names_of_all_frameworks_that_know_one_are_joined_each_once(monkeypatch):
    now: dict[str, str | None] = {}

    def graph() -> str | None:
        return now.get("graph")

    def kit() -> str | None:
        return now.get("kit")

    monkeypatch.setattr(names, "_agent_sources", [kit, graph])  # whichever was registered first
    for node, agent, joined in (
        (None, None, None),
        ("outer", None, "outer"),
        (None, "inner", "inner"),
        ("outer", "inner", "outer/inner"),
        ("same", "same", "same"),
        ("team/writer", "writer", "team/writer"),
        ("writer", "team/writer", "team/writer"),
        ("writ", "writer", "writ/writer"),
    ):
        now |= {"graph": node, "kit": agent}
        assert agent_name() == joined


def test_a_thread_has_the_names_of_who_started_it_where_no_newer_ones_of_the_same_framework_are_known(monkeypatch):
    node, agent = contextvars.ContextVar("node", default=None), contextvars.ContextVar("agent", default=None)

    def graph() -> str | None:
        return node.get()

    def kit() -> str | None:
        return agent.get()

    monkeypatch.setattr(names, "_agent_sources", [graph, kit])

    def asking(name: str) -> str | None:
        agent.set(name)
        return agent_name()

    with inside_rollout(address("r1")):
        node.set("outer")
        agent.set("caller")
        assert on_a_thread(agent_name) == "outer/caller"
        assert on_a_thread(asking, "inner") == "outer/inner"


def test_a_client_with_a_live_rollouts_address_names_it():
    one, two = address("one", "judge"), address("two")
    with inside_rollout(one), inside_rollout(two):
        assert destination("gpt", "http://elsewhere/v1") == two
        assert destination("gpt", f"{one.base_url}/") == one
        with pytest.raises(CaptureError, match="base_url of its own provider"):
            destination("judge", one.base_url)
    assert destination("gpt", one.base_url) is None


def test_a_subclass_of_thread_runs_as_it_did():
    class Named(threading.Thread):
        def run(self) -> None:
            self.seen = destination("gpt")

    with inside_rollout(address("r1")):
        thread = Named()
        thread.start()
        thread.join()
    assert thread.seen.rollout_id == "r1"
