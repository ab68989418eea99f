"""A run folder -> what in it is not as it was sampled or trained."""

from __future__ import annotations

from pathlib import Path

from art_audit.ledger import read_calls, read_updates
from art_audit.recompute import recompute
from art_audit.report import Audit, Findings
from art_core.errors import ConfigError
from art_core.loop.display import Display, display
from art_core.store import Store
from art_core.store.run_folder import store_file

TOLERANCE = 1e-4
"""Nats. Where engine and audit both compute in float32 a logprob differs by 1e-6 to 2e-5 from one order of summation to another.
An engine in bfloat16 (on a GPU, vLLM) differs by hundredths on a small model and some tenths on a large one: give 0.5 there."""


def audit(
    run_dir: str | Path, *, sample: int | None = None, tolerance: float = TOLERANCE, progress: bool | Display = True
) -> Audit:
    """Recompute the stored calls of a run with the weights that sampled them, and compare all that was written about them.

    ``sample`` recomputes that many calls of each version of the weights, drawn at random; the file itself is checked whole.
    ``tolerance`` is the largest difference of a token's logprob, in nats, that is not a problem. Only weights that are still
    there can be asked: train with ``keep_checkpoints=None`` to keep all. Raises ConfigError where ``run_dir`` is not a run
    folder or holds no calls, StoreError where its file cannot be read; what is wrong with the run is in ``Audit.problems``.
    """
    file = store_file(run_dir)
    if tolerance < 0 or (sample is not None and sample < 1):
        raise ConfigError(f"tolerance={tolerance} or sample={sample} cannot be used; give 0 or more, and at least 1")
    findings = Findings()
    with Store(file) as store, display(progress) as screen:
        by_version = read_calls(store, findings, screen)
        read_updates(store, findings, screen)
        if not (findings.calls or findings.counts["updates"] or findings.problems):
            raise ConfigError(f"{file} holds no calls: nothing has been sampled in this run yet")
        recompute(store, file.parent, by_version, findings, screen, sample, tolerance)
    return findings.report(file.parent, tolerance)
