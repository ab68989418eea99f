"""An engine that echoes, broken variants of it, and recorders that keep calls in a list or a file; the serving process
imports them."""

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

from art_core.capture.record import Recording
from art_core.errors import StoreError, UpstreamError
from art_core.types import Call, Weights


async def recorded(upstream, request: dict) -> list[Call]:
    """Return what is recorded of ``request`` where ``upstream`` answers it."""
    recording = Recording({}, "q1")
    if request["stream"]:
        async for chunk in upstream.stream(request):
            recording.add(chunk)
    else:
        recording.add(await upstream.chat(request))
    await upstream.stop()
    return recording.calls()


def chat(text: str, **settings) -> dict:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **settings}


def prompt_ids(messages: list) -> list[int]:
    return list(json.dumps(messages).encode())


class EchoEngine:
    """Answers with the last message, one token per byte, ``delay`` seconds per token. Some messages are commands."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.version = 0
        self.fingerprint = ""
        self.live = None
        self.requests: list[dict] = []
        self.sampling = 0
        self.stopped = threading.Event()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped.set()

    async def load(self, weights: Weights) -> None:
        assert self.sampling == 0, "weights changed while a call was in flight"
        await asyncio.sleep(0.05)
        self.version, self.live = weights.version, weights.live

    def _text(self, request: dict) -> str:
        self.requests.append(request)
        text = request["messages"][-1]["content"]
        if text.startswith("refuse"):
            status, code = text.split()[1:]
            raise UpstreamError(f"refused with {status}", status=int(status), code=code)
        if text == "die":
            os._exit(7)
        if text == "bug":
            raise RuntimeError("CUDA out of cheese")
        if text == "live":
            return str(self.live["weight"].sum().item())
        return text

    def _head(self, request: dict) -> dict:
        head = {"id": "chatcmpl-1", "created": 1, "model": "policy", "policy_version": self.version}
        if self.fingerprint:
            head["system_fingerprint"] = self.fingerprint
        return (
            head
            if request["messages"][-1]["content"] == "no ids"
            else head | {"prompt_token_ids": prompt_ids(request["messages"])}
        )

    @staticmethod
    def _tokens(text: str, start: int = 0) -> dict:
        ids = list(text.encode())
        return {"token_ids": ids, "token_logprobs": [-(start + i + 1) / 64 for i in range(len(ids))]}

    async def chat(self, request: dict) -> dict:
        text, said = self._text(request), ""
        finish = "stop"
        self.sampling += 1
        try:
            for letter in text:
                said += letter
                if self.delay:
                    await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            finish = "aborted"
        finally:
            self.sampling -= 1
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": f"{said}{index or ''}"},
                "finish_reason": finish,
                **self._tokens(f"{said}{index or ''}"),
            }
            for index in range(request.get("n", 1))
        ]
        return self._head(request) | {"object": "chat.completion", "choices": choices}

    async def stream(self, request: dict):
        text = self._text(request)
        self.sampling += 1
        try:
            indices = range(request.get("n", 1))
            for place, letter in enumerate(text):
                for index in indices:
                    part = {"index": index, "delta": {"content": letter}, "finish_reason": None}
                    yield self._chunk(request, part | self._tokens(letter, place))
                if letter == "!":
                    raise UpstreamError("broke while sampling", status=500)
                if self.delay:
                    await asyncio.sleep(self.delay)
            for index in indices:
                yield self._chunk(request, {"index": index, "delta": {}, "finish_reason": "stop", **self._tokens("")})
        finally:
            self.sampling -= 1

    def _chunk(self, request: dict, choice: dict) -> dict:
        return self._head(request) | {"object": "chat.completion.chunk", "choices": [choice]}


class BrokenEngine(EchoEngine):
    async def start(self) -> None:
        raise UpstreamError("no such model: 'tinny'", status=404, code="model_not_found")


class SlowStartEngine(EchoEngine):
    async def start(self) -> None:
        await asyncio.sleep(60)


class DiesUnstarted(EchoEngine):
    """Takes forever to start, and ends its process if that is cancelled."""

    async def start(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            os._exit(3)


class ForksEngine(EchoEngine):
    """Forks a process that inherits all open files, and writes its id to ``path``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    async def start(self) -> None:
        number = os.fork()
        if not number:
            time.sleep(60)
            os._exit(0)
        self.path.write_text(str(number))


class PickyError(Exception):
    """Can't be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class PickyEngine(EchoEngine):
    async def start(self) -> None:
        raise PickyError(1, 2)


class PrintingEngine(EchoEngine):
    async def start(self) -> None:
        print("loading the model", flush=True)


class ThereEngine(EchoEngine):
    """Raises an error that only its own process can import."""

    async def start(self) -> None:
        there = sys.modules["only_there"] = ModuleType("only_there")
        there.Error = type("Error", (Exception,), {"__module__": "only_there"})
        raise there.Error("out of cheese")


class NeverEndsWell(EchoEngine):
    async def stop(self) -> None:
        raise UpstreamError("out of cheese while ending")


class NeverStopsEngine(EchoEngine):
    async def stop(self) -> None:
        await asyncio.Event().wait()


class ListRecorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.flushes = 0
        self.closed = False
        self.full = False

    def record(self, rollout_id: str, call: Call) -> None:
        self.calls.append((rollout_id, call))

    def saved(self) -> Future[None]:
        return committed(self.full)

    def flush(self) -> None:
        self.flushes += 1
        self.saved().result()

    def close(self) -> None:
        self.closed = True

    def of(self, rollout_id: str) -> list[Call]:
        return [call for owner, call in self.calls if owner == rollout_id]


def committed(full: bool = False) -> Future[None]:
    future: Future[None] = Future()
    if full:
        future.set_exception(StoreError("run.sqlite cannot be written: disk full"))
    else:
        future.set_result(None)
    return future


class FileRecorder:
    """One line per call, for a recorder in another process."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("a")  # noqa: SIM115  closed by close

    def record(self, rollout_id: str, call: Call) -> None:
        line = [rollout_id, list(call.prompt_ids), list(call.sampled_ids), call.policy_version, call.finish_reason]
        self.file.write(json.dumps(line) + "\n")

    def saved(self) -> Future[None]:
        self.file.flush()
        return committed()

    def flush(self) -> None:
        self.saved()

    def close(self) -> None:
        self.file.close()


def wait_until(true, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
