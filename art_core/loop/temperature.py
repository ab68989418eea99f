"""The temperature of a step's rollouts: a function of the settings and of the steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from art_core.config import TrainConfig
from art_core.loop.metrics import of_learner
from art_core.loop.stopping import sampled_steps

FIRST_STEPS, LOW, RISE = 2, 0.5, 0.05


def temperature_after(steps: Sequence[Mapping[str, float]], config: TrainConfig) -> float:
    """Return the temperature after ``steps``, given by their metrics.

    It rises by ``RISE``, up to ``max_temperature``, after every step whose entropy was below ``LOW`` times the mean of the first
    ``FIRST_STEPS``. The entropy is that of what was sampled, so a higher temperature raises it, until it is high enough.
    """
    start, most = config.temperature or 0.0, config.max_temperature or 0.0
    sampled = sampled_steps(steps)
    entropies = [of_learner(step, "entropy") for step in sampled if {"entropy", "learner/entropy"} & step.keys()]
    if most <= start or not entropies:
        return start
    low = LOW * fmean(entropies[:FIRST_STEPS])
    return min(most, start + RISE * sum(entropy < low for entropy in entropies))
