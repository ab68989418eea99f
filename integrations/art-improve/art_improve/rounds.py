"""``retrain``: a round of training on what users asked since the last one, from the weights that count now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import art_core as art
from art_cli.arguments import load_tasks
from art_cli.catalogue import how_to_install
from art_compare import compare
from art_compare.gate import read_gate
from art_core.errors import ConfigError
from art_core.plugin_api import check_settings, model_folder, plural
from art_core.store import Store
from art_core.store.run_folder import last_checkpoint, store_file
from art_core.types import Reward
from art_improve.history import CURRENT, History, Round, State, is_run
from art_improve.round_tasks import HELD_OUT, TRAIN, RoundTasks, find_tasks
from art_tasks.traffic.redact import Redactor

if TYPE_CHECKING:
    from art_compare import Comparison, Verdict
    from art_core import TrainResult

SIDES = ("current", "new")
"""The names of the weights, before and after a round, in a gate."""
DECIDED = ("eval_tasks", "eval_temperatures", "allow_changes", "dry_run", "command")


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
    restart: bool = False,
    run_dir: str | Path = "runs/rounds",
    seed: int = 0,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Round | None:
    """Train on what users asked since the last round, and accept the weights if held-out tasks allow it.

    A task is new unless it is the same, or nearly the same, as one in ``tasks`` or ``held_out``, now or in earlier calls, or of
    an accepted round. ``traffic`` is a source of ``art tasks from``. The ``share`` of the newest conversations is held out,
    beside all tasks that were held out before. The training takes ``steps`` steps, on new tasks and as many older ones. It
    begins with the weights that were accepted last; at first with ``model``, as in ``train``, or a run folder. They are accepted
    if they meet ``gate``, which compares ``new`` with ``current``; the default is ``"success >= current"``, or of the reward.
    ``strict``: the tasks must show that the gate holds.

    Returns the round, or None with fewer than ``at_least`` new tasks. ``run_dir`` keeps all rounds: ``rounds.json``, a run
    folder for each, and the link ``current`` to the one accepted last. A round that was interrupted is continued; ``restart``
    gives it up and begins a new one. ``settings`` are further keywords of ``train``.
    """
    folder = Path(run_dir).expanduser()
    _check(folder, gate, settings)
    with History.opened(folder) as history:
        _take_over_rollbacks(history, traffic, say)
        round_ = _unfinished(history, restart, say)
        if round_ is None:
            at_once = steps * settings.get("tasks_per_step", art.TrainConfig().tasks_per_step)
            redactor = Redactor() if redact else None
            round_tasks = find_tasks(
                history, traffic, tasks, held_out, share=share, redact=redactor, seed=seed, at_once=at_once
            )
            say(round_tasks.summary)
            if round_tasks.waiting < at_least:
                say(f"{plural(round_tasks.waiting, 'new task')} to train on, fewer than {at_least}: nothing to do yet")
                return None
            round_ = _begin(history, round_tasks, model)
            say(f"{round_.name} begins, from {round_.start}")
        trained = await _train(history.run_dir(round_), round_, agent, reward, steps, seed, say, settings)
        _take_over_rollbacks(history, traffic, say)
        round_ = _ended(round_, trained, gate, strict)
        if round_.state == "accepted" and (why := _lost_start(history, round_)):
            round_ = replace(round_, state="stopped", why=why)
        history.put(round_)
        return round_


def _check(folder: Path, gate: str | None, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that can only fail later."""
    if decided := [name for name in DECIDED if name in settings]:
        raise ConfigError(f"art retrain decides {', '.join(decided)} itself; drop it")
    own = signature(art.train).parameters
    check_settings({name: value for name, value in settings.items() if name not in own}, art.train)
    if is_run(folder):
        raise ConfigError(
            f"{folder} is the folder of a run; rounds need one of their own, such as run_dir='runs/rounds'"
        )
    if any(condition.measure == "cost" for condition in read_gate(gate or "", SIDES)):
        raise ConfigError("the cost of weights of your own isn't known; compare sampled_tokens, which it depends on")


def _take_over_rollbacks(history: History, traffic: str | Path, say: Callable[[str], None]) -> None:
    rolled_back, link = history.take_over_rollbacks(Path(traffic).expanduser()), history.folder / CURRENT
    for round_ in rolled_back:
        say(f"{round_.name} was rolled back in production: {round_.why}")
    if rolled_back and history.current is not None:
        say(f"{link} leads to {history.current}")
    elif rolled_back:
        say(f"no accepted round is left, so {link} is removed; start gateways without it until a round is accepted")


