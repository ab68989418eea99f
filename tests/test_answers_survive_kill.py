"""An answer that an agent has whole is on disk: it survives ``kill -9`` of everything, at any moment."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import Future
from contextlib import closing

import httpx
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat

from art_core.serving import ServingProxy
from art_core.store import Store


class SlowRecorder(ListRecorder):
    """Commits when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.committed: Future[None] = Future()
        self.loop = asyncio.get_running_loop()

    def saved(self) -> Future[None]:
        self.loop.call_soon_threadsafe(self.asked.set)
        return self.committed


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_an_answer_waits_until_its_call_is_committed(stream):
    recorder = SlowRecorder()
    async with (
        await ServingProxy.start(EchoEngine, lambda: recorder, process=False) as serving,
        httpx.AsyncClient(timeout=60) as client,
    ):
        url = await serving.open("r1")
        asked = asyncio.create_task(client.post(f"{url}/chat/completions", json=chat("hello", stream=stream)))
        await recorder.asked.wait()
        assert [call.finish_reason for call in recorder.of("r1")] == ["stop"]
        done, _ = await asyncio.wait({asked}, timeout=0.2)
        assert not done, "the client has the end of an answer that a crash would lose"
        recorder.committed.set_result(None)
        answer = await asked
        assert answer.status_code == 200 and ("[DONE]" in answer.text) == stream


CALLER = """
import asyncio, functools, sys
import httpx
from capture_fakes import EchoEngine, chat
from art_core.serving import ServingProxy
from art_core.store import Store

async def main(file, stream):
    store = Store(file)
    async with (
        await ServingProxy.start(EchoEngine, functools.partial(Store, file)) as serving,
        httpx.AsyncClient(timeout=60) as client,
    ):
        async def rollout(name):
            store.add_rollout(name, task=name)
            url = await serving.open(name)
            for number in range(10_000):
                answer = await client.post(f"{url}/chat/completions", json=chat(f"{name} {number}", stream=stream))
                print(f"{name} {number}" if answer.is_success else answer.text, flush=True)
        await asyncio.gather(*(rollout(f"r{lane}") for lane in range(4)))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "stream"))
"""


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.parametrize("way", ["stream", "whole"])
def test_every_answer_that_an_agent_has_survives_a_kill_of_all_processes(tmp_path, way):
    file = tmp_path / "run.sqlite"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(file), way], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    had = [process.stdout.readline().strip() for _ in range(random.randint(20, 60))]
    os.killpg(process.pid, signal.SIGKILL)
    had += process.communicate(timeout=30)[0].split("\n")[:-1]
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Store(file) as store:
        kept = {bytes(call.sampled_ids).decode() for lane in range(4) for call in store.calls(f"r{lane}")}
        assert set(had) <= kept, sorted(set(had) - kept)
