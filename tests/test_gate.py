"""Who may enter the gate, in which order, and who is held."""

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


async def test_calls_beyond_the_limit_enter_in_the_order_in_which_they_came():
    gate, log = Gate(limit=1), []
    ends = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name, end in zip("abcd", ends, strict=True)]
    for number, end in enumerate(ends):
        await settle()
        assert (log, gate.inside, gate.waiting) == (list("abcd"[: number + 1]), 1, 3 - number)
        end.set()
    await asyncio.gather(*tasks)
    assert gate.inside == 0


async def test_the_queue_has_an_end():
    gate, log, end = Gate(limit=1, queue=1), [], asyncio.Event()
    tasks = [asyncio.create_task(inside(gate, log, name, end)) for name in "ab"]
    await settle()
    with pytest.raises(UpstreamError, match="1 calls are being answered here and 1 wait") as refusal:
        async with gate:
            pass
    assert (refusal.value.status, refusal.value.retry_after) == (429, 1.0)
    end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_waiting_call_that_is_cancelled_takes_no_place(admitted):
    gate, log, end = Gate(limit=1), [], asyncio.Event()
    first, second, third = (asyncio.create_task(inside(gate, log, name, end)) for name in "abc")
    await settle()
    if admitted:
        end.set()
        await first  # The second has its turn, and does not know yet.
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    end.set()
    await asyncio.gather(first, third)
    assert log == ["a", "c"] or admitted
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_held_gate_lets_nobody_in_until_the_last_holder_leaves():
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


async def test_a_holder_waits_for_those_inside_and_not_for_those_who_wait():
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
