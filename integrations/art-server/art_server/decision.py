"""What a person decides by: whether held-out tasks are solved better, what still fails, what it cost, what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from art_cli import next_steps
from art_cli.hints import hints
from art_server import answers, outcome, paired, reading, responses
from art_server.paired import Rollouts
from art_server.plain import plain, readable
from art_server.store_view import RolloutRow, StoreView, read_snapshot

SHOWN = 8
"""Reasons and tasks that are listed."""
REASON_LENGTH = 160
ZERO_RATIO = 2.0
"""A metric that is 0 in this many times the share of failed rollouts, compared with all others, is a reason."""

Steps = Sequence[Mapping[str, float]]


def decision(name: str, folder: Path) -> answers.Decision:
    """Return what the store says about these questions."""
    return read_snapshot(folder / reading.STORE, lambda view: decision_of(name, folder, view))


def decision_of(name: str, folder: Path, view: StoreView) -> answers.Decision:
    """Return the decision about the run that ``view`` reads."""
    summary = responses.RunSummary(**reading.summary_fields(name, folder, view))
    evaluations = paired.evaluations_of(view)
    history = [(step, metrics) for step, _, metrics in view.steps(after=-1, limit=outcome.ALL_STEPS)]
    steps = [metrics for _, metrics in history]
    pairs = []
    for first, second in outcome.before_and_after(evaluations):
        before, after = paired.by_task(view, first), paired.by_task(view, second)
        if change := paired.compared(before, after, first.get("temperature")):
            pairs.append((before, after, change))
    changes = [change for _, _, change in pairs]
    signs = [readable(sign[:1].upper() + sign[1:]) for sign in hints(view, history, _comparable(evaluations))]
    before, after, _ = pairs[0] if pairs else ({}, {}, None)
    if not pairs and (newest := paired.newest(evaluations)):
        after = paired.by_task(view, newest)
    return answers.Decision(
        changes=changes,
        signs=signs,
        failing=_failing(view, before, after),
        cost=_cost(folder, steps),
        health=_health(view, steps),
        next=_next(folder, view, summary, changes, signs),
    )


def _comparable(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations that have all that ``hints`` reads."""
    wanted = ("temperature", "step", "success", "stderr", "n", "interval")
    return [each for each in evaluations if all(name in each for name in wanted)]


def _failing(view: StoreView, before: Rollouts, after: Rollouts) -> answers.Failing | None:
    """Return what fails in the newest evaluation; None if nothing was evaluated."""
    if not after:
        return None
    results, earlier = paired.results_of(after), paired.results_of(before).values
    values, counted = results.values, results.counts_successes
    failed = [
        key
        for key, rollout in after.items()
        if rollout.stored.error or (counted and values.get(key, 0.0) < 1) or key not in values
    ]
    lost = {key for key in values if counted and key in earlier and earlier[key] > values[key]}
    shown = sorted(failed if counted else values, key=lambda key: (key not in lost, values.get(key, 0.0)))
    return answers.Failing(
        failed=len(failed),
        measured=len(after),
        counts_successes=counted,
        reasons=_reasons(view, [after[key] for key in failed], [after[key] for key in after if key not in failed]),
        tasks=[
            answers.FailingTask(
                task_id=readable(key[0]),
                task=plain(after[key].stored.task),
                before=readable(before[key].stored.rollout_id) if key in before else None,
                after=readable(after[key].stored.rollout_id),
                value=values.get(key),
                lost=key in lost,
            )
            for key in shown[:SHOWN]
        ],
    )


def _reasons(view: StoreView, failed: Sequence[RolloutRow], solved: Sequence[RolloutRow]) -> list[answers.Reason]:
    """Return what failed rollouts have in common, most frequent first. A rollout may have several reasons, or none."""
    cut_off = view.cut_off([rollout.stored.rollout_id for rollout in failed])
    flags = _flags(failed, solved)
    found: dict[str, list[str]] = {}
    from_notes = set()
    for rollout in failed:
        stored = rollout.stored
        notes = {readable(str(note))[:REASON_LENGTH] for note in stored.notes.values()}
        from_notes |= notes
        reasons = {readable((stored.error.strip().splitlines() or [""])[0])[:REASON_LENGTH]} if stored.error else notes
        reasons |= {"a model call was cut off at its token limit"} if stored.rollout_id in cut_off else set()
        reasons |= {"no model call"} if not rollout.calls and not stored.error else set()
        reasons |= {"not scored"} if stored.reward is None and not stored.error else set()
        reasons |= {f"{name} is 0" for name in flags if stored.metrics.get(name) == 0}
        for reason in reasons:
            found.setdefault(reason, []).append(stored.rollout_id)
    # A judge's notes differ from rollout to rollout; a function's that repeat name a kind of failure.
    named = ((reason, ids) for reason, ids in found.items() if len(ids) > 1 or reason not in from_notes)
    ordered = sorted(named, key=lambda item: (-len(item[1]), item[0]))[:SHOWN]
    return [answers.Reason(reason=it, rollouts=len(ids), example=readable(ids[0])) for it, ids in ordered]


