"""A run folder -> whatever in it differs from what was sampled or trained."""

from __future__ import annotations

from pathlib import Path

from art_audit.ledger import read_calls, read_updates
from art_audit.recompute import recompute
from art_audit.report import Audit, Findings
from art_core.errors import ConfigError
from art_core.plugin_api import Display, display
from art_core.store import Store
from art_core.store.run_folder import store_file


def audit(
    run_dir: str | Path, *, sample: int | None = None, tolerance: float | None = None, progress: bool | Display = True
) -> Audit:
    """Recompute a run's stored calls with the weights that sampled them, and check all records about them.

    ``sample`` recomputes that many randomly drawn calls per version of the weights; the file is always fully checked.
    ``tolerance`` is the largest acceptable difference of a token's logprob, in nats; None: 1e-4, or 1e-3 for models from 10M
    parameters. Calls can only be recomputed if their weights still exist: to keep all, train with ``keep_checkpoints=None`` and
    ``checkpoint_every=1``.
    Raises ConfigError if ``run_dir`` is not a run folder or has no calls, StoreError if its file cannot be read; anything wrong
    with the run is in ``Audit.problems``.
    """
    file = store_file(run_dir)
    if (tolerance is not None and tolerance < 0) or (sample is not None and sample < 1):
        raise ConfigError(f"tolerance must be >= 0 and sample >= 1, got tolerance={tolerance}, sample={sample}")
    findings = Findings(tolerance)
    with Store(file) as store, display(progress) as screen:
        by_version = read_calls(store, findings, screen)
        read_updates(store, findings, screen)
        if not (findings.calls or findings.counts["updates"] or findings.problems):
            raise ConfigError(f"{file} has no calls: this run has not sampled anything yet")
        recompute(store, file.parent, by_version, findings, screen, sample)
    return findings.report(file.parent)
