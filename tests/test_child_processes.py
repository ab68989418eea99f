"""A rollout's child processes know where their model calls go, however they were started; nobody else's are touched."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool, ThreadPool

import child_work
import pytest
from child_work import ENVIRONMENT, PRINT, everything, seen

from art_core.attribution import exempt, inside_rollout, names, run_in_child_processes, workers
from art_core.types import RolloutAddress

# Pools have threads of their own, and newer Pythons warn of every fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
METHODS = multiprocessing.get_all_start_methods()
PID = os.getpid()
PROGRAM = [sys.executable, "-c", PRINT]


def address(name: str, *passthrough: str) -> RolloutAddress:
    return RolloutAddress(name, f"http://127.0.0.1:1/rollouts/{name}/v1", "key", "policy", frozenset(passthrough))


def variables(name: str) -> dict[str, str]:
    return {
        "ART_ROLLOUT_ID": name,
        "OPENAI_BASE_URL": f"http://127.0.0.1:1/rollouts/{name}/v1",
        "OPENAI_API_BASE": f"http://127.0.0.1:1/rollouts/{name}/v1",
        "OPENAI_API_KEY": "key",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:1/rollouts/{name}",
        "ANTHROPIC_API_URL": f"http://127.0.0.1:1/rollouts/{name}",
        "ANTHROPIC_API_KEY": "key",
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_BEDROCK_BASE_URL": f"http://127.0.0.1:1/rollouts/{name}",
        "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": f"http://127.0.0.1:1/rollouts/{name}",
        "GOOGLE_GEMINI_BASE_URL": f"http://127.0.0.1:1/rollouts/{name}",
        "GOOGLE_VERTEX_BASE_URL": f"http://127.0.0.1:1/rollouts/{name}",
        "OLLAMA_HOST": f"http://127.0.0.1:1/rollouts/{name}",
    }


@pytest.fixture(autouse=True)
def own_environment():
    """Whatever a test starts, this process keeps the environment that it had."""
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    assert {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} == before


@pytest.fixture
def preparations(monkeypatch):
    """Nothing has been prepared in this process yet; it knows who is calling."""
    monkeypatch.setattr(workers, "_preparations", [])
    monkeypatch.setattr(names, "_agent_sources", [lambda: "node" if os.getpid() == PID else None])


def result_of(process, connection):
    process.start()
    answer = connection.recv()
    process.join()
    assert process.exitcode == 0
    return answer


def child(method: str, answer=everything):
    """Run ``answer`` in a process of its own and return what it returned."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    return result_of(context.Process(target=child_work.send, args=(there, answer)), here)


@pytest.mark.system
def test_a_program_finds_the_address_in_its_environment_whoever_starts_it(capfd):
    async def asyncios() -> bytes:
        process = await asyncio.create_subprocess_exec(*PROGRAM, stdout=subprocess.PIPE)
        return (await process.communicate())[0]

    command = shlex.join(PROGRAM)
    with inside_rollout(address("r1")), os.popen(command) as opened:
        printed = [
            subprocess.check_output(PROGRAM),
            subprocess.check_output(PROGRAM, env={"PATH": os.environ["PATH"]}),
            subprocess.check_output(PROGRAM, env={b"OPENAI_BASE_URL": b"http://own"}),
            opened.read(),
            asyncio.run(asyncios()),
        ]
        assert os.system(f"{command}; exit 3") == 3 << 8
        for spawn in (os.posix_spawn, os.posix_spawnp):
            assert os.waitpid(spawn(sys.executable, PROGRAM, os.environ), 0)[1] == 0
        pid = os.fork()
        if not pid:
            os.execve(sys.executable, PROGRAM, dict(os.environ, OPENAI_API_KEY="own"))
        os.waitpid(pid, 0)
    printed += capfd.readouterr().out.splitlines()
    assert [json.loads(one) for one in printed] == [variables("r1")] * 9
    assert set(variables("r1")) == set(ENVIRONMENT)


@pytest.mark.system
def test_what_else_is_in_the_environment_stays_and_a_proxy_is_not_asked_for_the_address(monkeypatch):
    code = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with inside_rollout(address("r1")):
        found = json.loads(subprocess.check_output(code))
        # What a plugin adds, if another test has loaded one, isn't the core's.
        assert {name: found[name] for name in found if "CLAUDE" not in name} == dict(os.environ) | variables("r1")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "example.org")
        found = json.loads(subprocess.check_output(code))
    assert found["NO_PROXY"] == found["no_proxy"] == "example.org,127.0.0.1"
    monkeypatch.undo()


@pytest.mark.system
def test_programs_outside_a_rollout_beside_one_and_exempt_ones_are_left_alone():
    nothing = dict.fromkeys(ENVIRONMENT) | {n: os.environ[n] for n in ENVIRONMENT if n in os.environ}
    entered, left = threading.Event(), threading.Event()

    def rollout() -> None:
        with inside_rollout(address("r1")):
            entered.set()
            left.wait()

    thread = threading.Thread(target=rollout)
    thread.start()
    entered.wait()
    assert json.loads(subprocess.check_output(PROGRAM)) == nothing
    assert child("fork", seen) is None
    left.set()
    thread.join()
    with inside_rollout(address("r2")), exempt():
        assert json.loads(subprocess.check_output(PROGRAM)) == nothing
        assert child("fork", seen) is None
    assert json.loads(subprocess.check_output(PROGRAM)) == nothing


