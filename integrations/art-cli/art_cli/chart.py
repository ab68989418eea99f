"""Draws a run's metrics and evaluations as a PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import plural


def draw(run_dir: Path) -> Path:
    """Write ``chart.png`` into the run folder and return its path; ConfigError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((run_dir / "report.json").read_text())
    name = drawn_metric(lines)
    points = [(line["step"], line[name]) for line in lines if name in line]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color="#c9d3e0", label=f"training batch: {name}")
        axes.plot(steps, running_mean(values), color="#30567d", label="training, mean of 5 steps")
    for colour, (temperature, evaluations) in zip(
        ("#c2410c", "#15803d", "#7e22ce"), by_temperature(report), strict=False
    ):
        label = "the agent's own temperature" if temperature is None else f"temperature {temperature:g}"
        axes.errorbar(
            [evaluation["step"] for evaluation in evaluations],
            [evaluation["success"] for evaluation in evaluations],
            yerr=[
                [max(0.0, evaluation["success"] - evaluation["interval"][0]) for evaluation in evaluations],
                [max(0.0, evaluation["interval"][1] - evaluation["success"]) for evaluation in evaluations],
            ],
            fmt="o:", capsize=4, color=colour, label=f"held-out, {label}",
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.set_title(
        f"{report['model']}, seed {report['seed']}: {plural(report['steps'], 'step')}, {report['seconds']:.0f} s of training"
    )
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    figure.tight_layout()
    path = run_dir / "chart.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def drawn_metric(steps: Sequence[Mapping[str, float]]) -> str:
    """Return the metric that says how the steps went: ``success``, ``reward``, or ``call_reward`` if only calls are rewarded."""
    if any("success" in step for step in steps):
        return "success"
    of_calls = any("call_reward" in step for step in steps) and not any(step.get("reward") for step in steps)
    return "call_reward" if of_calls else "reward"


def running_mean(values: tuple[float, ...], width: int = 5) -> list[float]:
    """Return for each value the mean of it and of up to ``width - 1`` values before it."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def by_temperature(report: dict[str, Any]) -> list[tuple[float | None, list[dict[str, Any]]]]:
    """Return each temperature of a report's evaluations with its evaluations, ordered by step."""
    groups: dict[float | None, list[dict[str, Any]]] = {}
    for evaluation in report["evaluations"]:
        groups.setdefault(evaluation["temperature"], []).append(evaluation)
    return [(temperature, sorted(group, key=lambda it: it["step"])) for temperature, group in groups.items()]
