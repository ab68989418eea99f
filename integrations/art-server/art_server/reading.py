"""Run folders -> what can be told about them: steps, groups, trajectories, checkpoints. Reads only, while others write.

Knows nothing about HTTP.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core.errors import StoreError
from art_core.store.run_folder import CHECKPOINT, checkpoints
from art_server import answers, outcome
from art_server.plain import numbers, plain, readable
from art_server.store_view import SeenRollout, StoreView, Wanted, look

LOST = ("RolloutLost", "CancelledError")
"""How the errors of attempts begin that were made again: nothing that the agent did."""
MANIFEST = "learner.json"
STORE = "run.sqlite"


def run_summary(name: str, folder: Path) -> answers.RunSummary:
    """Return a run at a glance; one that cannot be read says why."""
    try:
        return look(folder / STORE, lambda view: answers.RunSummary(**_summary(name, folder, view)))
    except StoreError as error:
        return answers.RunSummary(name=name, problem=readable(str(error)))


def run(name: str, folder: Path) -> answers.Run:
    """Return a run with its settings, its evaluations and how far it is."""

    def ask(view: StoreView) -> answers.Run:
        config = _mapping(view.meta("config"))
        splits = [answers.Split(**vars(it)) for it in view.splits()]
        summary = _summary(name, folder, view)
        return answers.Run(
            **summary,
            config=plain(config),
            start_weights=_text(view.meta("start_weights")),
            evaluations=[outcome.without_ids(it) for it in _list(view.meta("evaluations"))],
            splits=splits,
            progress=_progress(view, splits, config if summary["planned_steps"] else {}),
            report=plain(_read_json(folder / "report.json")),
        )

    return look(folder / STORE, ask)


def steps(folder: Path, *, after: int, limit: int) -> answers.Steps:
    """Return what the steps ``after`` one measured."""

    def ask(view: StoreView) -> answers.Steps:
        rows = view.steps(after=after, limit=limit)
        items = [answers.Step(step=step, at=at, metrics=numbers(metrics)) for step, at, metrics in rows]
        return answers.Steps(last_step=view.step_counts()[1], items=items)

    return look(folder / STORE, ask)


def groups(folder: Path, wanted: Wanted, *, limit: int, offset: int) -> answers.Page[answers.RolloutGroup]:
    """Return a page of groups, the newest first."""
    total, found = look(folder / STORE, lambda view: view.groups(wanted, limit=limit, offset=offset))
    return answers.Page(total=total, limit=limit, offset=offset, items=[_group(it) for it in found])


def trajectories(
    folder: Path, wanted: Wanted, *, limit: int, offset: int, newest_first: bool
) -> answers.Page[answers.TrajectorySummary]:
    """Return a page of runs of the agent, by when they began."""

    def ask(view: StoreView) -> answers.Page[answers.TrajectorySummary]:
        total, found = view.rollouts(wanted, limit=limit, offset=offset, newest_first=newest_first)
        measured = outcome.evaluations_of(view.meta("evaluations"))
        items = [
            answers.TrajectorySummary(**trajectory_fields(it), evaluation=measured.get(it.rollout.rollout_id))
            for it in found
        ]
        return answers.Page(total=total, limit=limit, offset=offset, items=items)

    return look(folder / STORE, ask)


def tasks(folder: Path, *, split: str | None, limit: int, offset: int) -> answers.Page[answers.TaskView]:
    """Return a page of tasks, those that were run in most different steps first."""
    total, found = look(folder / STORE, lambda view: view.tasks(split=split, limit=limit, offset=offset))
    items = [answers.TaskView(**{**vars(it), "task": plain(it.task)}) for it in found]
    return answers.Page(total=total, limit=limit, offset=offset, items=items)


def all_checkpoints(folder: Path) -> list[answers.Checkpoint]:
    """Return the checkpoints that are kept, the newest first; one that is being removed may be missing."""
    found = (checkpoint(folder, path.name) for path in reversed(checkpoints(folder)))
    return [it for it in found if it is not None]


def checkpoint(folder: Path, name: str) -> answers.Checkpoint | None:
    """Return a checkpoint by its name, None where there is none."""
    match = CHECKPOINT.fullmatch(name)
    path = folder / "checkpoints" / name
    if match is None or not path.is_dir():
        return None
    manifest = _mapping(_read_json(path / MANIFEST))
    digests = _mapping(manifest.get("files"))
    files = []
    for file in sorted(path.rglob("*")):
        try:
            if not file.is_file():
                continue
            size = file.stat().st_size
        except OSError:
            continue  # its checkpoint is being removed
        relative = str(file.relative_to(path))
        files.append(answers.CheckpointFile(name=readable(relative), size=size, sha256=_text(digests.get(relative))))
    version = manifest.get("version")
    return answers.Checkpoint(
        name=path.name,
        step=int(match[1]),
        version=version if isinstance(version, int) else None,
        base_model=_text(manifest.get("base_model")),
        size=sum(it.size for it in files),
        files=files,
    )


def state_of(seen: SeenRollout) -> answers.State:
    """Return how far a run of the agent is, or how it ended."""
    error = seen.rollout.error
    if error and error.startswith(LOST):
        return "lost"
    if not seen.rollout.finished:
        return "running"
    return "failed" if error else "finished"


def trajectory_fields(seen: SeenRollout) -> dict[str, Any]:
    """Return the fields of a ``TrajectorySummary``."""
    it = seen.rollout
    return {
        "rollout_id": readable(it.rollout_id),
        "state": state_of(seen),
        "step": it.step,
        "split": _text(it.split),
        "group": _text(it.group),
        "task_id": _text(it.task_id),
        "task": plain(it.task),
        "started": seen.started,
        "seconds": it.seconds,
        "reward": number(it.reward),
        "advantage": number(it.advantage),
        "metrics": numbers(it.metrics),
        "calls": seen.calls,
        "sampled_tokens": seen.sampled_tokens,
        "error": _text(it.error),
    }


def number(value: float | None) -> float | None:
    """Return a number that JSON can say, else None."""
    return value if value is not None and math.isfinite(value) else None


def _summary(name: str, folder: Path, view: StoreView) -> dict[str, Any]:
    counted, last = view.step_counts()
    config, evaluations = _mapping(view.meta("config")), _list(view.meta("evaluations"))
    reward, learner = view.meta("reward"), view.meta("learner")
    # Folders from before the plan was noted: only train noted both a reward and a learner.
    usual = config.get("steps") if reward is not None and learner is not None else None
    planned = view.meta("planned_steps", usual)
    planned = planned if isinstance(planned, int) else None
    measures = planned is None and reward is not None and learner is None and not view.meta("dry_run")
    kind, working = "evaluation" if measures else "training", outcome.is_open(folder, STORE)
    status, reason = outcome.status(view, working=working, kind=kind, planned=planned)
    pairs = outcome.pairs(evaluations)
    first = pairs[0] if pairs else answers.EvaluationPair()
    measured = [it for it in evaluations if isinstance(it, dict) and it.get("name") == "evaluation"]
    return {
        "name": name,
        "kind": kind,
        "model": _text(view.meta("model")),
        "loss": _text(view.meta("loss")),
        "reward": _text(reward),
        "learner": _text(learner),
        "steps": counted,
        "last_step": last,
        "planned_steps": planned,
        "written": _written(folder),
        "open": working,
        "status": status,
        "reason": reason,
        "final_reward": number(outcome.final_reward(view)),
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


def _progress(view: StoreView, splits: Sequence[answers.Split], config: Mapping[str, Any]) -> answers.Progress | None:
    """Return how far the rollouts of the step after the last one are."""
    last = view.step_counts()[1] or 0
    newest = max((it.last_step or 0 for it in splits if it.split == "train"), default=0)
    if newest <= last:
        return None
    begun, finished = view.progress(last + 1, "train")
    sizes = config.get("tasks_per_step"), config.get("group_size")
    expected = sizes[0] * sizes[1] if all(isinstance(it, int) for it in sizes) else None
    return answers.Progress(step=last + 1, begun=begun, finished=finished, expected=expected)


def _group(found: Sequence[SeenRollout]) -> answers.RolloutGroup:
    first = found[0]
    states = [state_of(it) for it in found]
    counted = [it for it, state in zip(found, states, strict=True) if state != "lost"]
    rewards = [it.rollout.reward for it in counted if number(it.rollout.reward) is not None]
    return answers.RolloutGroup(
        group=readable(first.rollout.group or first.rollout.rollout_id),
        step=first.rollout.step,
        split=_text(first.rollout.split),
        task_id=_text(first.rollout.task_id),
        task=plain(first.rollout.task),
        started=first.started,
        size=len(counted),
        lost=states.count("lost"),
        running=states.count("running"),
        failed=states.count("failed"),
        rewards=rewards,
        mean=statistics.fmean(rewards) if rewards else None,
        spread=statistics.stdev(rewards) if len(rewards) > 1 else None,
        members=[_member(it, state) for it, state in zip(found, states, strict=True)],
    )


def _member(seen: SeenRollout, state: answers.State) -> answers.GroupMember:
    it = seen.rollout
    return answers.GroupMember(
        rollout_id=readable(it.rollout_id),
        state=state,
        reward=number(it.reward),
        success=numbers(it.metrics).get("success"),
        advantage=number(it.advantage),
        seconds=it.seconds,
        calls=seen.calls,
        error=_text(it.error),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None


def _text(value: Any) -> str | None:
    return None if value is None else readable(str(value))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
