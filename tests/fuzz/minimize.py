"""Many inputs -> few that reach the same lines of ours."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from fuzz.corpus import target

OURS = ("/art_", "/capture/")
MOST = 200
"""Inputs that are kept of a target."""


def fewest(name: str, inputs: list[bytes]) -> list[bytes]:
    """Return inputs, short ones first, each of which goes from one line of ours to another as none before it did."""
    one_input, kept, known = target(name).one_input, [], set()
    for data in sorted(set(inputs), key=lambda it: (len(it), it)):
        reached = _reached(one_input, data)
        if not reached <= known:
            known |= reached
            kept.append(data)
    return kept[:MOST]


def _reached(one_input: Any, data: bytes) -> set[tuple[str, int, int]]:
    """Return (file, line, next line) of our modules."""
    steps: set[tuple[str, int, int]] = set()

    def within(frame: FrameType, event: str, _: Any) -> Any:
        file, last = frame.f_code.co_filename, frame.f_lineno

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            steps.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line if "/art_" in file else None

    sys.settrace(within)
    try:
        one_input(data)
    except Exception:  # noqa: BLE001 - a finding, which is kept beside these
        return set()
    finally:
        sys.settrace(None)
    return steps
