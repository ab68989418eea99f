"""The process in which a target is fuzzed: our modules are loaded with counters, then libFuzzer has the word and ends it.

``python -m fuzz.instrumented TARGET FOUND LIBFUZZER-OPTION...``; what goes wrong is written to the folder FOUND, once for each
line of ours that it came from, and the search goes on.
"""

from __future__ import annotations

import faulthandler
import hashlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import atheris

STUCK = 10
"""Seconds for one input, beyond which it is told where every thread is: libFuzzer itself shows no Python."""
OURS = ["jinja2", "art_core", "art_gateway", "art_openai", "art_ruler", "art_server", "art_vllm"]


def telling(one_input: Callable[[bytes], None], folder: Path) -> Callable[[bytes], None]:
    """Return ``one_input`` as one that writes what it raises to ``folder`` and goes on."""
    seen: set[str] = set()

    def run(data: bytes) -> None:
        faulthandler.dump_traceback_later(STUCK)
        try:
            one_input(data)
        except Exception as error:  # noqa: BLE001 - the boundary of one input: whatever comes of it is a finding
            frames = [
                it
                for it in traceback.extract_tb(error.__traceback__)
                if any(f"/{name}" in it.filename for name in OURS)
            ]
            frames = frames or traceback.extract_tb(error.__traceback__)
            where = f"{type(error).__name__} {Path(frames[-1].filename).name}:{frames[-1].lineno}"
            if isinstance(error, AssertionError):
                where = f"{where} {re.sub(r'[0-9a-f]{6,}|[0-9]+', '', str(error))[:120]!r}"
            if where not in seen:
                seen.add(where)
                name = hashlib.sha256(data).hexdigest()[:16]
                (folder / name).write_bytes(data)
                (folder / f"{name}.txt").write_text(f"{where}\n{traceback.format_exc()}")
                print(f"FOUND {where}: {error!s:.300}", file=sys.stderr, flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return run


def main() -> None:
    name, found, *options = sys.argv[1:]
    with atheris.instrument_imports(include=OURS):
        from fuzz.corpus import target

        one_input = target(name).one_input
    atheris.Setup([sys.argv[0], *options], telling(one_input, Path(found)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
