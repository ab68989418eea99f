"""What befalls a ``Setting``: each fault is a function that does it and returns when it is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from fault_setting import Setting

Fault = Callable[[Setting], Awaitable[None]]
WS, CALL = b"GET /ws/", b"POST /rollouts/"


def worker_killed(name: str) -> Fault:
    async def fault(setting: Setting) -> None:
        process = setting.workers.pop(name)
        process.kill()
        await asyncio.to_thread(process.wait)

    return fault


def worker_stopped(name: str, seconds: float) -> Fault:
    """It comes back after others have been given what it had."""

    async def fault(setting: Setting) -> None:
        setting.workers[name].send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        setting.workers[name].send_signal(signal.SIGCONT)

    return fault


def connections_cut(seconds: float) -> Fault:
    """All are reset, and none is taken for so long."""

    async def fault(setting: Setting) -> None:
        await setting.proxy.refuse()
        setting.proxy.cut()
        await asyncio.sleep(seconds)
        await setting.proxy.accept()

    return fault


def connections_silent(seconds: float, cut: bool) -> Fault:
    """Nothing arrives for so long, then what was sent, or nothing ever."""

    async def fault(setting: Setting) -> None:
        setting.proxy.swallow()
        await asyncio.sleep(seconds)
        if cut:
            setting.proxy.cut()
        setting.proxy.go_on()

    return fault


def half_a_piece(direction: str, text: bytes, first: bytes) -> Fault:
    async def fault(setting: Setting) -> None:
        await setting.proxy.halve(direction, text, first).wait()

    return fault


async def acknowledgement_lost(setting: Setting) -> None:
    await setting.proxy.drop("to client", b'"type":"ack"', WS).wait()


def server_restarted(number: int, *command: str) -> Fault:
    async def fault(setting: Setting) -> None:
        await asyncio.to_thread(setting.kill_server, number)
        setting.start_server(*command)
        await setting.served()

    return fault


HALVES = {
    "half of what a worker is told": half_a_piece("to client", b'"type":"train_episodes"', WS),
    "half of what a worker says": half_a_piece("to server", b"", WS),
    "half of a model call": half_a_piece("to server", b"", CALL),
    "half of a model's answer": half_a_piece("to client", b"", CALL),
    "half of what a driver asks": half_a_piece("to server", b"GET /api/jobs", b""),
    "half of what a driver is told": half_a_piece("to client", b'"kind":"collect"', b""),
}
