"""The coding example: hostile programs stay in the sandbox and cannot fake a result; its tasks; its training."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from examples.coding.sandbox import Sandbox

RIGHT = "def f(x):\n    return x + 1"
TESTS = [[[1], 2], [[2], 3]]
DISARMED = "import __main__\n__main__.REFUSED.clear()\n"
"""Takes the interpreter's own audit hook away, as a hostile program would: what is left is the kernel."""
with_and_without_the_hook = pytest.mark.parametrize("before", ["", DISARMED], ids=["audited", "disarmed"])


@pytest.fixture(scope="module", params=["namespaces", "no namespaces"])
def sandbox(request):
    """A sandbox with namespaces, and one as it is where there are none."""
    wanted = request.param == "namespaces"
    with Sandbox(servers=1, seconds=1.0, memory_bytes=64 << 20, namespaces=wanted) as sandbox:
        if wanted != ("namespaces" in sandbox.layers()):
            pytest.skip("no namespaces for this user on this machine")
        yield sandbox


def needs(sandbox: Sandbox, layer: str) -> None:
    """Skip where this machine does not have the layer."""
    if layer not in sandbox.layers():
        pytest.skip(f"no {layer} on this machine, as the sandbox says")


def outcomes(sandbox: Sandbox, program: str, tests=TESTS) -> list[str]:
    """Run a program that must pass no test, and check that it has left nothing and the sandbox goes on."""
    results = sandbox.test(program, tests)
    assert not any(result.passed for result in results)
    assert [it for server in servers() for it in server.children(recursive=True)] == []
    assert all(result.passed for result in sandbox.test(RIGHT, TESTS))
    return [result.happened for result in results]


def servers() -> list[psutil.Process]:
    """Return the servers of all sandboxes of this process."""
    return [it for it in psutil.Process().children() if "jail.py" in " ".join(it.cmdline())]


def body(code: str, before: str = "") -> str:
    """Return a program that does ``code`` when its function is called."""
    return before + "import os, sys\ndef f(x):\n" + "".join(f"    {line}\n" for line in code.splitlines())


@pytest.mark.smoke
@pytest.mark.system
def test_a_right_program_passes_and_a_wrong_one_is_told_why(sandbox):
    assert [it.passed for it in sandbox.test(RIGHT, TESTS)] == [True, True]
    results = sandbox.test("def f(x):\n    return 2 // (x - 2)", [*TESTS, [[3], 2]])
    assert [it.passed for it in results] == [False, False, True]
    assert [it.happened for it in results] == ["returned -2", "raised ZeroDivisionError", "returned 2"]


def test_a_program_may_import_what_computes_and_nothing_else(sandbox):
    program = "import statistics, re, decimal, datetime\ndef f(x):\n    return int(statistics.mean([x, x + 2]))"
    assert all(it.passed for it in sandbox.test(program, TESTS))
    dates = "def f(x):\n    import datetime\n    return datetime.datetime.strptime('2025-01-01', '%Y-%m-%d').day + x"
    assert all(it.passed for it in sandbox.test(dates, TESTS))
    assert outcomes(sandbox, "import sqlite3") == ["raised ModuleNotFoundError"] * 2


def test_a_value_that_is_only_nearly_the_expected_one_fails(sandbox):
    for value in ("True", "2.0", "'2'", "[2]", "(2,)", "None", "float('nan')", "2j", "{2}"):
        outcomes(sandbox, f"def f(x):\n    return {value}")
    assert sandbox.test("def f(x):\n    return (x,)", [[[1], [1]]])[0].happened == "raised TypeError"


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit(0)",
        "os._exit(0)",
        "print('2 passed'); raise SystemExit('ok')",
        "return type('Same', (), {'__eq__': lambda self, other: True, '__hash__': None})()",
        "return type('Two', (int,), {'__eq__': lambda self, other: True, '__hash__': None})(7)",
        'os.write(3, b\'["0000000000000000", 0, "value", 2]\\n\'); os._exit(0)',
        "import json; json.dumps = lambda *a, **k: '[0, 0, \"value\", 2]'",
        "import __main__; __main__._plain = lambda value: 2; __main__._send = print",
        "import builtins; builtins.type = lambda value: int; builtins.len = lambda value: 2; return '2'",
        "import importlib; importlib.reload(sys.modules['__main__'])",
    ],
)
def test_success_cannot_be_faked(sandbox, code):
    outcomes(sandbox, body(code))


