"""A model's ``history.jsonl``, and OpenPipe ART's names of metrics."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_openpipe.trajectories import TrajectoryGroup

FILE = "history.jsonl"
THEIRS = {
    "loss": "loss/train", "entropy": "loss/entropy", "kl_old": "loss/kl_div", "kl_ref": "loss/kl_policy_ref",
    "grad_norm": "loss/grad_norm", "learning_rate": "loss/learning_rate", "groups_sampled": "data/step_num_groups_submitted",
    "groups_with_contrast": "data/step_num_groups_trainable", "trajectories": "data/step_num_trajectories",
    "tokens": "data/step_trainer_tokens", "seconds": "time/step_wall_s", "learn_seconds": "time/step_trainer_s",
}  # fmt: skip
"""art's name of a metric -> OpenPipe ART's."""


def of_step(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics under both names."""
    return {**metrics, **{theirs: metrics[ours] for ours, theirs in THEIRS.items() if ours in metrics}}


def of_groups(groups: Sequence[TrajectoryGroup], split: str) -> dict[str, float]:
    """Return the means over the groups' trajectories, and over the groups, as ``SPLIT/NAME``."""
    trajectories = [trajectory for group in groups for trajectory in group]
    failed = sum(len(group.exceptions) for group in groups)
    values: dict[str, list[float]] = {"reward": [trajectory.reward for trajectory in trajectories]}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(float(value))
    for group in groups:
        for name, value in group.metrics.items():
            values.setdefault(f"group_{name}", []).append(float(value))
    spreads = [statistics.stdev(trajectory.reward for trajectory in group) for group in groups if len(group) > 1]
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}
    if spreads:
        means["reward_std_dev"] = sum(spreads) / len(spreads)
    means["exception_rate"] = failed / max(1, failed + len(trajectories))
    return {f"{split}/{name}": value for name, value in means.items()}


def add_history(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append a line to ``history.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write(json.dumps({"step": step, "recorded_at": time.time(), **metrics}) + "\n")


def best_step(folder: Path, metric: str) -> int | None:
    """Return the latest step with the highest ``metric``; None if it was never recorded."""
    try:
        lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    except FileNotFoundError:
        return None
    recorded = [line for line in lines if metric in line]
    return max(recorded, key=lambda line: (line[metric], line["step"]))["step"] if recorded else None
