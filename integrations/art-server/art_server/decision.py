"""What a person decides by: whether held-out tasks are solved better, what still fails, what it cost, what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from art_cli import next_steps
from art_cli.change import change
from art_cli.hints import hints
from art_server import outcome, reading, responses
from art_server.plain import plain, readable
from art_server.store_view import RolloutRow, StoreView, read_snapshot

SHOWN = 8
"""Reasons and tasks that are listed."""
CHANGED_SHOWN = 200
ERROR_LENGTH = 160
JUDGE_TOTALS = ("requests", "input_tokens", "output_tokens", "cost")

Steps = Sequence[Mapping[str, float]]
Key = tuple[str, int]
"""A task's id, and how many rollouts of the same task came before."""
Rollouts = Mapping[Key, RolloutRow]
"""An evaluation's rollouts."""


def decision(name: str, folder: Path) -> responses.Decision:
    """Return what the store says about these questions."""
    return read_snapshot(folder / reading.STORE, lambda view: _decision(name, folder, view))


def _decision(name: str, folder: Path, view: StoreView) -> responses.Decision:
    summary = responses.RunSummary(**reading.summary_fields(name, folder, view))
    evaluations = [each for each in reading.list_of(view.meta("evaluations")) if isinstance(each, dict)]
    history = [(step, metrics) for step, _, metrics in view.steps(after=-1, limit=outcome.ALL_STEPS)]
    steps = [metrics for _, metrics in history]
    measured = {id(each): _by_task(view, each) for each in evaluations}
    pairs = [
        (before, after, _change(measured[id(before)], measured[id(after)], before.get("temperature")))
        for before, after in outcome.before_and_after(evaluations)
    ]
    changes = [it for _, _, it in pairs if it is not None]
    signs = [readable(sign[:1].upper() + sign[1:]) for sign in hints(view, history, _comparable(evaluations))]
    before, after = next(((b, a) for b, a, it in pairs if it is not None), (None, _newest(evaluations)))
    failing = _failing(view, measured.get(id(before), {}), measured.get(id(after), {}))
    return responses.Decision(
        changes=changes,
        signs=signs,
        failing=failing,
        cost=_cost(folder, steps),
        health=_health(view, steps),
        next=_next(folder, view, summary, changes, signs),
    )


def _by_task(view: StoreView, evaluation: Mapping[str, Any]) -> Rollouts:
    """Return an evaluation's rollouts by task, in its order."""
    ids = [each for each in reading.list_of(evaluation.get("rollout_ids")) if isinstance(each, str)]
    rollouts, seen = view.rollouts_by_id(ids), Counter[str]()
    by_task: dict[Key, RolloutRow] = {}
    for rollout in (rollouts[each] for each in ids if each in rollouts):
        task = rollout.stored.task_id or rollout.stored.rollout_id
        by_task[task, seen[task]] = rollout
        seen[task] += 1
    return by_task


def _values(rollouts: Iterable[RolloutRow]) -> tuple[list[float], bool]:
    """Return the number of each rollout that is compared, and whether it counts successes (``art_core.Report.successes``)."""
    stored = [rollout.stored for rollout in rollouts]
    if any("success" in each.metrics for each in stored):
        return [reading.number(each.metrics.get("success", 0.0)) or 0.0 for each in stored], True
    rewards = [reading.number(each.reward) or 0.0 for each in stored]
    return rewards, set(rewards) <= {0.0, 1.0}


def _change(before: Rollouts, after: Rollouts, temperature: Any) -> responses.Change | None:
    """Return None if no task was measured twice."""
    keys = [key for key in before if key in after]
    if not keys:
        return None
    values, counted = _values([*(before[key] for key in keys), *(after[key] for key in keys)])
    first, second = values[: len(keys)], values[len(keys) :]
    it = change(first, second)
    return responses.Change(
        temperature=plain(temperature),
        verdict=it.verdict,
        value=it.value,
        low=reading.number(it.low),
        high=reading.number(it.high),
        counts_successes=counted,
        before=fmean(first),
        after=fmean(second),
        tasks=it.tasks,
        lost=it.lost,
        won=it.won,
    )


