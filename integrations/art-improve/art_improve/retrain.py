"""``retrain``: a round of training on what users asked since the last one, from the weights that count now."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import art_core as art
from art_cli.arguments import load_tasks
from art_compare import compare
from art_compare.gate import read_gate
from art_core.errors import ConfigError
from art_core.plugin_api import check_settings, model_folder, plural, task_id
from art_core.store.run_folder import last_checkpoint
from art_core.types import Reward
from art_improve.history import History, Round, State, is_run
from art_tasks.traffic import curate, read
from art_tasks.traffic.curate import Redact, as_lines
from art_tasks.traffic.redact import Redactor

if TYPE_CHECKING:
    from art_compare import Comparison, Verdict
    from art_core import TrainResult

SIDES = ("current", "new")
"""The names of the weights, before and after a round, in a gate."""
DECIDED = ("eval_tasks", "eval_temperatures", "allow_changes", "dry_run", "command")
TRAIN, HELD_OUT = "tasks.jsonl", "held_out.jsonl"


async def retrain(
    agent: object,
    traffic: str | Path,
    *,
    model: str,
    reward: str | Reward,
    tasks: Sequence[Any] = (),
    held_out: Sequence[Any] = (),
    steps: int = 20,
    gate: str | None = None,
    strict: bool = False,
    share: float = 0.2,
    at_least: int = 20,
    redact: bool = False,
    run_dir: str | Path = "runs/rounds",
    seed: int = 0,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Round | None:
    """Train on what users asked since the last round, and accept the weights if held-out tasks allow it.

    The tasks are those of ``traffic`` (a source of ``art tasks from``) that are new: none is the same, or nearly, as one in
    ``tasks``, in ``held_out`` or of an earlier round. The ``share`` of the newest conversations is held out, beside all tasks
    that were held out before. The rest is trained on, with as many older tasks, for so many ``steps``, from the weights that
    were accepted last (at first ``model``: as in ``train``, or a run folder). ``gate`` compares ``new`` with ``current``; the
    default is ``"success >= current"``, or of the reward. ``strict``: the tasks must show that it holds.

    Returns the round, or None with fewer than ``at_least`` new tasks. ``run_dir`` keeps all rounds: ``rounds.json``, a run
    folder for each, and the link ``current`` to the one accepted last. The same call continues a round that was interrupted.
    ``settings`` are further keywords of ``train``.
    """
    folder = Path(run_dir).expanduser()
    _check(folder, model, gate, settings)
    with History.opened(folder) as history:
        if (gone := history.take_over_rollback(Path(traffic).expanduser())) is not None:
            say(f"{gone.name} was rolled back in production: {gone.why}")
        round_ = history.unfinished
        if round_ is None:
            found = _new_tasks(history, traffic, tasks, held_out, share, Redactor() if redact else None, seed)
            say(found.summary)
            if len(found.new) < at_least:
                say(f"{plural(len(found.new), 'new task')} to train on, fewer than {at_least}: nothing to do yet")
                return None
            round_ = _begin(history, found, model)
        run = history.run_dir(round_)
        result = await art.train(
            agent, load_tasks(str(run / TRAIN)), model=_weights(round_.start, run, say), reward=reward, steps=steps,
            eval_tasks=load_tasks(str(run / HELD_OUT)), seed=seed, run_dir=run, **settings,
        )  # fmt: skip
        round_ = _ended(round_, result, gate, strict)
        history.put(round_)
        return round_


def _check(folder: Path, model: str, gate: str | None, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that can only fail later."""
    if decided := [name for name in DECIDED if name in settings]:
        raise ConfigError(f"art retrain decides {', '.join(decided)} itself; drop it")
    own = signature(art.train).parameters
    check_settings({name: value for name, value in settings.items() if name not in own}, art.train)
    if not is_run(Path(model).expanduser()):
        model_folder(model)
    if is_run(folder):
        raise ConfigError(
            f"{folder} is the folder of a run; rounds need one of their own, such as run_dir='runs/rounds'"
        )
    if any(condition.measure == "cost" for condition in read_gate(gate or "", SIDES)):
        raise ConfigError("the cost of weights of your own isn't known; compare sampled_tokens, which it depends on")


@dataclass(frozen=True)
class _Found:
    """The tasks of a round."""

    new: Sequence[Any]
    older: Sequence[Any]
    held_out: Sequence[Any]
    held_out_new: int
    summary: str