@with_and_without_the_hook
def test_what_is_expected_is_nowhere_in_the_process(sandbox, before):
    if before:
        needs(sandbox, "seccomp")
    program = """
import os, sys
def f(x):
    seen, frame = [], sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    for path in ("/proc/self/environ", "/proc/self/cmdline", "/proc/1/cmdline", f"/proc/{os.getppid()}/cmdline"):
        try:
            seen.append(open(path).read())
        except OSError:
            pass
    return [x, str(987654000 + 321) in "".join(seen)]
"""
    assert outcomes(sandbox, before + program, [[[1], 987654321]]) == ["returned [1, False]"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("code", "happened"),
    [
        ("while True: pass", "did not return in time"),
        ("while True: print('x' * 100000)", "did not return in time"),
        ("import time; time.sleep(60)", "did not return in time"),
        ("return sum(9 ** 9 ** 9 for _ in range(9))", "did not return in time"),
        ("return 'x' * 10 ** 7", "returned too much"),
        ("while True: os.write(3, b'x' * 4096)", "returned too much"),
        ("return 'x' * 10 ** 12", "raised MemoryError"),
        ("return '%*d' % (2 ** 31 - 1, 1)", "raised MemoryError"),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", "raised MemoryError"),
        ("text = 'ha'\nfor _ in range(64): text += text", "raised MemoryError"),
        ("import zlib\nreturn zlib.decompress(zlib.compress(bytes(1 << 30))).decode()", None),
        ("return f(x)", "raised RecursionError"),
        ("sys.setrecursionlimit(10 ** 9)\ndef g(y): return [g(z) for z in [y]]\nreturn g(x)", None),
        ("value = []\nfor _ in range(10 ** 5): value = [value]\nreturn value", None),
        ("return 10 ** 5000", None),
    ],
)
def test_a_program_that_takes_too_much_is_ended(sandbox, code, happened):
    if happened == "raised MemoryError":
        needs(sandbox, "rlimit AS")
    found = set(outcomes(sandbox, body(code)))
    # A machine that is busy with other things may come to the end of the time first; a killed program says nothing.
    assert happened is None or found <= {happened, "ended the program", "did not return in time"}


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(8): os.fork()",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "os.system('sleep 60 &')",
        "os.execv('/bin/sleep', ['sleep', '60'])",
        "os.kill(os.getppid(), 9)",
        "os.killpg(0, 9)",
        "import signal; signal.raise_signal(signal.SIGKILL)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nos._exit(0)",
    ],
)
@with_and_without_the_hook
def test_no_process_outlives_or_disturbs(sandbox, code, before):
    if before:
        needs(sandbox, "seccomp")
    outcomes(sandbox, body(code, before))


