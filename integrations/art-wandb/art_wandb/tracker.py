"""The tracker ``wandb``: one W&B run per run folder, however often training is resumed in it.

All methods are called in the tracker's own thread; the caller makes sure that a failure does not end training.
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

from art_core import TrainConfig
from art_core.errors import StoreError
from art_core.plugin_api import without_access
from art_core.store.run_folder import write_whole
from art_core.types import Group
from art_wandb.opening import open_run
from art_wandb.tables import COLUMNS, rows

if TYPE_CHECKING:
    import wandb

IDENTITY = "wandb.json"
"""File in the run folder with the W&B run's id and its number of history rows."""
SMALL = 64 * 2**20
"""Bytes up to which whole weights are uploaded by default."""


class WandbTracker:
    """Logs a run folder to one W&B run, and keeps W&B's local files in the run folder.

    ``WANDB_LOG_MODEL`` selects the checkpoints that become artifacts: ``end``: the last, ``checkpoint``: all, ``false``: none;
    not set: the last if it is an adapter or small.
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

        # Rewards and outputs may be missing or of different types.
        table = wandb.Table(columns=COLUMNS, data=rows(step, groups), allow_mixed_types=True)
        self._log(step, {f"trajectories/{split}": table})

    def log_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        temperature = evaluation.get("temperature")
        name = "eval" if temperature is None else f"eval at {temperature:g}"
        numbers = {
            key: value for key, value in evaluation.items() if _is_number(value) and key not in ("step", "temperature")
        }
        if interval := evaluation.get("interval"):
            numbers["low"], numbers["high"] = interval
        self._log(step, {f"{name}/{key}": value for key, value in numbers.items()})

    def log_checkpoint(self, step: int, folder: Path) -> None:
        self._checkpoint = step, folder
        if _selected_checkpoints() == "checkpoint":
            self._log_model()

    def log_report(self, report: Mapping[str, Any]) -> None:
        if (run := self._opened()) is None:
            return
        # These may be objects, so the config has no names for them.
        names = {name: report[name] for name in ("loss", "learner", "reward", "start_weights") if name in report}
        run.config.update(names, allow_val_change=True)
        logged_elsewhere = {*names, "config", "evaluations"}
        summary = {name: value for name, value in report.items() if name not in logged_elsewhere}
        run.summary.update({"report": summary})

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._log_model()
        finally:
            self._run.finish()

    def _opened(self) -> wandb.Run | None:
        """Return the W&B run, opened at its first use; None if W&B is disabled, or if opening it has raised before."""
        if not self._tried:
            self._tried = True
            self._run = self._open()
        return self._run

    def _open(self) -> wandb.Run | None:
        identity = self._identity()
        run = open_run(
            dir=str(self._run_dir),
            name=os.environ.get("WANDB_NAME") or self._run_dir.name,
            id=identity.get("id") or os.environ.get("WANDB_RUN_ID") or None,
            # Offline as well: otherwise wandb sync would overwrite earlier rows with later ones.
            resume=None if "WANDB_RESUME" in os.environ else "allow",
            config={
                **without_access(dataclasses.asdict(self._config)),
                "art_core": importlib.metadata.version("art-core"),
            },
            tags=["ART", Path(self._config.model).name, *os.environ.get("WANDB_TAGS", "").split(",")],
        )
        if run.disabled:
            run.finish()
            return None
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._rows = max(run.step, identity.get("rows", 0))
        self._save_identity(run)
        return run

    def _identity(self) -> dict[str, Any]:
        path = self._run_dir / IDENTITY
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StoreError(
                f"{path} is damaged, so the W&B run of this folder is unknown: {error}; delete the file to start a new W&B run"
            ) from error

    def _save_identity(self, run: wandb.Run) -> None:
        write_whole(self._run_dir / IDENTITY, json.dumps({"id": run.id, "rows": self._rows}))

    def _log(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row to the history; charts are over ``step``, which may have several rows."""
        if (run := self._opened()) is None:
            return
        with self._staging():
            # W&B drops rows whose number it has seen; offline, it does not know the numbers from earlier processes.
            run.log({"step": step, **row}, step=self._rows, commit=True)
        self._rows += 1
        self._save_identity(run)

    def _log_model(self) -> None:
        """Log the newest checkpoint as an artifact, once, if it is selected."""
        if self._checkpoint is None or (run := self._opened()) is None:
            return
        (step, folder), self._checkpoint = self._checkpoint, None
        adapter = folder / "adapter"
        files = sorted(file for file in (adapter if adapter.is_dir() else folder).iterdir() if _is_model_file(file))
        selected = _selected_checkpoints()
        large = not adapter.is_dir() and sum(file.stat().st_size for file in files) > SMALL
        if not files or selected == "false" or (not selected and large):
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
        """Let wandb copy files that it uploads later into the run folder, unless ``WANDB_DATA_DIR`` names another folder.

        wandb reads the variable each time and has no setting or argument for it. So it is set in ``os.environ`` while a row or an
        artifact is logged, and a child process that an agent starts in this moment inherits it. Only wandb reads it; if that
        matters, set ``WANDB_DATA_DIR`` before training.
        """
        before = os.environ.get("WANDB_DATA_DIR")
        os.environ.setdefault("WANDB_DATA_DIR", str(self._run_dir / "wandb"))
        try:
            yield
        finally:
            if before is None:
                del os.environ["WANDB_DATA_DIR"]


def _selected_checkpoints() -> str:
    return os.environ.get("WANDB_LOG_MODEL", "").lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_model_file(path: Path) -> bool:
    """Whether the file is part of the model, not of the learner's state."""
    return path.is_file() and path.name not in ("optimizer.state", "learner.json")
