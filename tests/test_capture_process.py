"""ServingProxy with a child process: starting it, what is pickled, and what happens when something dies."""

import asyncio
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from types import ModuleType

import httpx
import psutil
import pytest
from capture_fakes import (
    BrokenEngine,
    DiesUnstarted,
    EchoEngine,
    FileRecorder,
    ForksEngine,
    ListRecorder,
    NeverEndsWell,
    NeverStopsEngine,
    PickyEngine,
    PrintingEngine,
    SlowStartEngine,
    ThereEngine,
    wait_until,
)

from art_core.errors import CaptureError, ConfigError, UpstreamError
from art_core.serving import ServingProxy, process, start_early
from art_core.serving.process import ServingProcess
from art_core.store import Store
from art_core.types import Sampling, Weights

pytestmark = pytest.mark.usefixtures("cold_starts")


async def say(url: str, text: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": text}]}
        response = await client.post(f"{url}/chat/completions", json=body, timeout=30)
        return response.json()["choices"][0]["message"]["content"]


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z" if Path("/proc").is_dir() else True


@pytest.mark.system
async def test_a_process_serves_swaps_shared_tensors_and_ends(tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4).share_memory_()
    serving = await ServingProxy.start(EchoEngine, partial(FileRecorder, str(tmp_path / "calls")))
    child = serving._server._process
    try:
        url = await serving.open("r1")
        assert await say(url, "hello") == "hello"
        await serving.swap(Weights(version=1, path=None, live={"weight": tensor}))
        assert await say(url, "live") == "0.0"
        tensor.fill_(2.0)
        assert await say(url, "live") == "8.0", "the engine sees what the learner changes in place"
        await serving.swap(Weights(version=2, path=tmp_path, live={"weight": tensor}))
        tensor.fill_(3.0)
        assert await say(url, "live") == "12.0"
        await serving.close("r1")
        lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        assert [(line[0], line[3]) for line in lines] == [("r1", 0), ("r1", 1), ("r1", 1), ("r1", 2)]
    finally:
        await serving.stop()
    await serving.stop()
    assert child.returncode == 0


@pytest.mark.system
async def test_sixty_four_rollouts_open_at_once_while_weights_load(tmp_path):
    async with await ServingProxy.start(EchoEngine, ListRecorder) as serving:
        load = asyncio.create_task(serving.swap(Weights(version=1, path=None)))
        urls = await asyncio.gather(*(serving.open(f"r{number}") for number in range(64)))
        answers = await asyncio.gather(*(say(url, f"{number}") for number, url in enumerate(urls)))
        assert answers == [str(number) for number in range(64)]
        await asyncio.gather(*(serving.close(f"r{number}") for number in range(64)), load)


@pytest.mark.smoke
@pytest.mark.system
async def test_an_engines_start_error_is_raised_here():
    with pytest.raises(UpstreamError, match="no such model: 'tinny'") as failure:
        await ServingProxy.start(BrokenEngine, ListRecorder)
    assert (failure.value.status, failure.value.code) == (404, "model_not_found")
    assert failure.value.__notes__[0].startswith("In the serving process:\nTraceback (most recent call last):\n  File ")
    assert "capture_fakes.py" in failure.value.__notes__[0]


@pytest.mark.system
async def test_a_process_that_cannot_be_started_raises_and_leaves_no_file_open(monkeypatch, tmp_path):
    before = os.listdir("/dev/fd")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    async with asyncio.timeout(20):
        with pytest.raises(CaptureError, match="cannot be started.*no-python"):
            await ServingProxy.start(EchoEngine, ListRecorder)
    assert len(os.listdir("/dev/fd")) == len(before)


def serving_processes() -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "art_core.serving.process"], capture_output=True)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.system
async def test_an_early_process_can_import_from_a_path_added_later(tmp_path, monkeypatch):
    start_early("no_such_module", "sqlite3")
    (early,) = serving_processes()
    (tmp_path / "imported_later.py").write_text(
        "from capture_fakes import EchoEngine\nclass LaterEngine(EchoEngine): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with await ServingProxy.start(importlib.import_module("imported_later").LaterEngine, ListRecorder) as serving:
        assert serving_processes() == [early]
        assert await say(await serving.open("r1"), "hello") == "hello"
        async with await ServingProxy.start(EchoEngine, ListRecorder):
            assert len(serving_processes()) == 2
    assert serving_processes() == []


@pytest.mark.system
async def test_an_early_process_is_not_used_in_another_environment(monkeypatch):
    start_early()
    (early,) = serving_processes()
    monkeypatch.setenv("SET_BY_THE_AGENTS_MODULE", "1")
    async with await ServingProxy.start(EchoEngine, ListRecorder):
        (serving,) = serving_processes()
        assert serving != early


@pytest.mark.system
def test_an_unused_early_process_ends_with_its_program():
    started = "from art_core.serving import process; process.start_early('time'); [early] = process._early.values()"
    code = f"{started}; print(early._process.pid)"
    assert not running(int(subprocess.check_output([sys.executable, "-c", code])))


async def test_too_many_open_files_is_an_error_that_names_the_limit():
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    async with asyncio.timeout(20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, kept[1]))
        try:
            with pytest.raises(CaptureError, match="Too many open files; raise the limit of open files"):
                await ServingProxy.start(EchoEngine, ListRecorder)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)


