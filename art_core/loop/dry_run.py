"""What a step would train on, without taking it."""

from __future__ import annotations

from typing import Any

from art_core.loop.display import Display
from art_core.loop.run import Run
from art_core.runtime.threads import in_thread
from art_core.scoring import of_nodes, why_unscored
from art_core.types import Group


async def dry_run_report(run: Run, group: Group, screen: Display) -> dict[str, Any]:
    """Build the token tree of a scored group, do the work of a step on it without changing the weights, and show the figures."""
    tree, learner = run.tree(group), await run.learner()
    seconds = await in_thread(learner.measure, [tree])
    calls = [call for t in of_nodes(group, run.config.train_nodes).trajectories for call in t.calls]
    report = {
        "calls": len(calls),
        "tokens_call_by_call": sum(len(c.prompt_ids) + len(c.sampled_ids) for c in calls),
        "tokens": tree.num_tokens,
        "targets": tree.num_targets,
        "rewards": [t.reward for t in group.trajectories],
        "errors": [t.error for t in group.trajectories if t.error],
        "unscored": why_unscored([group]),
        "has_contrast": bool(run.teachable([group])),
        "rollout_seconds": max(t.seconds for t in group.trajectories),
        "learn_seconds": seconds,
        "learn_seconds_per_step": seconds * run.config.tasks_per_step,
    }
    for name, value in report.items():
        screen.say(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    return report