def changed_tasks(folder: Path, *, limit: int, offset: int) -> responses.Page[responses.ChangedTask]:
    """Return a page of the tasks that changed at the first temperature with both evaluations, the greatest losses first."""

    def read(view: StoreView) -> list[responses.ChangedTask]:
        pairs = outcome.before_and_after(reading.list_of(view.meta("evaluations")))
        return _changed(*(_by_task(view, each) for each in pairs[0])) if pairs else []

    tasks = read_snapshot(folder / reading.STORE, read)
    return responses.Page(total=len(tasks), limit=limit, offset=offset, items=tasks[offset : offset + limit])


def between(first: Path, second: Path) -> responses.RunsComparison:
    """Compare the newest evaluations of two runs at each temperature that both have."""
    one, other = (read_snapshot(folder / reading.STORE, _newest_by_temperature) for folder in (first, second))
    changes, tasks = [], None
    for key, (temperature, before) in one.items():
        after = other.get(key, (None, {}))[1]
        if (it := _change(before, after, temperature)) is not None:
            changes.append(it)
            tasks = _changed(before, after) if tasks is None else tasks
    return responses.RunsComparison(changes=changes, tasks=(tasks or [])[:CHANGED_SHOWN])


def _newest_by_temperature(view: StoreView) -> dict[str, tuple[Any, Rollouts]]:
    newest: dict[str, Mapping[str, Any]] = {}
    for each in reading.list_of(view.meta("evaluations")):
        if isinstance(each, dict):
            key = repr(each.get("temperature"))
            newest[key] = max(newest.get(key, each), each, key=outcome.step_of)
    return {key: (each.get("temperature"), _by_task(view, each)) for key, each in newest.items()}


def _changed(before: Rollouts, after: Rollouts) -> list[responses.ChangedTask]:
    keys = [key for key in before if key in after]
    values, _ = _values([*(before[key] for key in keys), *(after[key] for key in keys)])
    changes = {key: values[len(keys) + place] - values[place] for place, key in enumerate(keys)}
    return [
        responses.ChangedTask(
            task_id=readable(key[0]),
            task=plain(after[key].stored.task),
            before=readable(before[key].stored.rollout_id),
            after=readable(after[key].stored.rollout_id),
            change=changes[key],
        )
        for key in sorted(keys, key=lambda key: changes[key])
        if changes[key]
    ]


