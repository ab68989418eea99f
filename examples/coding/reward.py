"""Rewards a rollout by tests that the agent hasn't seen."""

from __future__ import annotations

import asyncio
from typing import Any

from art_core.types import Trajectory

from .sandbox import shared

WHOLE = 0.7
"""The reward for passing every test; the rest is for the share of tests passed."""


async def reward(trajectory: Trajectory) -> float:
    """Return 0.3 times the share of hidden tests passed, plus 0.7 if all pass.

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