@pytest.mark.system
async def test_a_process_that_ends_before_its_first_command_is_reported_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    async with asyncio.timeout(20):
        with pytest.raises(CaptureError, match="exit code 1"):
            await ServingProxy.start(EchoEngine, ListRecorder)


@pytest.mark.system
async def test_a_start_that_times_out_is_reported_even_if_the_process_dies_while_stopping():
    with pytest.raises(CaptureError, match="did not finish 'start' within 3 seconds"):
        await ServingProxy.start(DiesUnstarted, ListRecorder, timeout=3)


@pytest.mark.system
async def test_an_error_that_cannot_be_pickled_is_raised_as_text():
    with pytest.raises(CaptureError, match="PickyError: 1 and 2"):
        await ServingProxy.start(PickyEngine, ListRecorder)


@pytest.mark.system
async def test_a_cancelled_start_leaves_no_process():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await ServingProxy.start(SlowStartEngine, ListRecorder)
    assert serving_processes() == []


@pytest.mark.system
async def test_calls_and_log_records_of_the_process_reach_this_one(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="art_core")
    engine = partial(EchoEngine, 0.01)
    with Store(tmp_path / "run.sqlite") as store:
        async with await ServingProxy.start(engine, partial(Store, tmp_path / "run.sqlite")) as serving:
            store.add_rollout("r1", task="a task", step=0)
            url = await serving.open("r1", Sampling(temperature=1.0))
            body = {"messages": [{"role": "user", "content": "x" * 100}], "temperature": 0}
            headers = {"x-art-request-id": "q1"}
            async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client:
                async with client.stream("POST", f"{url}/chat/completions", json=body | {"stream": True}) as answer:
                    await anext(answer.aiter_lines())  # sampling has begun; now the client leaves
                body["messages"][0]["content"] = "again"
                await client.post(f"{url}/chat/completions", json=body)
            await serving.close("r1")
            store.finish_rollout("r1", output="done")
        [call] = store.trajectory("r1").calls
        assert (bytes(call.sampled_ids), call.finish_reason, call.temperature) == (b"again", "stop", 1.0)
    assert "the agent requests temperature=0" in caplog.text
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        kept = db.execute("SELECT finish_reason, replaced FROM calls ORDER BY seq").fetchall()
    db.close()
    assert kept == [("aborted", 1), ("stop", 0)]


@pytest.mark.system
@pytest.mark.parametrize("error", [OSError("no space left"), SystemExit(3)], ids=["raises", "exits"])
async def test_a_failing_log_handler_does_not_break_replies(monkeypatch, error):
    heard = []

    class Fails(logging.Handler):
        def emit(self, record):
            heard.append(record)
            raise error

    log = logging.getLogger("art_core")
    monkeypatch.setattr(log, "handlers", [Fails()])
    monkeypatch.setattr(log, "propagate", False)
    async with asyncio.timeout(60), await ServingProxy.start(EchoEngine, ListRecorder) as serving:
        url = await serving.open("r1", Sampling(temperature=1.0))
        body = {"messages": [{"role": "user", "content": "one"}], "temperature": 0}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            await client.post(f"{url}/chat/completions", json=body, timeout=30)
        await serving.close("r1")
        assert "temperature=0" in heard[0].getMessage()
        assert await say(await serving.open("r2", Sampling()), "two") == "two"
        await serving.close("r2")


