"""Other libraries wrap the same functions: OpenTelemetry, ddtrace and all that wrap with wrapt, before, during and after a
rollout."""

import functools
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


def passing_on(function):
    """A function that calls what it wraps and has a note of it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Passing:
    """The same as an object."""

    def __init__(self, function) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self.function, instance)


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


def test_functions_that_are_wrapped_during_a_rollout_and_unwrapped_after_it_are_as_they_were(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
        assert seen() == ["r1", "r1"]
    assert seen() == [None, None]
    assert instrumentor.submitted == 2
    instrumentor.uninstrument()
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


def test_a_library_that_stays_is_wrapped_in_every_rollout_and_left_as_it_was(instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
    theirs = in_place()
    for name in ("r2", "r3"):
        with inside_rollout(address(name)):
            assert seen() == [name, name]
        assert same(in_place(), theirs)
        assert same(tuple(function.__wrapped__ for function in theirs), untouched)
    instrumentor.uninstrument()
    assert same(in_place(), untouched)


def test_two_libraries_that_wrap_during_a_rollout_leave_everything_as_it_was(instrumentor):
    untouched = in_place()
    other = Instrumentor()
    with inside_rollout(address("r1")):
        instrumentor.instrument()
        other.instrument()
        assert seen() == ["r1", "r1"]
    assert seen() == [None, None]
    assert (instrumentor.submitted, other.submitted) == (2, 2)
    other.uninstrument()
    instrumentor.uninstrument()
    assert same(in_place(), untouched)


@pytest.mark.parametrize("decorate", [passing_on, Passing])
def test_a_wrapper_that_stays_below_what_only_notes_what_it_wraps_is_used_again(decorate, instrumentor):
    untouched = in_place()
    with inside_rollout(address("r1")):
        threading.Thread.start = decorate(threading.Thread.start)
        ThreadPoolExecutor.submit = decorate(ThreadPoolExecutor.submit)
    below = tuple(function.__wrapped__ for function in in_place())
    assert seen() == [None, None]
    for name in ("r2", "r3"):
        with inside_rollout(address(name)):
            assert seen() == [name, name]
        assert same(tuple(function.__wrapped__ for function in in_place()), below)
    threading.Thread.start, ThreadPoolExecutor.submit = below
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
