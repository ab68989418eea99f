"""``open_run``: the loop in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art_core.config import PARTS, make_config
from art_core.loop.resume_checks import Terms
from art_core.loop.run import Run


def open_run(run_dir: str | Path | None = None, *, model: str = "tiny", **settings: Any) -> Run:
    """Return a run to open with ``async with``: the loop in pieces (``collect``, ``score``, ``learn``, ``rollout``).

    Keywords are fields of ``TrainConfig`` and ``engine``, ``learner``, ``loss``, ``executor``, ``plugins`` as in ``train``. A
    folder that was begun with another loss or other settings of training than these is refused, unless ``allow_changes``.
    """
    parts = {name: settings.pop(name) for name in PARTS if name in settings}
    run = Run(run_dir, make_config(settings, model=model), **parts)
    run.terms = Terms(names=(*settings, *parts))
    return run