@pytest.mark.system
async def test_a_dead_process_fails_pending_and_later_commands():
    serving = await ServingProxy.start(EchoEngine, ListRecorder)
    try:
        url = await serving.open("r1")
        await serving.pause()
        await serving.resume()
        with pytest.raises(httpx.HTTPError):
            await say(url, "die")
        with pytest.raises(CaptureError, match=r"died: it ended \(exit code 7\)\. Its last output"):
            while True:
                await serving.swap(Weights(version=1, path=None))
        with pytest.raises(CaptureError, match="the serving process died"):
            await serving.open("r2")
    finally:
        await serving.stop()


@pytest.mark.system
async def test_a_killed_process_is_reported_with_its_signal():
    serving = await ServingProxy.start(partial(EchoEngine, 0.05), ListRecorder)
    try:
        url = await serving.open("r1")
        asking = asyncio.create_task(say(url, "x" * 500))
        await asyncio.sleep(0.3)
        closing = asyncio.create_task(serving.close("r1", grace=30))
        await asyncio.sleep(0.1)
        serving._server._process.kill()
        with pytest.raises(CaptureError, match="SIGKILL.*out of memory"):
            await closing
        with pytest.raises(httpx.HTTPError):
            await asking
    finally:
        await serving.stop()


@pytest.mark.system
async def test_a_command_that_a_killed_process_has_not_read_fails():
    serving = await ServingProxy.start(EchoEngine, ListRecorder)
    try:
        os.kill(serving._server._process.pid, signal.SIGSTOP)
        asked = serving._server.request("flush")
        serving._server._process.kill()
        with pytest.raises(CaptureError, match="SIGKILL"):
            asked.result(30)
    finally:
        await serving.stop()


@pytest.mark.system
async def test_a_process_whose_child_lives_on_is_seen_to_be_dead(tmp_path):
    serving = await ServingProxy.start(partial(ForksEngine, tmp_path / "child"), ListRecorder)
    try:
        serving._server._process.kill()
        with pytest.raises(CaptureError, match="SIGKILL"):
            async with asyncio.timeout(30):
                await serving.open("r1")
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        await serving.stop()


@pytest.mark.system
async def test_look_and_stacks_work_from_any_thread_and_time_out():
    async with await ServingProxy.start(partial(EchoEngine, 0.05), ListRecorder) as serving:
        asking = asyncio.create_task(say(await serving.open("r1"), "x" * 20))
        await asyncio.to_thread(wait_until, lambda: serving.snapshot(5.0)[0].rollouts.get("r1", (0, None))[1])
        stacks = serving.stacks(5.0)
        assert "thread art-capture:" in stacks and "capture_fakes.py" in stacks
        await asking
        serving._server._process.send_signal(signal.SIGSTOP)
        try:
            assert serving.snapshot(0.05) == (None, None)
            assert serving.stacks(0.05) == "no answer within 0.05 seconds"
        finally:
            serving._server._process.send_signal(signal.SIGCONT)
        assert await say(await serving.open("r2"), "on") == "on"


@pytest.mark.system
async def test_a_closure_is_refused_with_what_to_pass_instead():
    engine = EchoEngine()
    with pytest.raises(ConfigError, match=r"cannot send 'start' to the serving process: .*module that can be imported"):
        await ServingProxy.start(lambda: engine, ListRecorder)


@pytest.mark.system
async def test_stop_raises_the_engines_error_from_the_process():
    serving = await ServingProxy.start(NeverEndsWell, ListRecorder)
    assert [it.daemon for it in threading.enumerate() if it.name == "art-serving"] == [True]
    with pytest.raises(UpstreamError, match="out of cheese while ending"):
        await serving.stop()


@pytest.mark.system
def test_an_orphan_whose_engine_never_stops_ends_in_time(monkeypatch):
    soon = "import art_core.serving.process as _process\n_process.ORPHAN_SECONDS = 0.5\n"
    monkeypatch.setattr(process, "PROGRAM", soon + process.PROGRAM)
    serving = ServingProcess()
    serving.start(NeverStopsEngine, ListRecorder).result(30)
    try:
        serving._pipe.connection.close()  # as if this process had died
        assert serving._process.wait(30) == 1
    finally:
        serving._process.kill()


@pytest.fixture
def unstarted(cold_starts, monkeypatch):
    monkeypatch.setattr(process, "_begin", lambda *modules: (None, None))


