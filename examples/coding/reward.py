"""A run of the agent -> its reward, from tests that the agent has not seen. Knows nothing about models or training."""

from __future__ import annotations

import asyncio
from typing import Any

from art_core.types import Trajectory

from .sandbox import Result, shared

WHOLE = 0.7
"""Of a program that passes every test; the rest is the share of tests that it passes."""


async def reward(trajectory: Trajectory) -> float:
    """Return 0.3 times the share of hidden tests passed, plus 0.7 where all of them are.

    Adds the metrics ``success`` (all passed), ``first_try`` (the first program already did), ``tests`` (share passed) and
    ``tries``.
    """
    programs: list[str] = trajectory.output or [""]
    first, last = await _test(programs[0], trajectory), await _test(programs[-1], trajectory)
    share = sum(result.passed for result in last) / len(last)
    success = share == 1.0
    trajectory.metrics.update(
        success=float(success),
        first_try=float(all(result.passed for result in first)),
        tests=share,
        tries=float(len(programs)),
    )
    return WHOLE * success + (1 - WHOLE) * share


async def _test(program: str, trajectory: Trajectory) -> list[Result]:
    tests: list[list[Any]] = trajectory.task["tests"]
    return await asyncio.to_thread(shared().test, program, tests)