def _new_tasks(
    history: History,
    traffic: str | Path,
    tasks: Sequence[Any],
    held_out: Sequence[Any],
    share: float,
    redact: Redact | None,
    seed: int,
) -> _Found:
    """Return what is new in the traffic, as many older tasks, and all held-out tasks."""
    runs = [history.run_dir(it) for it in history.rounds]
    trained = _distinct([*tasks, *(task for run in runs for task in load_tasks(str(run / TRAIN)))])
    known = _distinct([*held_out, *(task for run in runs for task in load_tasks(str(run / HELD_OUT)))])
    found = read(traffic)
    curated = curate(found.requests, held_out=share, known=[*trained, *known], redact=redact)
    older = random.Random(seed).sample(trained, min(len(trained), len(curated.train)))
    dropped = "".join(f"; {count} dropped, {reason}" for reason, count in curated.dropped.most_common())
    summary = (
        f"{plural(len(found.requests), 'request')} of {traffic}, {plural(len(curated.tasks), 'new task')}{dropped}"
    )
    return _Found(curated.train, older, [*known, *curated.held_out], len(curated.held_out), summary)


def _begin(history: History, found: _Found, model: str) -> Round:
    """Write a round's tasks, and add it to the history."""
    if not found.held_out:
        raise ConfigError("no task is held out, so nothing can be measured; pass held_out tasks, or a share above 0")
    start = history.current or Path(model).expanduser()
    if is_run(start):
        history.link(start)
    round_ = Round(
        f"round-{len(history.rounds) + 1:03}", time.time(), model if history.current is None else str(start), len(found.new),
        len(found.older), len(found.held_out), found.held_out_new,
    )  # fmt: skip
    run = history.run_dir(round_)
    run.mkdir(exist_ok=True)
    (run / TRAIN).write_bytes(as_lines([*found.new, *found.older]))
    (run / HELD_OUT).write_bytes(as_lines(found.held_out))
    history.put(round_)
    return round_


def _distinct(tasks: Sequence[Any]) -> list[Any]:
    return list({task_id(task): task for task in tasks}.values())


def _weights(start: str, run: Path, say: Callable[[str], None]) -> str:
    """Return the model that the training begins with; an adapter is merged into its model first, once."""
    folder = Path(start).expanduser()
    newest = last_checkpoint(folder)
    if newest is None:
        return start
    if (newest / "config.json").is_file():
        return str(newest)
    merged = run / "start"
    if not merged.exists():
        from art_vllm.export import export

        say(f"merging the adapter of {newest} into its model")
        export(folder, merged)
    return str(merged / "merged")


def _ended(round_: Round, result: TrainResult, gate: str | None, strict: bool) -> Round:
    """Return the round with what the training changed, and whether its weights are accepted."""
    report, rows = result.report, _metrics(result.run_dir)
    round_ = replace(
        round_, before=report["before"], after=report["after"], seconds=report["seconds"],
        rollouts=int(sum(row.get("trajectories", 0) for row in rows)), judge_cost=report["account"].get("judge/cost"),
    )  # fmt: skip
    if (stopped := report["stopped"]) and stopped.get("may_pass"):
        return round_
    round_ = replace(round_, ended=time.time())
    if stopped:
        return replace(round_, state="stopped", why=stopped["reason"])
    sides = [
        f"{name}={result.run_dir}@{evaluation}" for name, evaluation in zip(SIDES, ("before", "after"), strict=True)
    ]
    comparison = compare(*sides)
    measure = "success" if comparison.difference("success", 1) is not None else "reward"
    difference = comparison.difference(measure, 1)
    if difference is None:
        return replace(round_, state="stopped", why="no held-out task was scored both before and after")
    comparison = compare(*sides, gate=gate or f"{measure} >= current")
    return replace(
        round_, state=_state(comparison, strict), measure=measure, difference=difference.value, interval=difference.interval,
        why="; ".join(map(_said, comparison.verdicts)),
    )  # fmt: skip


def _state(comparison: Comparison, strict: bool) -> State:
    """A condition that is met, but not shown to hold, is enough unless ``strict``."""
    met = (it.state == "holds" or (it.state == "not shown" and it.met and not strict) for it in comparison.verdicts)
    return "accepted" if all(met) else "rejected"


def _said(verdict: Verdict) -> str:
    state = verdict.state if verdict.state != "not shown" else "met, not shown" if verdict.met else "not met"
    return f"{state}: {verdict.condition}"


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