CALLS = {
    "fork": "57",
    "clone": "56, 17, 0, 0, 0, 0",
    "clone3": "435, 0, 0",
    "socket": "41, 2, 1, 0",
    "kill": "62, os.getppid(), 0",
    "ptrace": "101, 0, 0, 0, 0",
    "unshare": "272, 0x10000000",
    "mount": "165, b'/', b'/', None, 4096, None",
    "io_uring_setup": "425, 8, 0",
    "memfd_create": "319, b'x', 0",
    "execve": "59, b'/bin/true', None, None",
    "mkdir": "83, b'here', 511",
    "openat": "257, -100, b'/etc/passwd', 0, 0",
    "open": "2, b'/proc/self/mem', 0, 0",
    "openat2": "437, -100, b'/etc/passwd', None, 0",
    "process_vm_readv": "310, os.getppid(), None, 0, None, 0, 0",
    "newfstatat": "262, -100, b'/etc/passwd', None, 0",
    "prctl": "157, 22, 0, 0, 0, 0",
}
"""By the numbers of x86_64."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls by number")
def test_the_kernel_refuses_what_the_interpreter_was_not_asked_for(sandbox):
    needs(sandbox, "seccomp")
    calls = ", ".join(f"(raw({call}), ctypes.get_errno())" for call in CALLS.values())
    code = f"import ctypes; raw = sys.modules['confinement'].LIBC.syscall\nreturn [list(it) for it in ({calls})]"
    # EPERM, for each of them.
    assert outcomes(sandbox, body(code, DISARMED), TESTS[:1]) == [f"returned {[[-1, 1]] * len(CALLS)}"]


FILE_CODES = (
    "return open({secret!r}).read()",
    "return os.read(os.open({secret!r}, os.O_RDONLY), 9).decode()",
    "return open('/etc/passwd').read()",
    "return open('/proc/self/environ').read()",
    "return open({here!r}).read()",
    "os.listdir({folder!r}); open({here!r}).read()",
    "open({secret!r}, 'w').write('mine')",
    "open({folder!r} + '/new', 'x')",
    "os.symlink('/etc/passwd', {folder!r} + '/link')",
    "os.link({secret!r}, {folder!r} + '/link')",
    "os.remove({secret!r})",
    "os.rename({secret!r}, {folder!r} + '/new')",
    "os.mkdir({folder!r} + '/new')",
    "os.chmod({secret!r}, 0)",
    "open('here', 'w').write('x')",
    "import tempfile; tempfile.mkstemp()",
)


@with_and_without_the_hook
def test_files_outside_are_neither_written_nor_read(sandbox, tmp_path, before):
    if before:
        needs(sandbox, "seccomp")
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    for code in FILE_CODES:
        program = body(code.format(secret=str(secret), folder=str(tmp_path), here=__file__), before)
        assert all(it.startswith("raised") for it in outcomes(sandbox, program)), code
    assert secret.read_text() == "a secret"
    assert list(tmp_path.iterdir()) == [secret]


@with_and_without_the_hook
def test_nothing_is_reached_over_the_network(sandbox, before):
    if before:
        needs(sandbox, "seccomp")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = listening.getsockname()
        for code in (
            f"import socket; socket.create_connection({address!r}).sendall(b'hello')",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{address[1]}', timeout=1)",
            f"import _socket; _socket.socket().connect({address!r})",
        ):
            outcomes(sandbox, body(code, before))
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.system
def test_a_program_finds_nothing_of_the_environment(sandbox, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    with Sandbox(servers=1, namespaces="namespaces" in sandbox.layers()) as fresh:
        assert fresh.test("import os\ndef f(x):\n    return dict(os.environ)", [[[1], {}]])[0].passed


def test_nothing_is_carried_from_one_program_to_the_next(sandbox):
    sandbox.test("import builtins, json\nbuiltins.left = 1\njson.left = 1\ndef f(x):\n    return x", TESTS)
    program = "import builtins, json\ndef f(x):\n    return x + hasattr(builtins, 'left') + hasattr(json, 'left') + 1"
    assert all(it.passed for it in sandbox.test(program, TESTS))


@pytest.mark.system
def test_a_program_ends_with_its_server(sandbox):
    others = servers()
    wanted = "namespaces" in sandbox.layers()
    with Sandbox(servers=1, seconds=60, namespaces=wanted) as slow, ThreadPoolExecutor() as threads:
        slow.layers()
        (server,) = set(servers()) - set(others)
        running = threads.submit(slow.test, body("import time; time.sleep(60)"), TESTS)
        while len(started := server.children(recursive=True)) < 1 + wanted:
            assert not running.done()
        server.kill()
        assert [it.happened for it in running.result()] == ["ended the program"] * 2
        assert psutil.wait_procs(started, timeout=5)[1] == []


@pytest.mark.system
def test_a_server_that_was_lost_is_replaced():
    others = servers()
    with Sandbox(servers=1) as sandbox:
        assert sandbox.test(RIGHT, TESTS)[0].passed
        (server,) = set(servers()) - set(others)
        server.kill()
        server.wait()
        assert [it.happened for it in sandbox.test(RIGHT, TESTS)] == ["ended the program"] * 2
        assert sandbox.test(RIGHT, TESTS)[0].passed


@pytest.mark.system
def test_an_interrupted_test_leaves_the_sandbox_in_order():
    def interrupt(*_):
        raise KeyboardInterrupt

    others = servers()
    with Sandbox(servers=1, seconds=5.0) as sandbox:
        assert sandbox.test(RIGHT, TESTS)[0].passed
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                sandbox.test(body("while True: pass"), TESTS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert servers() == others
        assert [it.passed for it in sandbox.test(RIGHT, TESTS)] == [True, True]


@pytest.mark.system
def test_a_process_with_thousands_of_open_files_can_test():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not have so many open files")
    with contextlib.ExitStack() as stack:
        if soft < 1200:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1050):
            stack.enter_context(open(os.devnull))
        with Sandbox(servers=1) as sandbox:
            assert [it.passed for it in sandbox.test(RIGHT, TESTS)] == [True, True]