@pytest.mark.usefixtures("unstarted")
def test_a_log_record_that_cannot_be_unpickled_is_dropped():
    ServingProcess()._receive(None, True, b"no pickle")


@pytest.mark.usefixtures("unstarted")
def test_stop_raises_its_own_errors(monkeypatch):
    serving = ServingProcess()
    monkeypatch.setattr(serving, "_end", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serving.stop().result(10)


@pytest.mark.system
async def test_an_engine_of_an_unimportable_module_is_refused_with_where_to_define_it(monkeypatch):
    here = ModuleType("only_here")
    here.Engine = type("Engine", (EchoEngine,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", here)
    with pytest.raises(ConfigError) as refused:
        await ServingProxy.start(here.Engine, ListRecorder)
    why = "cannot unpickle the arguments of 'start' (ModuleNotFoundError: No module named 'only_here')"
    assert why in str(refused.value)


@pytest.mark.system
async def test_an_error_that_cannot_be_unpickled_here_is_reported():
    with pytest.raises(CaptureError, match="cannot read a reply of the serving process: No module named 'only_there'"):
        await ServingProxy.start(ThereEngine, ListRecorder)


@pytest.mark.system
async def test_idle_threads_of_the_process_do_not_spin_by_default(monkeypatch):
    for told, kept in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if told:
            monkeypatch.setenv("OMP_WAIT_POLICY", told)
        async with await ServingProxy.start(EchoEngine, ListRecorder) as serving:
            environment = psutil.Process(serving._server._process.pid).environ()
        assert environment["OMP_WAIT_POLICY"] == kept and environment["PATH"] == os.environ["PATH"]


@pytest.mark.system
async def test_an_engines_prints_go_to_stderr(capfd):
    async with await ServingProxy.start(PrintingEngine, ListRecorder):
        pass
    said = capfd.readouterr()
    assert said.out == "" and "loading the model" in said.err


@pytest.mark.system
def test_a_process_whose_start_failed_refuses_commands_and_can_be_stopped():
    serving = ServingProcess()
    with pytest.raises(UpstreamError, match="no such model"):
        serving.start(BrokenEngine, ListRecorder).result(30)
    with pytest.raises(CaptureError, match="the serving thread has ended; start a new server"):
        serving.request("flush").result(30)
    assert serving.stop().result(30) is None
    assert serving._process.returncode == 0


@pytest.mark.system
async def test_a_port_in_use_is_reported_by_the_process_too():
    async with await ServingProxy.start(EchoEngine, ListRecorder, process=False) as serving:
        port = int(serving.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port}"):
            await ServingProxy.start(EchoEngine, ListRecorder, port=port)


SCRIPT = """
import asyncio, os, signal, sys
sys.path.insert(0, {tests!r})
from art_core.serving import ServingProxy, start_early
from art_core.errors import ConfigError
from capture_fakes import EchoEngine, ListRecorder

print("the script runs", flush=True)

class MyEngine(EchoEngine):
    pass

async def main():
    try:
        await ServingProxy.start(MyEngine, ListRecorder)
    except ConfigError as error:
        print("refused:", error, flush=True)
    serving = await ServingProxy.start(EchoEngine, ListRecorder)
    print(serving._server._process.pid, flush=True)
    {then}

asyncio.run(main())
"""


def script(tmp_path: Path, then: str) -> subprocess.Popen:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), then=then))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
def test_a_script_without_a_main_guard_runs_once_and_cannot_serve_its_own_classes(tmp_path):
    with script(tmp_path, "await serving.stop()") as run:
        out, err = run.communicate(timeout=60)
    assert out.count("the script runs") == 1
    assert "refused: the serving process cannot unpickle" in out
    assert "__main__" in out
    assert (run.returncode, err) == (0, "")


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_its_parent(tmp_path, number):
    with script(tmp_path, "await asyncio.sleep(60)") as run:
        assert run.stdout.readline() == "the script runs\n"
        assert run.stdout.readline().startswith("refused")
        child = int(run.stdout.readline())
        assert running(child)
        # A terminal's Ctrl-C reaches both; the child leaves it to its parent.
        if number == signal.SIGINT:
            os.kill(child, number)
        run.send_signal(number)
        run.communicate(timeout=30)
    wait_until(lambda: not running(child), 20)
