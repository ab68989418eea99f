"""What a dry run means: whether its group teaches, what is wrong, and what the whole run would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from art_core import TrainResult
from art_core.plugin_api import plural
from art_core.store import Store
from art_core.store.run_folder import store_file


def show(result: TrainResult, steps: int) -> None:
    """Print what a dry run means."""
    with Store(store_file(result.run_dir)) as store:
        config = store.meta("config")
    for sentence in interpretation(result.report["dry_run"], config, steps):
        Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)


def interpretation(report: Mapping[str, Any], config: Mapping[str, Any], steps: int) -> list[str]:
    """Return sentences about a dry run's report. ``config``: the run's settings."""
    return [_contrast(report), *_errors(report), _tokens(report), _projection(report, config, steps)]


def _contrast(report: Mapping[str, Any]) -> str:
    rewards = [reward for reward in report["rewards"] if reward is not None]
    if report["unscored"] and not rewards:
        return f"The group was not scored, so it teaches nothing: {', '.join(report['unscored'])}"
    if report["has_contrast"] and not report["targets"]:
        return (
            "The group teaches nothing: every call was cut off at its token limit, or aborted; pass a larger max_tokens, or "
            "overlong='train' (the loss dapo drops calls that were cut off)."
        )
    differ = len(set(rewards)) > 1
    if report["has_contrast"]:
        between = f": its rewards range from {min(rewards):.3g} to {max(rewards):.3g}" if differ else ""
        return f"The group teaches{between}."
    if differ or not rewards:
        return "The group teaches nothing: no call of a trained node has a reward that differs."
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
    requests, dollars = judge.get("judge/requests"), judge.get("judge/cost")
    cost = f", ${groups * dollars:.2f} for the judge" if dollars else ""
    cost += f", {groups * requests:,.0f} requests to it" if requests else ""
    return (
        f"{plural(steps, 'step')} like this: {groups * size:,} rollouts, {calls:,} trained model calls, {duration(least)} to "
        f"{duration(most)}{cost}. Evaluations come on top."
    )


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
