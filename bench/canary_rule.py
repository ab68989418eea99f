"""How often and how soon the rule of ``art gateway --ramp`` decides, by simulation: the table of docs/gateway.md.

    python -m bench.canary_rule [--simulations 1000]

Scores are 0 or 1. The provider solves 80 %; a candidate has a share of the conversations until the rule's first decision.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from art_gateway.canary.trial import Rule, Trial
from bench.tables import table

RULE = Rule(ramp=(0.1, 0.25, 0.5))
PROVIDER = 0.8
MOST = 3000
"""Conversations of its own after which a candidate is undecided."""
LOOK_EVERY = 10
"""Conversations between two looks; the gateway looks after each, and each look takes longer than a score."""
CASES: dict[str, tuple[float, Callable[[int], float]]] = {
    "as good, at a share of 10%": (0.1, lambda _: 0.8),
    "as good, at a share of 50%": (0.5, lambda _: 0.8),
    "worse by 20 points, at 10%": (0.1, lambda _: 0.6),
    "worse by 20 points, at 50%": (0.5, lambda _: 0.6),
    "worse by 40 points, at 10%": (0.1, lambda _: 0.4),
    "worse by 40 points after its 500th conversation, at 10%": (0.1, lambda own: 0.8 if own < 500 else 0.4),
}
"""Name -> the candidate's share, and the chance that it solves its n-th conversation."""


def simulate(share: float, candidate: Callable[[int], float], seed: int) -> tuple[bool | None, int]:
    """Return the rule's first decision, None if there is none, and the candidate's conversations until then."""
    random, trial, own, number = np.random.default_rng(seed), Trial(RULE, share), 0, 0
    turns_bad = candidate(0) != candidate(MOST)  # as at the ramp's last step: what was good before changes nothing
    while own < MOST:
        mine, score = random.random(2)
        number += 1
        if mine < share:
            trial.add_score(float(score < candidate(own)), candidate=True)
            trial.add_call(failed=False)
            own += 1
        else:
            trial.add_score(float(score < PROVIDER), candidate=False)
        verdict = trial.verdict() if number % LOOK_EVERY == 0 else None
        if verdict and not (verdict.passed and turns_bad):
            return verdict.passed, own
    return None, own


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000)
    count = parser.parse_args(arguments).simulations
    rows = []
    for name, (share, candidate) in CASES.items():
        found = [simulate(share, candidate, seed) for seed in range(count)]
        cells = [name]
        for decision in (False, True, None):
            own = [at for decided, at in found if decided is decision]
            median = f", after {statistics.median(own):.0f}" if own and decision is not None else ""
            cells.append(f"{len(own) / count:.1%}{median}")
        rows.append(cells)
        print(table(["candidate", "rolled back", "next step", f"undecided after {MOST:,}"], rows), flush=True)


if __name__ == "__main__":
    main()
