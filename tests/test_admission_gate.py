"""Which calls the gate admits, in which order, and which it holds."""

import asyncio

import pytest

from art_core.capture import Gate
from art_core.errors import UpstreamError


async def inside(gate: Gate, log: list, name: str, until: asyncio.Event) -> None:
    async with gate:
        log.append(name)
        await until.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_beyond_the_limit_enter_in_order_of_arrival():
    gate, log = Gate(limit=1), []
    ends = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name, end in zip("abcd", ends, strict=True)]
    for number, end in enumerate(ends):
        await settle()
        assert (log, gate.inside, gate.waiting) == (list("abcd"[: number + 1]), 1, 3 - number)
        end.set()
    await asyncio.gather(*tasks)
    assert gate.inside == 0


@pytest.mark.parametrize(("limit", "enter"), [(None, 5), (3, 3)])
async def test_the_gate_admits_calls_up_to_its_limit(limit, enter):
    gate, log, end = Gate(limit), [], asyncio.Event()
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name in "abcde"]
    await settle()
    assert (log, gate.inside, gate.waiting) == (list("abcde"[:enter]), enter, 5 - enter)
    end.set()
    await asyncio.gather(*tasks)
    assert (log, gate.inside) == (list("abcde"), 0)


async def test_calls_that_enter_after_a_pause_are_counted():
    gate, log, end = Gate(limit=2), [], asyncio.Event()
    await gate.pause()
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name in "abc"]
    await settle()
    await gate.resume()
    await settle()
    assert (log, gate.inside, gate.waiting) == (["a", "b"], 2, 1)
    end.set()
    await asyncio.gather(*tasks)


async def test_a_full_queue_refuses_the_next_call():
    gate, log, end = Gate(limit=1, queue=1), [], asyncio.Event()
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name in "ab"]
    await settle()
    with pytest.raises(UpstreamError, match="1 calls are being answered and 1 are waiting") as refusal:
        async with gate:
            pass
    told = refusal.value.status, refusal.value.code, refusal.value.retry_after
    assert told == (429, "too_many_calls", 1.0)
    end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_cancelled_waiting_call_takes_no_place(admitted):
    gate, log, end = Gate(limit=1), [], asyncio.Event()
    first, second, third = (asyncio.create_task(inside(gate, log, name, end)) for name in "abc")
    await settle()
    if admitted:
        end.set()
        await first  # The second has its turn, and does not know yet.
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert gate.waiting == (0 if admitted else 1)
    end.set()
    await asyncio.gather(first, third)
    assert log == ["a", "c"] or admitted
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_waiting_call_that_is_cancelled_as_another_ends_is_skipped():
    gate, log = Gate(limit=1), []
    ends = [asyncio.Event() for _ in range(3)]
    first, second, third = (
        asyncio.create_task(inside(gate, log, name, end)) for name, end in zip("abc", ends, strict=True)
    )
    await settle()
    ends[0].set()  # The first leaves before the second knows that it is cancelled.
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await settle()
    assert (log, gate.inside, gate.waiting) == (["a", "c"], 1, 0)
    ends[2].set()
    await asyncio.gather(first, third)


async def test_pause_and_resume_are_idempotent():
    gate = Gate()
    for _ in range(2):
        await gate.pause()
    assert gate.paused is True
    for _ in range(2):
        await gate.resume()
    assert gate.paused is False
    async with gate:
        assert gate.inside == 1
    await gate.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), gate:
            pass


async def test_a_pause_that_begins_while_another_holds_outlives_it():
    gate, log, end = Gate(), [], asyncio.Event()
    end.set()
    async with gate.held():
        await gate.pause()
    task = asyncio.create_task(inside(gate, log, "a", end))
    await settle()
    assert (log, gate.paused) == ([], True)
    await gate.resume()
    await task


async def test_a_held_gate_admits_no_call_until_the_last_holder_is_done():
    gate, log, end = Gate(limit=2), [], asyncio.Event()
    end.set()
    await gate.pause()
    async with gate.held():
        task = asyncio.create_task(inside(gate, log, "a", end))
        await settle()
    await settle()
    assert (log, gate.waiting, gate.paused) == ([], 1, True)
    await gate.resume()
    await task
    assert log == ["a"]


async def test_a_holder_waits_for_calls_inside_but_not_for_waiting_ones():
    gate, log, end = Gate(limit=1), [], asyncio.Event()
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name in "ab"]
    await settle()
    pausing = asyncio.create_task(gate.pause())
    await settle()
    assert not pausing.done()
    end.set()
    await pausing
    assert log == ["a"]
    await gate.resume()
    await asyncio.gather(*tasks)
    assert log == ["a", "b"]