@pytest.mark.smoke
@pytest.mark.system
async def test_the_programs_of_concurrent_rollouts_stay_apart():
    async def rollout(name: str) -> str:
        with inside_rollout(address(name)):
            await asyncio.sleep(0)
            process = await asyncio.create_subprocess_exec("sh", "-c", "echo $ART_ROLLOUT_ID", stdout=subprocess.PIPE)
            return (await process.communicate())[0].decode().strip()

    names = [f"r{i}" for i in range(8)]
    assert await asyncio.gather(*map(rollout, names)) == names


@pytest.mark.system
@pytest.mark.parametrize("method", METHODS)
def test_a_process_belongs_to_the_rollout_that_started_it(method, preparations):
    run_in_child_processes(child_work.prepare)
    with inside_rollout(address("r1")):
        answer = child(method)
    forked = method == "fork"
    assert answer == {
        "here": "r1",
        "agent": "node",
        "thread": "r1",
        "program": "r1",
        "own": "r1",
        "prepared": not forked,
    }
    assert child(method, seen) is None


@pytest.mark.system
def test_a_subclass_of_process_runs_as_it_did():
    here, there = multiprocessing.Pipe()
    process = child_work.Sending(there)
    with inside_rollout(address("r1")):
        assert result_of(process, here)["here"] == "r1"
    assert "run" not in vars(process)


@pytest.mark.system
def test_a_process_starts_if_another_library_has_hidden_the_wrapper_of_an_earlier_rollout(monkeypatch):
    owner = multiprocessing.process.BaseProcess
    with inside_rollout(address("r1")):
        ours = owner.start
        monkeypatch.setattr(owner, "start", lambda self: ours(self))
    with inside_rollout(address("r2")):
        assert child("fork", seen) == "r2"
    monkeypatch.undo()
    owner.start = ours.__wrapped__


@pytest.mark.system
@pytest.mark.parametrize("method", METHODS)
def test_how_a_process_ends_is_as_it_was(method, capfd):
    with inside_rollout(address("r1")):
        process = multiprocessing.get_context(method).Process(target=child_work.end_badly, daemon=True)
        process.start()
        process.join()
    assert process.exitcode == 7


@pytest.mark.system
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("made", ["before", "inside"])
def test_an_executors_processes_work_for_whoever_gives_them_work(method, made, preparations):
    def pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method))

    with contextlib.ExitStack() as stack:
        before = stack.enter_context(pool()) if made == "before" else None
        if before:
            assert before.submit(seen).result() is None
        run_in_child_processes(child_work.prepare)
        with inside_rollout(address("r1")):
            executor = before or stack.enter_context(pool())
            answer = executor.submit(everything).result()
            assert list(executor.map(seen, range(4), chunksize=2)) == ["r1"] * 4
            assert executor.submit(seen, model="gpt").result() == "r1"
            with exempt():
                assert executor.submit(seen).result() is None
        # A worker forked where the rollout ran began with what was prepared there.
        prepared = made == "before" or method != "fork"
        assert answer == {
            "here": "r1",
            "agent": "node",
            "thread": "r1",
            "program": "r1",
            "own": None,
            "prepared": prepared,
        }
        assert executor.submit(seen).result() is None
        with inside_rollout(address("r2")):
            assert executor.submit(seen).result() == "r2"


@pytest.mark.system
async def test_concurrent_rollouts_share_a_pool_of_processes():
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(2) as pool:

        async def rollout(name: str) -> set[str]:
            with inside_rollout(address(name)):
                return set(await asyncio.gather(*(loop.run_in_executor(pool, seen) for _ in range(4))))

        assert await asyncio.gather(*(rollout(f"r{i}") for i in range(8))) == [{f"r{i}"} for i in range(8)]


@pytest.mark.system
@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("kind", [Pool, ThreadPool])
def test_every_way_to_give_a_pool_work_carries_the_rollout(kind, made):
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(kind(2)) if made == "before" else None
        with inside_rollout(address("r1")):
            pool = before or stack.enter_context(kind(2))
            once = [pool.apply(seen), pool.apply_async(func=seen).get()]
            assert pool.map(str, (seen() for _ in range(3))) == ["r1"] * 3
            many = [
                pool.map(seen, range(3)),
                pool.map_async(seen, range(3)).get(),
                pool.starmap(seen, [(1,), (2,), (3,)]),
                pool.starmap_async(seen, [(1,), (2,), (3,)]).get(),
                list(pool.imap(seen, range(3), chunksize=2)),
                list(pool.imap_unordered(seen, range(3))),
            ]
            with exempt():
                assert pool.apply(seen) is None
        assert once == ["r1"] * 2
        assert many == [["r1"] * 3] * 6
        assert pool.map(seen, range(4)) == [None] * 4
        with inside_rollout(address("r2")):
            assert pool.apply(seen) == "r2"


@pytest.mark.system
def test_a_fork_by_hand_keeps_the_rollout():
    reader, writer = os.pipe()
    with inside_rollout(address("r1", "judge")):
        pid = os.fork()
        if not pid:
            os.write(writer, f"{seen()} {seen(model='judge')} {os.environ['ART_ROLLOUT_ID']}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "r1 None r1"


def test_nothing_is_wrapped_while_no_rollout_is_live():
    def wrapped() -> list[object]:
        owners = [(subprocess.Popen, "__init__"), (os, "system"), (os, "execve"), (os, "posix_spawn"), (Pool, "map")]
        return [getattr(*one) for one in (*owners, (ProcessPoolExecutor, "submit"), (multiprocessing.Process, "start"))]

    before = wrapped()
    with inside_rollout(address("r1")):
        assert not set(before) & set(wrapped())
    assert wrapped() == before
