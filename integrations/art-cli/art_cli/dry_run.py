"""What a dry run means: whether its group teaches, what is wrong, and what the whole run would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_core.plugin_api import plural


def interpretation(report: Mapping[str, Any], config: Mapping[str, Any], steps: int) -> list[str]:
    """Return sentences about a dry run's report. ``config``: the run's settings."""
    return [_contrast(report), *_errors(report), _tokens(report), _projection(report, config, steps)]


def _contrast(report: Mapping[str, Any]) -> str:
    rewards = [reward for reward in report["rewards"] if reward is not None]
    if not rewards:
        return f"The group was not scored, so it teaches nothing: {', '.join(report['unscored'])}"
    if report["has_contrast"]:
        return f"The group teaches: its rewards range from {min(rewards):.3g} to {max(rewards):.3g}."
    return (
        f"The group teaches nothing: all its rewards are {rewards[0]:.3g}. If most groups are like it, use easier or harder "
        "tasks, a reward with partial credit, or another temperature."
    )


def _errors(report: Mapping[str, Any]) -> list[str]:
    errors, rollouts = report["errors"], len(report["rewards"])
    return [f"{len(errors)} of {plural(rollouts, 'rollout')} failed, the first with: {errors[0]}"] if errors else []


def _tokens(report: Mapping[str, Any]) -> str:
    computed, one_by_one = report["tokens"], report["tokens_call_by_call"]
    return f"The learner computes {computed:,} tokens; call by call they would be {one_by_one:,}."


def _projection(report: Mapping[str, Any], config: Mapping[str, Any], steps: int) -> str:
    groups, size = steps * config["tasks_per_step"], len(report["rewards"])
    calls = groups * report["calls"]
    # The groups of a step share the engine: between all at once for free, and one after the other.
    least = steps * (report["rollout_seconds"] + report["learn_seconds_per_step"])
    most = steps * (config["tasks_per_step"] * report["rollout_seconds"] + report["learn_seconds_per_step"])
    judge = report.get("account", {})
    cost = f", ${groups * judge['cost']:.2f} for the judge" if "cost" in judge else ""
    cost += f" in {groups * judge['requests']:,.0f} requests" if judge.get("requests") else ""
    return (
        f"{plural(steps, 'step')} like this: {groups * size:,} rollouts, {calls:,} model calls, {duration(least)} to "
        f"{duration(most)}{cost}. Evaluations come on top."
    )


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
