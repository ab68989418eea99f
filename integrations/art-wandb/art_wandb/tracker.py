"""The tracker ``wandb``: a run folder is one W&B run, however often training goes on in it. Knows nothing about training.

All of it is called in the tracker's own thread; that a failure does not end training is its caller's affair.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.config import TrainConfig
from art_core.errors import StoreError
from art_core.redaction import without_access
from art_core.store.run_folder import write_whole
from art_core.types import Group
from art_wandb.opening import open_run
from art_wandb.tables import COLUMNS, rows

if TYPE_CHECKING:
    import wandb

IDENTITY = "wandb.json"
"""In the run folder: which W&B run it is, and how many rows of history it has."""
SMALL = 64 * 2**20
"""Bytes up to which whole weights are uploaded without being asked for."""


class WandbTracker:
    """One W&B run for the run folder ``run_dir``, which also holds what W&B keeps on disk.

    ``WANDB_LOG_MODEL`` says which checkpoints become artifacts: ``end`` the last one, ``checkpoint`` every one, ``false`` none;
    where it is not set, the last one if it is an adapter or small.
    """

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self._run_dir, self._config = run_dir.resolve(), config
        self._run: wandb.Run | None = None
        self._tried = False
        self._checkpoint: tuple[int, Path] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {f"train/{name}": value for name, value in metrics.items()})

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        import wandb

        # Rewards and outputs may be of several types, and missing.
        table = wandb.Table(columns=COLUMNS, data=rows(step, groups), allow_mixed_types=True)
        self._log(step, {f"trajectories/{split}": table})

    def log_evaluation(self, step: int, found: Mapping[str, Any]) -> None:
        temperature = found.get("temperature")
        name = "eval" if temperature is None else f"eval at {temperature:g}"
        numbers = {
            key: value for key, value in found.items() if _is_number(value) and key not in ("step", "temperature")
        }
        if interval := found.get("interval"):
            numbers["low"], numbers["high"] = interval
        self._log(step, {f"{name}/{key}": value for key, value in numbers.items()})

    def log_checkpoint(self, step: int, folder: Path) -> None:
        self._checkpoint = step, folder
        if _asked() == "checkpoint":
            self._log_model()

    def log_report(self, report: Mapping[str, Any]) -> None:
        if (run := self._opened()) is None:
            return
        # The parts of a run that may be objects have no name in its config.
        names = {name: report[name] for name in ("loss", "learner", "reward", "start_weights") if name in report}
        run.config.update(names, allow_val_change=True)
        left = {*names, "config", "evaluations"}  # the last are curves
        run.summary.update({"report": {name: value for name, value in report.items() if name not in left}})

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._log_model()
        finally:
            self._run.finish()

    def _opened(self) -> wandb.Run | None:
        """Return the W&B run, opened at its first use; None where W&B is disabled, or that failed, which was raised then."""
        if not self._tried:
            self._tried = True
            self._run = self._open()
        return self._run

    def _open(self) -> wandb.Run | None:
        known = self._identity()
        run = open_run(
            dir=str(self._run_dir),
            name=os.environ.get("WANDB_NAME") or self._run_dir.name,
            id=known.get("id") or os.environ.get("WANDB_RUN_ID") or None,
            # Offline too: wandb sync would otherwise write what comes later over what came first.
            resume=None if "WANDB_RESUME" in os.environ else "allow",
            config={
                **without_access(dataclasses.asdict(self._config)),
                "art_core": importlib.metadata.version("art-core"),
            },
            tags=["ART", Path(self._config.model).name, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))],
        )
        if run.disabled:
            run.finish()
            return None
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._rows = max(run.step, known.get("rows", 0))
        self._keep_identity(run)
        return run

    def _identity(self) -> dict[str, Any]:
        path = self._run_dir / IDENTITY
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StoreError(
                f"{path} does not say which W&B run this is: {error}; without it there is a new one"
            ) from error

    def _keep_identity(self, run: wandb.Run) -> None:
        write_whole(self._run_dir / IDENTITY, json.dumps({"id": run.id, "rows": self._rows}))

    def _log(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row of history; charts are over ``step``, of which there may be several rows."""
        if (run := self._opened()) is None:
            return
        with self._staging():
            # W&B drops rows whose number it has seen; offline, it does not know those of earlier processes.
            run.log({"step": step, **row}, step=self._rows, commit=True)
        self._rows += 1
        self._keep_identity(run)

    def _log_model(self) -> None:
        """Log the newest checkpoint as an artifact, where it is wanted; once."""
        if self._checkpoint is None or (run := self._opened()) is None:
            return
        (step, folder), self._checkpoint = self._checkpoint, None
        adapter = folder / "adapter"
        files = sorted(it for it in (adapter if adapter.is_dir() else folder).iterdir() if _is_model_file(it))
        wanted = _asked()
        if (
            not files
            or wanted == "false"
            or (not wanted and not adapter.is_dir() and sum(it.stat().st_size for it in files) > SMALL)
        ):
            return
        import wandb

        artifact = wandb.Artifact(
            f"checkpoint-{run.id}", type="model", metadata={"step": step, "model": self._config.model}
        )
        with self._staging():
            for file in files:
                artifact.add_file(str(file), skip_cache=True)
            run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    @contextmanager
    def _staging(self) -> Iterator[None]:
        """Have wandb copy what it uploads, maybe later, into the run folder, where ``WANDB_DATA_DIR`` names no other.

        wandb asks the environment each time, and has neither a setting nor an argument for it. So ``os.environ`` of the whole
        process has the variable for as long as a row or an artifact is logged, and a child process of an agent that is started
        just then inherits it. Nothing but wandb reads it; where that matters, set ``WANDB_DATA_DIR`` before training.
        """
        before = os.environ.get("WANDB_DATA_DIR")
        os.environ.setdefault("WANDB_DATA_DIR", str(self._run_dir / "wandb"))
        try:
            yield
        finally:
            if before is None:
                del os.environ["WANDB_DATA_DIR"]


def _asked() -> str:
    return os.environ.get("WANDB_LOG_MODEL", "").lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_model_file(path: Path) -> bool:
    """Whether it is part of the model, not of the learner's state."""
    return path.is_file() and path.name not in ("optimizer.safetensors", "learner.json")
