"""Other libraries wrap the same functions: OpenTelemetry, ddtrace and all that wrap with wrapt, before, during and after a
rollout."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import wrapt

from art_core.attribution import current_rollout, destination, inside_rollout
from art_core.types import RolloutAddress


class Instrumentor:
    """Wraps and unwraps as OpenTelemetry's ``ThreadingInstrumentor`` does, and counts."""

    def __init__(self) -> None:
        self.started = self.submitted = 0

    def instrument(self) -> None:
        wrapt.wrap_function_wrapper(threading.Thread, "start", self._start)
        wrapt.wrap_function_wrapper(ThreadPoolExecutor, "submit", self._submit)

    def uninstrument(self) -> None:
        for owner, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
            setattr(owner, name, getattr(owner, name).__wrapped__)

    def _start(self, wrapped, thread, args, kwargs):
        assert isinstance(thread, threading.Thread)
        self.started += 1
        return wrapped(*args, **kwargs)

    def _submit(self, wrapped, pool, args, kwargs):
        assert isinstance(pool, ThreadPoolExecutor)
        self.submitted += 1
        return wrapped(*args, **kwargs)


def in_place() -> tuple[object, object]:
    return vars(threading.Thread)["start"], vars(ThreadPoolExecutor)["submit"]


@pytest.fixture
def instrumentor():
    untouched = in_place()
    yield Instrumentor()
    threading.Thread.start, ThreadPoolExecutor.submit = untouched


def same(one: tuple[object, object], other: tuple[object, object]) -> bool:
    """A wrapper of wrapt equals what it wraps."""
    return one[0] is other[0] and one[1] is other[1]


def seen() -> list[str | None]:
    """The rollout that a new thread and a pool's work run in."""
    found = []
    thread = threading.Thread(target=lambda: found.append(current_rollout.get()))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        found.append(pool.submit(current_rollout.get).result())
    return [address and address.rollout_id for address in found]


def address(name: str) -> RolloutAddress:
    return RolloutAddress(name, f"http://127.0.0.1:1/rollouts/{name}/v1", "key", "policy")


def test_functions_that_were_wrapped_before_a_rollout_work_in_it_and_are_the_same_after_it(instrumentor):
    untouched = in_place()
    instrumentor.instrument()
    wrapped = in_place()
    with inside_rollout(address("r1")):
        assert seen() == ["r1", "r1"]
        assert instrumentor.submitted == 1
    assert same(in_place(), wrapped)
    assert seen() == [None, None]
    assert instrumentor.submitted == 2
    instrumentor.uninstrument()
    assert same(in_place(), untouched)
    assert seen() == [None, None]


def test_functions_that_are_wrapped_during_a_rollout_carry_no_rollout_after_it(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
        assert seen() == ["r1", "r1"]
    assert seen() == [None, None]
    instrumentor.uninstrument()
    assert seen() == [None, None]  # what is put back now is our wrapper
    with inside_rollout(address("r2")):
        assert seen() == ["r2", "r2"]
    assert same(in_place(), untouched)


def test_ours_is_not_added_again_at_every_rollout(instrumentor):
    untouched = in_place()
    for _ in range(5):
        with inside_rollout(address("r1")):
            instrumentor.instrument()
        instrumentor.uninstrument()
    with inside_rollout(address("r2")):
        assert same(tuple(function.__wrapped__ for function in in_place()), untouched)


def test_functions_that_are_wrapped_and_unwrapped_during_a_rollout_are_as_they_were(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
        instrumentor.uninstrument()
        assert seen() == ["r1", "r1"]
    assert same(in_place(), untouched)


def test_a_wrapper_that_stays_below_another_librarys_is_used_again(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
    below = tuple(function.__wrapped__ for function in in_place())
    for name in ("r2", "r3"):
        with inside_rollout(address(name)):
            assert seen() == [name, name]
        assert same(tuple(function.__wrapped__ for function in in_place()), below)
    instrumentor.uninstrument()
    with inside_rollout(address("r4")):
        assert same(in_place(), below)
    assert same(in_place(), untouched)


def test_functions_that_are_wrapped_after_a_rollout_work_in_the_next(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        assert seen() == ["r1", "r1"]
    instrumentor.instrument()
    with inside_rollout(address("r2")):
        assert seen() == ["r2", "r2"]
        assert destination("gpt").rollout_id == "r2"
    instrumentor.uninstrument()
    assert same(in_place(), untouched)