def _unfinished(history: History, restart: bool, say: Callable[[str], None]) -> Round | None:
    """Return the round to continue; None if there is none, or it makes no sense any more."""
    round_ = history.unfinished
    if round_ is None:
        return None
    if why := "given up" if restart else _lost_start(history, round_):
        say(f"{round_.name} is stopped: {why}")
        history.put(replace(round_, state="stopped", why=why, ended=time.time()))
        return None
    say(f"continuing {round_.name} with its tasks, from {round_.start}")
    return round_


def _lost_start(history: History, round_: Round) -> str:
    """Return why a round's first weights don't count any more; empty if they do."""
    lost = Path(round_.start) in history.rolled_back
    return f"{round_.start}, which it began with, was rolled back" if lost else ""


def _begin(history: History, round_tasks: RoundTasks, model: str) -> Round:
    """Write a round's tasks, and add it to the history."""
    start = history.current or Path(model).expanduser()
    _check_start(start, model)
    round_ = Round(
        history.next_name(), time.time(), str(start.resolve()) if is_run(start) else model, len(round_tasks.new),
        len(round_tasks.older), len(round_tasks.held_out), round_tasks.held_out_new,
    )  # fmt: skip
    round_tasks.write(history.run_dir(round_))
    history.put(round_)
    return round_


def _check_start(start: Path, model: str) -> None:
    """Raise ConfigError for a start that can't be trained from."""
    newest = last_checkpoint(start)
    if not is_run(start):
        model_folder(model)
    elif newest is None:
        raise ConfigError(f"the run {start} has no checkpoint yet; pass another model, or wait for its first step")
    elif not is_whole(newest) and find_spec("art_vllm") is None:
        raise ConfigError(f"{newest} is an adapter, which art-vllm merges into its model: {how_to_install('art-vllm')}")


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is a whole model, not an adapter."""
    return (checkpoint / "config.json").is_file()


async def _train(
    run: Path,
    round_: Round,
    agent: object,
    reward: str | Reward,
    steps: int,
    seed: int,
    say: Callable[[str], None],
    settings: Mapping[str, Any],
) -> TrainResult:
    tasks, held_out = (load_tasks(str(run / name)) for name in (TRAIN, HELD_OUT))
    try:
        return await art.train(
            agent, tasks, model=_weights(round_.start, run, say), reward=reward, steps=steps, eval_tasks=held_out, seed=seed,
            run_dir=run, **settings,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(
            f"{round_.name} can't be trained: {error}\n- To give this round up and begin another, pass --restart."
        ) from error


def _weights(start: str, run: Path, say: Callable[[str], None]) -> str:
    """Return the model that the training begins with; an adapter is merged into its model first, once."""
    newest = last_checkpoint(Path(start))
    if newest is None:
        return start
    if is_whole(newest):
        return str(newest)
    merged = run / "start"
    if not merged.exists():
        from art_vllm.export import export

        say(f"merging the adapter of {newest} into its model")
        export(start, merged)
    return str(merged / "merged")


def _ended(round_: Round, result: TrainResult, gate: str | None, strict: bool) -> Round:
    """Return the round with what the training changed, and whether its weights are accepted."""
    report = result.report
    with Store(store_file(result.run_dir)) as store:
        taken = store.history(report["steps"])
    round_ = replace(
        round_, before=report["before"], after=report["after"], seconds=report["seconds"],
        rollouts=int(sum(metrics.get("trajectories", 0) for _, metrics in taken)), judge_cost=report["account"].get("judge/cost"),
    )  # fmt: skip
    if (stopped := report["stopped"]) and stopped.get("may_pass"):
        return round_
    round_ = replace(round_, ended=time.time())
    if stopped or not (round_.before and round_.after):
        why = stopped["reason"] if stopped else report["exhausted"] or "the held-out tasks were not evaluated"
        return replace(round_, state="stopped", why=why)
    sides = [
        f"{name}={result.run_dir}@{evaluation}" for name, evaluation in zip(SIDES, ("before", "after"), strict=True)
    ]
    comparison = compare(*sides)
    measure = "success" if comparison.difference("success", 1) is not None else "reward"
    difference = comparison.difference(measure, 1)
    if difference is None:
        return replace(round_, state="stopped", why="no held-out task was scored both before and after")
    comparison = replace(comparison, conditions=read_gate(gate or f"{measure} >= current", SIDES))
    return replace(
        round_, state=_state(comparison, strict), measure=measure, difference=difference.value, interval=difference.interval,
        why="; ".join(map(_condition, comparison.verdicts)),
    )  # fmt: skip


def _state(comparison: Comparison, strict: bool) -> State:
    """A condition that is met, but not shown to hold, is enough unless ``strict``."""
    met = (it.state == "holds" or (it.state == "not shown" and it.met and not strict) for it in comparison.verdicts)
    return "accepted" if all(met) else "rejected"


def _condition(verdict: Verdict) -> str:
    state = verdict.state if verdict.state != "not shown" else "met, not shown" if verdict.met else "not met"
    return f"{state}: {verdict.condition}"