def _newest(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the newest evaluation; the first of several temperatures."""
    return max(reversed(evaluations), key=outcome.step_of, default=None)


def _comparable(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations of a run before, while and after it trained."""
    wanted = ("temperature", "step", "success", "stderr", "n", "interval")
    return [each for each in evaluations if all(name in each for name in wanted)]


def _failing(view: StoreView, before: Rollouts, after: Rollouts) -> responses.Failing | None:
    """Return what fails in the newest evaluation, tasks that were solved before first; None if nothing was evaluated."""
    if not after:
        return None
    values, counted = _values(after.values())
    value_of = dict(zip(after, values, strict=True))
    failed = [key for key in after if after[key].stored.error or (value_of[key] < 1 if counted else False)]
    earlier = dict(zip(before, _values(before.values())[0], strict=True)) if before else {}
    lost = {key for key in after if key in earlier and earlier[key] > value_of[key]}
    shown = failed if counted else list(after)
    worst = sorted(shown, key=lambda key: (key not in lost, value_of[key]))[:SHOWN]
    return responses.Failing(
        failed=len(failed),
        measured=len(after),
        counts_successes=counted,
        reasons=_reasons(view, [after[key] for key in failed], list(after.values())),
        tasks=[
            responses.FailingTask(
                task_id=readable(key[0]),
                task=plain(after[key].stored.task),
                before=readable(before[key].stored.rollout_id) if key in before else None,
                after=readable(after[key].stored.rollout_id),
                value=value_of[key],
                lost=key in lost,
            )
            for key in worst
        ],
    )


def _reasons(view: StoreView, failed: Sequence[RolloutRow], measured: Sequence[RolloutRow]) -> list[responses.Reason]:
    """Return what failed rollouts have in common, most frequent first. A rollout may have several reasons, or none."""
    cut_off = view.cut_off([rollout.stored.rollout_id for rollout in failed])
    found: dict[str, list[str]] = {}
    texts = {readable(text) for rollout in failed for text in rollout.stored.notes.values()}
    flags = _flags(measured)
    for rollout in failed:
        stored = rollout.stored
        reasons = [(stored.error.strip().splitlines() or [""])[0][:ERROR_LENGTH]] if stored.error else []
        reasons += ["a model call was cut off at its token limit"] if stored.rollout_id in cut_off else []
        reasons += ["no model call"] if not rollout.calls and not stored.error else []
        reasons += ["not scored"] if stored.reward is None and not stored.error else []
        reasons += stored.notes.values()
        reasons += [f"{name} is 0" for name in flags if stored.metrics.get(name) == 0]
        for reason in reasons:
            found.setdefault(readable(reason), []).append(stored.rollout_id)
    # A judge's notes differ from rollout to rollout; a function's that repeat name a kind of failure.
    repeated = {reason: ids for reason, ids in found.items() if len(ids) > 1 or reason not in texts}
    ordered = sorted(repeated.items(), key=lambda item: -len(item[1]))[:SHOWN]
    return [responses.Reason(reason=it, rollouts=len(ids), example=readable(ids[0])) for it, ids in ordered]


def _flags(rollouts: Sequence[RolloutRow]) -> list[str]:
    """Return the metrics, besides success, that are 0 or 1 in every rollout that has them, and not always 0."""
    values: dict[str, set[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.stored.metrics.items():
            values.setdefault(name, set()).add(value)
    return [name for name, seen in values.items() if name != "success" and 1 in seen and seen <= {0, 1}]


def _cost(folder: Path, steps: Steps) -> responses.Cost:
    return responses.Cost(
        seconds=_sum(steps, "seconds"),
        rollouts=int(_sum(steps, "trajectories")),
        calls=int(_sum(steps, "calls")),
        prompt_tokens=int(_sum(steps, "prompt_tokens")),
        sampled_tokens=int(_sum(steps, "sampled_tokens")),
        judge=_judge(folder, steps),
    )


def _judge(folder: Path, steps: Steps) -> dict[str, float]:
    last = steps[-1] if steps else {}
    # A judge's account has all totals (art-ruler); a reward's own metric may have one of these names.
    judge = {name: last.get(f"account/{name}", last.get(name)) for name in JUDGE_TOTALS} if "unpriced" in last else {}
    account = reading.mapping(reading.report(folder).get("account")) or judge
    return {name: value for name in JUDGE_TOTALS if (value := reading.number_or_none(account.get(name))) is not None}


def _sum(steps: Steps, name: str) -> float:
    return math.fsum(value for metrics in steps if (value := reading.number_or_none(metrics.get(name))) is not None)


def _health(view: StoreView, steps: Steps) -> responses.Health:
    """Return whether the trained tokens are those that were sampled, and whether steps were lost."""
    problems = []
    if dropped := sum(bool(metrics.get("dropped")) for metrics in steps):
        problems.append(f"{dropped} of {len(steps)} steps were dropped because of NaN or infinite values")
    gaps = [gap for metrics in steps if (gap := reading.number_or_none(metrics.get("logprob_gap"))) is not None]
    limit = reading.number_or_none(reading.mapping(view.meta("config")).get("max_logprob_gap"))
    if gaps and limit is not None and max(gaps) > limit:
        problems.append(f"logprobs of engine and learner differed by {max(gaps):.2g} nats per token in a step")
    elsewhere = reading.mapping(view.meta("calls_elsewhere"))
    for how, text in (("refused", "were refused"), ("passed", "went to a provider")):
        counts = reading.mapping(elsewhere.get(how)).values()
        if total := sum(count for count in counts if isinstance(count, int)):
            problems.append(f"{total} model calls of rollouts {text} instead of being answered by the policy")
    agreement = f"differ by {fmean(gaps):.1g} nats per token, at most {max(gaps):.1g} in a step" if gaps else ""
    return responses.Health(problems=problems, agreement=agreement and f"logprobs of engine and learner {agreement}")


def _next(
    folder: Path,
    view: StoreView,
    summary: responses.RunSummary,
    changes: Sequence[responses.Change],
    signs: Sequence[str],
) -> list[responses.Advice]:
    if summary.status == "running" or summary.kind == "evaluation":
        return []
    advice = next_steps.next_steps(
        folder,
        status=summary.status,
        verdicts=[it.verdict for it in changes],
        suspicious=bool(signs),
        steps=summary.planned_steps or 0,
        command=reading.mapping(view.meta("command")),
    )
    return [responses.Advice(text=readable(it.text), command=it.command and readable(it.command)) for it in advice]