def _flags(failed: Sequence[RolloutRow], solved: Sequence[RolloutRow]) -> list[str]:
    """Return the metrics, besides success, that are 0 or 1 and 0 much more often in failed rollouts than in the others."""
    names = {name for rollout in failed for name in rollout.stored.metrics} - {"success"}
    return [name for name in sorted(names) if _zeros(failed, name) > ZERO_RATIO * _zeros(solved, name)]


def _zeros(rollouts: Sequence[RolloutRow], name: str) -> float:
    """Return the share of rollouts in which a metric is 0; 0 if it has other values than 0 and 1."""
    values = [rollout.stored.metrics[name] for rollout in rollouts if name in rollout.stored.metrics]
    return sum(value == 0 for value in values) / max(1, len(values)) if set(values) <= {0, 1} else 0.0


def _cost(folder: Path, steps: Steps) -> answers.Cost:
    return answers.Cost(
        seconds=_sum(steps, "seconds"),
        rollouts=int(_sum(steps, "trajectories")),
        calls=int(_sum(steps, "calls")),
        prompt_tokens=int(_sum(steps, "prompt_tokens")),
        sampled_tokens=int(_sum(steps, "sampled_tokens")),
        judge=reading.judge(reading.mapping(reading.report(folder).get("account")) or (steps[-1] if steps else {})),
    )


def _sum(steps: Steps, name: str) -> float:
    return math.fsum(value for metrics in steps if (value := reading.number(metrics.get(name))) is not None)


def _health(view: StoreView, steps: Steps) -> answers.Health:
    """Return whether the trained tokens are those that were sampled, and whether steps were lost."""
    problems = []
    if dropped := sum(bool(metrics.get("dropped")) for metrics in steps):
        problems.append(f"{dropped} of {len(steps)} steps were dropped because of NaN or infinite values")
    gaps = [gap for metrics in steps if (gap := reading.number(metrics.get("logprob_gap"))) is not None]
    limit = reading.number(reading.mapping(view.meta("config")).get("max_logprob_gap"))
    if gaps and limit is not None and max(gaps) > limit:
        problems.append(f"logprobs of engine and learner differed by {max(gaps):.2g} nats per token in a step")
    elsewhere = reading.mapping(view.meta("calls_elsewhere"))
    for how, text in (("refused", "were refused"), ("passed", "went to a provider")):
        counts = reading.mapping(elsewhere.get(how)).values()
        if total := sum(count for count in counts if isinstance(count, int)):
            problems.append(f"{total} model calls of rollouts {text} instead of being answered by the policy")
    agreement = f"differ by {fmean(gaps):.1g} nats per token, at most {max(gaps):.1g} in a step" if gaps else ""
    return answers.Health(problems=problems, agreement=agreement and f"logprobs of engine and learner {agreement}")


def _next(
    folder: Path,
    view: StoreView,
    summary: responses.RunSummary,
    changes: Sequence[answers.Change],
    signs: Sequence[str],
) -> list[answers.Advice]:
    if summary.status == "running" or summary.kind == "evaluation":
        return []
    if not summary.steps:
        again = "Start it without dry_run=True, or without --dry-run."
        return [answers.Advice(text=again, command=None)] if summary.status == "dry run" else []
    newest = [it.after.get("name") for it in summary.pairs if it.after]
    advice = next_steps.next_steps(
        folder,
        ended=outcome.ended_early(summary.status, summary.reason),
        verdicts=[it.verdict for it in changes],
        solved=bool(changes) and all(it.counts_successes and it.before == it.after == 1 for it in changes),
        after=str(newest[0]) if newest else "after",
        suspicious=bool(signs),
        steps=summary.planned_steps or 0,
        given=reading.mapping(reading.mapping(view.meta("command")).get("given")),
    )
    # ``art view`` would open this page.
    commands = [
        None if it.command is None or it.command.startswith("art view") else readable(it.command) for it in advice
    ]
    return [answers.Advice(text=readable(it.text), command=each) for it, each in zip(advice, commands, strict=True)]
