"""Run folders -> the responses of the read-only routes: steps, groups, trajectories, checkpoints."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.errors import StoreError
from art_core.store.run_folder import CHECKPOINT, checkpoints
from art_server import outcome, responses
from art_server.plain import numbers, plain, readable
from art_server.search import Indexes
from art_server.store_view import LOST, Order, RolloutFilter, RolloutRow, StoreView, read_snapshot

JUDGE_TOTALS = ("requests", "input_tokens", "output_tokens", "cost")
"""Totals of ``Ruler.account``, there named ``judge/...``."""
MANIFEST = "learner.json"
STORE = "run.sqlite"


def run_summary(name: str, folder: Path) -> responses.RunSummary:
    """Return a run's summary; if the run can't be read, only ``problem`` is set."""
    try:
        return read_snapshot(folder / STORE, lambda view: responses.RunSummary(**summary_fields(name, folder, view)))
    except StoreError as error:
        return responses.RunSummary(name=name, problem=readable(str(error)))


def run(name: str, folder: Path) -> responses.Run:
    """Return a run with its settings, evaluations and progress."""

    def read(view: StoreView) -> responses.Run:
        config = mapping(view.meta("config"))
        splits = [responses.Split(**vars(split)) for split in view.splits()]
        summary = summary_fields(name, folder, view)
        return responses.Run(
            **summary,
            config=plain(config),
            start_weights=_text(view.meta("start_weights")),
            evaluations=[outcome.without_ids(evaluation) for evaluation in list_of(view.meta("evaluations"))],
            splits=splits,
            agents=[readable(agent) for agent in view.agents()],
            progress=_progress(view, splits, config if summary["planned_steps"] else {}),
            report=plain(report(folder)) or None,
        )

    return read_snapshot(folder / STORE, read)


def steps(folder: Path, *, after: int, limit: int) -> responses.Steps:
    """Return the metrics of the steps after step ``after``."""

    def read(view: StoreView) -> responses.Steps:
        rows = view.steps(after=after, limit=limit)
        items = [responses.Step(step=step, at=at, metrics=numbers(metrics)) for step, at, metrics in rows]
        return responses.Steps(last_step=view.step_counts()[1], items=items)

    return read_snapshot(folder / STORE, read)


def groups(folder: Path, selected: RolloutFilter, *, limit: int, offset: int) -> responses.Page[responses.RolloutGroup]:
    """Return a page of groups, newest first."""
    total, page = read_snapshot(folder / STORE, lambda view: view.groups(selected, limit=limit, offset=offset))
    return responses.Page(total=total, limit=limit, offset=offset, items=[_group(rollouts) for rollouts in page])


def trajectories(
    folder: Path, selected: RolloutFilter, *, limit: int, offset: int, order: Order = "newest",
    search: str | None = None, indexes: Indexes | None = None, changes: Mapping[str, float] | None = None,
) -> responses.Page[responses.TrajectorySummary]:  # fmt: skip
    """Return a page of rollouts; with ``search``, those whose texts have its words. ``changes``: for the order ``changed``."""
    changes = changes or {}
    if search and indexes:
        selected = replace(selected, found=tuple(indexes.of(folder / STORE).find(search)))

    def read(view: StoreView) -> responses.Page[responses.TrajectorySummary]:
        total, page = view.rollouts(selected, limit=limit, offset=offset, order=order, changes=changes)
        evaluations = outcome.evaluations_of(view.meta("evaluations"))
        items = [
            responses.TrajectorySummary(
                **trajectory_fields(rollout),
                evaluation=evaluations.get(rollout.stored.rollout_id),
                change=changes.get(rollout.stored.rollout_id),
            )
            for rollout in page
        ]
        return responses.Page(total=total, limit=limit, offset=offset, items=items)

    return read_snapshot(folder / STORE, read)


def tasks(folder: Path, *, split: str | None, limit: int, offset: int) -> responses.Page[responses.TaskView]:
    """Return a page of tasks, those with rollouts in the most steps first."""
    total, page = read_snapshot(folder / STORE, lambda view: view.tasks(split=split, limit=limit, offset=offset))
    items = [responses.TaskView(**{**vars(task), "task": plain(task.task)}) for task in page]
    return responses.Page(total=total, limit=limit, offset=offset, items=items)


def all_checkpoints(folder: Path) -> list[responses.Checkpoint]:
    """Return the existing checkpoints, newest first; one that is being removed may be missing."""
    listed = (checkpoint(folder, path.name) for path in reversed(checkpoints(folder)))
    return [each for each in listed if each is not None]


def checkpoint(folder: Path, name: str) -> responses.Checkpoint | None:
    """Return a checkpoint by name; None if it doesn't exist."""
    match = CHECKPOINT.fullmatch(name)
    path = folder / "checkpoints" / name
    if match is None or not path.is_dir():
        return None
    manifest = mapping(_read_json(path / MANIFEST))
    digests = mapping(manifest.get("files"))
    files = []
    for file in sorted(path.rglob("*")):
        try:
            if not file.is_file():
                continue
            size = file.stat().st_size
        except OSError:
            continue  # the checkpoint is being removed
        relative = str(file.relative_to(path))
        files.append(responses.CheckpointFile(name=readable(relative), size=size, sha256=_text(digests.get(relative))))
    version = manifest.get("version")
    return responses.Checkpoint(
        name=path.name,
        step=int(match[1]),
        version=version if isinstance(version, int) else None,
        base_model=_text(manifest.get("base_model")),
        size=sum(file.size for file in files),
        files=files,
    )


