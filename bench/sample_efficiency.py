"""The email example trained through token trees and call by call: the same loss and the same learning, in less time.

    python -m bench.sample_efficiency --seeds 0 1 2          prints the table, draws docs/sample_efficiency.png
    python -m bench.sample_efficiency --draw-only            the same from existing runs

A finished run is not repeated, and an interrupted one resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from art_core import losses
from art_core.config import TrainConfig
from art_core.learner import TorchLearner
from art_core.loop.metrics import wilson_interval
from art_core.types import Loss, TokenTree
from art_embedded import TINY
from bench import tree as ours
from bench.plain import call_logprobs, call_tokens
from bench.tables import table
from examples.email_search.train import run

LEARNERS = {"tree": "one pass over each tree", "calls": "every call in a row of its own"}
COLOURS = {"tree": "#c2410c", "calls": "#30567d"}
LEARNING_RATE = 5e-4
ROWS = 8
"""Calls padded into one forward pass, shortest first: the fastest of 1, 4, 8, 16 and 32 for this model."""


class CallByCallLearner(TorchLearner):
    """Trains as ``TorchLearner`` does, but computes every call in a row of its own."""

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step; ``seconds`` and ``tokens`` (computed, without padding) are the metrics."""
        trees = [tree for tree in trees if tree.weights.any()]
        if not trees:
            return {"skipped": 1.0}
        started, total = time.perf_counter(), 0.0
        trajectories = ours.trained_trajectories(trees)
        for tree in trees:
            new = call_logprobs(self.model, tree, ROWS)
            part = (loss or self.loss)(ours.loss_inputs(tree, new, trajectories, on_policy=False)).loss
            part.backward()
            total += part.item()
        metrics = self._update({"loss": total})
        tokens = sum(call_tokens(tree) for tree in trees)
        return {**metrics, "tokens": float(tokens), "seconds": time.perf_counter() - started}


def train(which: str, seed: int, options: argparse.Namespace) -> Path:
    """Run the example unless its folder has a finished run; return the folder."""
    folder = options.out / f"{which}-{seed}"
    report = folder / "report.json"
    if report.exists() and json.loads(report.read_text())["steps"] >= options.steps:
        return folder
    learner: TorchLearner | str = "auto"
    if which == "calls":
        config = TrainConfig(seed=seed, learning_rate=LEARNING_RATE)
        learner = CallByCallLearner(TINY, config, losses.grpo)
    run(
        steps=options.steps, seed=seed, run_dir=folder, eval_tasks=options.tasks, eval_every=options.eval_every,
        learner=learner, learning_rate=LEARNING_RATE, decay_steps=0,
    )  # fmt: skip
    return folder


def curve(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations at temperature 1 in order, each with the learner's seconds so far."""
    report = json.loads((folder / "report.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spent = [0.0, *accumulate(step.get("learner/seconds", 0.0) for step in steps)]
    evaluations = [it for it in report["evaluations"] if it["temperature"] == 1.0]
    return sorted(({**it, "learner_seconds": spent[it["step"]]} for it in evaluations), key=lambda it: it["step"])


def pooled(curves: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one curve over all seeds, with Wilson's 95 % interval over all their held-out rollouts."""
    points = []
    for step in sorted(set.intersection(*({it["step"] for it in curve} for curve in curves))):
        here = [next(it for it in curve if it["step"] == step) for curve in curves]
        runs = sum(it["n"] for it in here)
        success = sum(it["success"] * it["n"] for it in here) / runs
        seconds = float(np.mean([it["learner_seconds"] for it in here]))
        shape = {"step": step, "success": success, "n": runs, "learner_seconds": seconds}
        points.append({**shape, "interval": wilson_interval(success, runs)})
    return points


def draw(curves: dict[str, list[dict[str, Any]]], seeds: int, path: Path) -> None:
    """Write the picture: held-out success by step, and by the learner's seconds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=120, sharey=True)
    for axes, x, label in zip(panels, ("step", "learner_seconds"), ("step", "seconds of the learner"), strict=True):
        for which, points in curves.items():
            low, high = (
                [max(0.0, sign * (it["success"] - it["interval"][side])) for it in points]
                for side, sign in ((0, 1), (1, -1))
            )
            axes.errorbar(
                [it[x] for it in points], [it["success"] for it in points], yerr=[low, high], fmt="o-", capsize=3,
                color=COLOURS[which], label=LEARNERS[which], alpha=0.85,
            )  # fmt: skip
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out success at temperature 1")
    panels[1].legend(loc="lower right")
    figure.suptitle(f"The email agent, {seeds} seed(s); bars: 95 % (Wilson) over all seeds' held-out rollouts")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--tasks", type=int, default=300, help="held-out tasks per evaluation")
    parser.add_argument("--eval-every", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/sample-efficiency"))
    parser.add_argument("--picture", type=Path, default=Path("docs/sample_efficiency.png"))
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as TorchLearner does for this model
    # Seed after seed and side after side, so that other work on the machine affects both alike.
    pairs = [(which, seed) for seed in options.seeds for which in LEARNERS]
    if not options.draw_only:
        for which, seed in pairs:
            train(which, seed, options)
    curves = {(which, seed): curve(options.out / f"{which}-{seed}") for which, seed in pairs}
    rows = []
    for (which, seed), points in sorted(curves.items()):
        rows.append([LEARNERS[which], str(seed), *_ends(points)])
    together = {which: pooled([curves[which, seed] for seed in options.seeds]) for which in LEARNERS}
    for which, points in together.items():
        rows.append([LEARNERS[which], "all (mean seconds)", *_ends(points)])
    print(table(["learner", "seed", "held-out before", "after", "steps", "learner's seconds"], rows))
    draw(together, len(options.seeds), options.picture)
    print(f"wrote {options.picture}")


def _ends(points: Sequence[dict[str, Any]]) -> list[object]:
    def text(it: dict[str, Any]) -> str:
        low, high = it["interval"]
        return f"{it['success']:.1%} ({low:.1%} to {high:.1%}, n={it['n']})"

    return [text(points[0]), text(points[-1]), points[-1]["step"], points[-1]["learner_seconds"]]


if __name__ == "__main__":
    main()
