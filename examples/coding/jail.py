"""A bare interpreter that forks a confined process for every program. It never sees the expected values.

Started by ``sandbox.py`` as ``python -I -S -B jail.py JSON``; standard library only. A request is a line of JSON on stdin,
an answer a line of JSON on stdout. The output of a program's process is passed on unread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

LIMITS = json.loads(sys.argv[1])
"""``cpu_seconds``, ``seconds``, ``memory_bytes``, ``output_bytes``, ``namespaces``."""
MODULES = """
math cmath decimal fractions numbers statistics random collections itertools functools operator heapq bisect copy re string
textwrap unicodedata json datetime _strptime time calendar enum dataclasses typing abc types array struct hashlib base64
binascii io encodings.ascii encodings.latin_1 encodings.utf_16 encodings.utf_32
""".split()  # noqa: SIM905 - names to read, not a column of them
"""What programs can import. Loaded before the first program, because no file can be opened afterwards."""
RESULTS = 3
"""The descriptor on which a program's process sends its results; 0, 1 and 2 are /dev/null, and it has no others."""
if sys.platform == "linux":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import confinement

    del sys.path[0]
for module in MODULES:
    importlib.import_module(module)
sys.path.clear()
FILTERED = sys.platform == "linux" and os.uname().machine in confinement.AUDIT_ARCH
Json = dict[str, Any]


def main() -> None:
    """Serve until stdin ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    # An agent's process may pass the policy's address to its children in their environment.
    os.environ.clear()
    if LIMITS["namespaces"]:
        try:
            confinement.leave_the_machine()
        except OSError as error:
            _answer(answers, {"refused": str(error)})
            return
    if FILTERED:
        confinement.call_filter()  # made once, before any fork
    gc.freeze()
    _answer(answers, {"layers": json.loads(_fork(None)["output"])})
    for line in requests:
        _answer(answers, _fork(json.loads(line)))


def _answer(descriptor: int, answer: Json) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _fork(request: Json | None) -> Json:
    """Run a request (None: report which layers are in force) in its own process, and kill whatever remains of it."""
    results, sender = os.pipe()
    child = os.fork()
    if child == 0:
        _become_program(request, sender)
    os.close(sender)
    output, ended = _read(results)
    os.close(results)
    # Everything that it started is in its group; with namespaces, the death of their first process kills all in them.
    # macOS returns EPERM if the whole group is dead.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)  # not reaped yet, so the pid is still its own
    os.waitpid(child, 0)
    return {"output": output.decode("latin-1"), "ended": ended}


def _read(descriptor: int) -> tuple[bytes, str]:
    output, deadline = b"", time.monotonic() + LIMITS["seconds"]
    while len(output) <= LIMITS["output_bytes"]:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            return output, "time"
        piece = os.read(descriptor, 65536)
        if not piece:
            return output, "exit"
        output += piece
    return b"", "output"


def _become_program(request: Json | None, sender: int) -> None:
    """Confine this process and run the request; never returns."""
    try:
        os.setsid()
        os.dup2(sender, RESULTS)
        os.closerange(RESULTS + 1, 256)
        _end_with_the_server()
        if LIMITS["namespaces"]:
            confinement.unshare(confinement.NEW_PIDS)
            if child := os.fork():
                os.close(RESULTS)
                os.waitpid(child, 0)
                os._exit(0)
            _end_with_the_server()
        layers = _confine()
        if request is None:
            _send(layers)
        else:
            _run(request)
    finally:
        os._exit(0)


def _end_with_the_server() -> None:
    """Make sure that this process doesn't outlive the server, even if that is killed."""
    if sys.platform != "linux":
        signal.alarm(int(LIMITS["seconds"]) + 2)
        return
    confinement.die_with_parent()
    results = select.poll()
    results.register(RESULTS, 0)
    if results.poll(0):  # nobody reads them: the server was killed before the line above
        os._exit(0)


def _confine() -> list[str]:
    """Apply every layer that is available here, and return their names."""
    layers = ["namespaces"] if LIMITS["namespaces"] else []
    for name, limit in {
        "CPU": LIMITS["cpu_seconds"], "AS": LIMITS["memory_bytes"], "FSIZE": 0, "NOFILE": 32, "CORE": 0, "NPROC": 0,
    }.items():  # fmt: skip
        # macOS has RLIMIT_AS but refuses to set it.
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
            layers.append(f"rlimit {name}")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if FILTERED:
        with contextlib.suppress(OSError):
            confinement.filter_calls()
            layers.append("seccomp")
    sys.addaudithook(_refuse)
    return [*layers, "audit hook"]


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    """Refuse what a small function doesn't need. Only a hook inside Python: a determined program gets around it."""
    if event.partition(".")[0] in REFUSED:
        raise PermissionError(f"{event} is not allowed here")


REFUSED = set("open os socket subprocess ctypes signal fcntl shutil tempfile pty mmap sqlite3 gc".split())  # noqa: SIM905
"""Prefixes of the interpreter's audit events."""


def _run(request: Json) -> None:
    """Call the program's function with each of the arguments, and send each result at once."""
    names: Json = {"__name__": "program"}
    nonce = request["nonce"]
    try:
        exec(compile(request["code"], "program", "exec"), names)
        function = names[request["function"]]
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, SystemExit too
        _send([nonce, None, "error", _describe(error)])
        return
    for number, arguments in enumerate(request["arguments"]):
        try:
            _send([nonce, number, "value", _plain(function(*arguments))])
        except BaseException as error:  # noqa: BLE001 - as above
            _send([nonce, number, "error", _describe(error)])


def _plain(value: Any) -> Any:
    """Return the value if it is exactly of a JSON type: a tuple isn't a list, and a subclass of int isn't an int."""
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"returned a {type(value).__name__}")


def _describe(error: BaseException) -> str:
    return type(error).__name__[:100]


def _send(message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(RESULTS, data) :]


if __name__ == "__main__":
    main()