def report(folder: Path) -> dict[str, Any]:
    """Return the content of ``report.json``; empty if it is missing."""
    return mapping(_read_json(folder / "report.json"))


def state_of(rollout: RolloutRow) -> responses.State:
    """Return a rollout's state."""
    error = rollout.stored.error
    if error and error.startswith(LOST):
        return "lost"
    if not rollout.stored.finished:
        return "running"
    return "failed" if error else "finished"


def trajectory_fields(rollout: RolloutRow) -> dict[str, Any]:
    """Return the fields of a ``TrajectorySummary``."""
    stored = rollout.stored
    return {
        "rollout_id": readable(stored.rollout_id),
        "state": state_of(rollout),
        "step": stored.step,
        "split": _text(stored.split),
        "group": _text(stored.group),
        "task_id": _text(stored.task_id),
        "task": plain(stored.task),
        "started": rollout.started,
        "seconds": stored.seconds,
        "reward": number(stored.reward),
        "advantage": number(stored.advantage),
        "metrics": numbers(stored.metrics),
        "calls": rollout.calls,
        "sampled_tokens": rollout.sampled_tokens,
        "error": _text(stored.error),
    }


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def summary_fields(name: str, folder: Path, view: StoreView) -> dict[str, Any]:
    """Return the fields of a ``RunSummary``."""
    step_count, last = view.step_counts()
    config, evaluations = mapping(view.meta("config")), list_of(view.meta("evaluations"))
    reward, learner = view.meta("reward"), view.meta("learner")
    # Older folders don't have planned_steps; in them, only train recorded both a reward and a learner.
    default = config.get("steps") if reward is not None and learner is not None else None
    planned = view.meta("planned_steps", default)
    planned = planned if isinstance(planned, int) else None
    only_evaluates = planned is None and reward is not None and learner is None and not view.meta("dry_run")
    kind, working = "evaluation" if only_evaluates else "training", outcome.is_open(folder, STORE)
    status, reason = outcome.status(view, working=working, kind=kind, planned=planned)
    if not config and view.meta("model") is None:
        kind = "recording"  # no run was opened in it: art gateway's
    elif planned is None and view.meta("dry_run"):
        kind = "dry run"
    pairs = outcome.pairs(evaluations)
    first = pairs[0] if pairs else responses.EvaluationPair()
    measured = [each for each in evaluations if isinstance(each, dict) and each.get("name") == "evaluation"]
    written = report(folder)
    return {
        "name": name,
        "kind": kind,
        "model": _text(view.meta("model")),
        "loss": _text(view.meta("loss")),
        "reward": _text(reward),
        "learner": _text(learner),
        "steps": step_count,
        "last_step": last,
        "planned_steps": planned,
        "written": _written(folder),
        "open": working,
        "status": status,
        "reason": reason,
        "final_reward": number(outcome.final_reward(view)),
        "seconds": number(written.get("seconds")) if written.get("steps") == last else None,
        "judge_cost": judge(mapping(written.get("account"))).get("cost"),
        "pairs": pairs,
        "before": first.before,
        "after": first.after if first.after and first.after.get("name") == "after" else None,
        "measured": outcome.without_ids(measured[-1]) if measured else None,
    }


def _written(folder: Path) -> float | None:
    times = []
    for name in (STORE, f"{STORE}-wal"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _progress(
    view: StoreView, splits: Sequence[responses.Split], config: Mapping[str, Any]
) -> responses.Progress | None:
    """Return the progress of the step after the last finished one; None if it hasn't started."""
    last = view.step_counts()[1] or 0
    newest = max((split.last_step or 0 for split in splits if split.split == "train"), default=0)
    if newest <= last:
        return None
    started, finished = view.progress(last + 1, "train")
    sizes = config.get("tasks_per_step"), config.get("group_size")
    expected = sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None
    return responses.Progress(step=last + 1, begun=started, finished=finished, expected=expected)


def _group(rollouts: Sequence[RolloutRow]) -> responses.RolloutGroup:
    first = rollouts[0]
    states = [state_of(rollout) for rollout in rollouts]
    counted = [rollout.stored for rollout, state in zip(rollouts, states, strict=True) if state != "lost"]
    rewards = [stored.reward for stored in counted if number(stored.reward) is not None]
    return responses.RolloutGroup(
        group=readable(first.stored.group or first.stored.rollout_id),
        step=first.stored.step,
        split=_text(first.stored.split),
        task_id=_text(first.stored.task_id),
        task=plain(first.stored.task),
        started=first.started,
        size=len(counted),
        lost=states.count("lost"),
        running=states.count("running"),
        failed=states.count("failed"),
        rewards=rewards,
        mean=statistics.fmean(rewards) if rewards else None,
        spread=statistics.stdev(rewards) if len(rewards) > 1 else None,
        members=[_member(rollout, state) for rollout, state in zip(rollouts, states, strict=True)],
    )


def _member(rollout: RolloutRow, state: responses.State) -> responses.GroupMember:
    stored = rollout.stored
    return responses.GroupMember(
        rollout_id=readable(stored.rollout_id),
        state=state,
        reward=number(stored.reward),
        success=numbers(stored.metrics).get("success"),
        advantage=number(stored.advantage),
        seconds=stored.seconds,
        calls=rollout.calls,
        error=_text(stored.error),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None


def _text(value: Any) -> str | None:
    return None if value is None else readable(str(value))


def judge(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return a judge's totals, without the prefix that its metrics have."""
    named = {name: number(metrics.get(f"judge/{name}")) for name in JUDGE_TOTALS}
    return {name: value for name, value in named.items() if value is not None}


def mapping(value: Any) -> dict[str, Any]:
    """Return ``value`` if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
