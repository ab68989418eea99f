"""Scores of overlapping chunks -> one scale.

A judge's 0.7 in one chunk need not equal its 0.7 in another. The rollouts that all chunks share, the anchors, relate the scales:
each chunk's scores are mapped to the first chunk's by the line that fits the anchors best (least squares).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

__all__ = ["ANCHORS", "anchors", "chunks", "one_scale"]

ANCHORS = 3
"""Rollouts that all chunks share: two determine a line, the third averages out some of the judge's noise."""
STEEPEST = 4.0
"""Largest factor by which a chunk is stretched or squeezed: anchors that nearly tie say nothing about a scale's width."""


def chunks(count: int, size: int) -> tuple[int, list[int]]:
    """Return the size of the first chunk, and the number of new rollouts that each further chunk has besides the anchors."""
    first, room = min(count, size), size - ANCHORS
    rest = count - first
    number = -(-rest // room) if rest else 0
    return first, [rest // number + (i < rest % number) for i in range(number)]


def anchors(scores: Mapping[int, float]) -> list[int]:
    """Return the rollouts with the lowest, median and highest score, which span the scale."""
    ranked = sorted(scores, key=lambda run: (scores[run], run))
    return [ranked[0], ranked[len(ranked) // 2], ranked[-1]]


def one_scale(first: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return one score in [0, 1] per rollout, on the scale of ``first``; rollouts that a chunk shares with it are anchors.

    If rollouts of other chunks lie beyond [0, 1], all scores are squeezed until they fit; order and relative distances stay.
    """
    scores = dict(first)
    for chunk in others:
        shared = [run for run in chunk if run in first]
        slope, intercept = _line([chunk[run] for run in shared], [first[run] for run in shared])
        scores |= {run: intercept + slope * score for run, score in chunk.items() if run not in first}
    low, high = min(0.0, *scores.values()), max(1.0, *scores.values())
    return {run: (score - low) / (high - low) for run, score in scores.items()}


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line; slope 1 if the anchors tie or the chunk reverses their order."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    width = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / width if width > 1e-12 else 0.0
    slope = min(max(slope, 1 / STEEPEST), STEEPEST) if slope > 0 else 1.0
    return slope, mean_y - slope * mean_x
