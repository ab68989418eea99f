"""Scores of overlapping chunks -> one scale. Knows nothing about judges.

A judge's 0.7 in one chunk need not be its 0.7 in another. The runs that every chunk has, the anchors, tell how the scales lie to
each other: each chunk's scores are mapped to the first chunk's by the straight line that fits the anchors best (least squares).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

__all__ = ["ANCHORS", "anchors", "chunks", "one_scale"]

ANCHORS = 3
"""Runs that every chunk has: two would fix a line, the third takes the edge off a judge's noise."""
STEEPEST = 4.0
"""No chunk is stretched or squeezed by more: anchors that nearly tie say nothing about a scale's width."""


def chunks(count: int, size: int) -> tuple[int, list[int]]:
    """Return how many runs the first chunk has, and how many new ones each further chunk has beside the anchors."""
    first, room = min(count, size), size - ANCHORS
    rest = count - first
    number = -(-rest // room) if rest else 0
    return first, [rest // number + (i < rest % number) for i in range(number)]


def anchors(scores: Mapping[int, float]) -> list[int]:
    """Return the runs with the lowest, the middle and the highest score: they span the scale."""
    ranked = sorted(scores, key=lambda run: (scores[run], run))
    return [ranked[0], ranked[len(ranked) // 2], ranked[-1]]


def one_scale(first: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return one score in [0, 1] per run, on the scale of ``first``; the anchors are the runs that both have.

    Where runs of other chunks lie beyond that scale's ends, all is squeezed together until it fits: order and relative
    distances stay.
    """
    scores = dict(first)
    for chunk in others:
        shared = [run for run in chunk if run in first]
        slope, at = _line([chunk[run] for run in shared], [first[run] for run in shared])
        scores |= {run: at + slope * score for run, score in chunk.items() if run not in first}
    low, high = min(0.0, *scores.values()), max(1.0, *scores.values())
    return {run: (score - low) / (high - low) for run, score in scores.items()}


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept of the best line; only a shift where the anchors tie or the chunk turns them round."""
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    width = sum((it - x) ** 2 for it in xs)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / width if width > 1e-12 else 0.0
    slope = min(max(slope, 1 / STEEPEST), STEEPEST) if slope > 0 else 1.0
    return slope, y - slope * x
