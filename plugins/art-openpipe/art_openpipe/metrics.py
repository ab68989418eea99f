"""A model's ``history.jsonl``, and OpenPipe ART's names of metrics."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from art_openpipe.trajectories import TrajectoryGroup

FILE = "history.jsonl"
SECTIONS = (  # names that begin with one are not put below the split
    "train/", "val/", "test/", "loss/", "objective/", "offpolicy/", "pipeline/", "pipeline_settings/", "queue/", "costs/",
    "sample_efficiency/", "throughput/", "discarded/", "time/", "data/", "vllm/",
)  # fmt: skip


class MetricDefinition(BaseModel):
    """What a metric means."""

    key: str
    title: str
    description: str
    kind: Literal["counter", "duration", "gauge", "rate", "ratio", "score"]
    unit: str | None = None
    higher_is_better: bool | None = None
    dashboard_default: bool = False
    score_component: bool = False


THEIRS = {
    "loss": "loss/train", "entropy": "loss/entropy", "kl_old": "loss/kl_div", "kl_ref": "loss/kl_policy_ref",
    "grad_norm": "loss/grad_norm", "learning_rate": "loss/learning_rate", "groups_sampled": "data/step_num_groups_submitted",
    "groups_with_contrast": "data/step_num_groups_trainable", "trajectories": "data/step_num_trajectories",
    "tokens": "data/step_nonpadding_logical_tokens", "seconds": "time/step_wall_s", "learn_seconds": "time/step_backend_train_s",
}  # fmt: skip
"""art's name of a metric -> OpenPipe ART's."""
PIPELINE_RL_METRIC_DEFINITIONS = tuple(
    MetricDefinition(key=key, title=name, description=f"art's {name} of a step", kind="gauge", dashboard_default=True)
    for name, key in THEIRS.items()
)
PIPELINE_RL_DASHBOARD_DEFAULT_METRICS = tuple(THEIRS.values())
PIPELINE_RL_SCORE_METRICS: tuple[str, ...] = ()  # art has no autotuner whose score has components


def of_step(*steps: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics under OpenPipe ART's names; of several steps, their means."""
    return {name: statistics.fmean(it[ours] for it in steps) for ours, name in THEIRS.items() if ours in steps[0]}


def of_groups(groups: Sequence[TrajectoryGroup], split: str) -> dict[str, float]:
    """Return the means over the groups' trajectories, and over the groups, as ``SPLIT/NAME`` and ``SPLIT/group/NAME``."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group:
            for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
                values[name].append(float(value))
        for name, value in group.metrics.items():
            values[f"group/{name}"].append(float(value))
        values["exception_rate"] += [0.0] * len(group) + [1.0] * len(group.exceptions)
        if len(group) > 1:
            values["reward_std_dev"].append(statistics.stdev(trajectory.reward for trajectory in group))
    return {f"{split}/{name}": sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}


def add_history(folder: Path, split: str, step: int, metrics: Mapping[str, float]) -> None:
    """Append a line to ``history.jsonl``, with metrics outside all sections below the split."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {name if name.startswith(SECTIONS) else f"{split}/{name}": value for name, value in metrics.items()}
    with (folder / FILE).open("a") as file:
        file.write(json.dumps({"step": step, "training_step": step, "recorded_at": time.time(), **named}) + "\n")


def best_step(folder: Path, metric: str) -> int | None:
    """Return the latest step with the highest ``metric``; None if it was never recorded."""
    lines = (folder / FILE).read_text().splitlines() if (folder / FILE).is_file() else []
    found = [(line[metric], line["step"]) for line in map(json.loads, lines) if metric in line]
    return max(found)[1] if found else None
