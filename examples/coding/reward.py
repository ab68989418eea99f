"""A run of the agent -> its reward, from tests that the agent has not seen. Knows nothing about models or training."""

from __future__ import annotations

import asyncio
from typing import Any

from art_core.types import Trajectory

from .sandbox import shared

WHOLE = 0.7
"""Of a program that passes every test; the rest is the share of tests that it passes."""


async def reward(trajectory: Trajectory) -> float:
    """Return 0.3 times the share of hidden tests passed, plus 0.7 where all of them are.

    Adds the metrics ``success`` (all passed), ``first_try`` (with the first program), ``tests`` (share passed) and
    ``tries``.
    """
    programs: list[str] = trajectory.output or [""]
    tests: list[list[Any]] = trajectory.task["tests"]
    results = await asyncio.to_thread(shared().test, programs[-1], tests)
    share = sum(result.passed for result in results) / len(results)
    success = share == 1.0
    trajectory.metrics.update(
        success=float(success),
        first_try=float(success and len(programs) == 1),
        tests=share,
        tries=float(len(programs)),
    )
    return WHOLE * success + (1 - WHOLE) * share
