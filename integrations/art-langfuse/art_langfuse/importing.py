"""Traces of an agent -> runs in a run folder: to judge, to imitate, to take tasks from.

The tokens are made by the chat template of the model that shall be trained, and say that no policy sampled them
(``art_embedded.rendering``). Knows nothing about the command line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.loop.rollout import task_id
from art_core.store import Store
from art_core.types import Call, JsonDict
from art_embedded.rendering import Renderer
from art_langfuse.api import SEVERAL, Project
from art_langfuse.conversations import Unreadable, answer_of, shown_of, value_of
from art_langfuse.vocabularies import CALL_REWARD, SETTINGS

if TYPE_CHECKING:
    from langfuse.api import ObservationV2

SPLIT = "train"
"""Imported runs may be imitated: ``art.load_trajectories`` takes them by default."""


@dataclass
class Imported:
    """What came of an import."""

    traces: int = 0
    """That were read."""
    already: int = 0
    """That were in the run folder before."""
    runs: list[str] = field(default_factory=list)
    """Rollouts that were added."""
    calls: int = 0
    rewarded: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Why traces or calls of theirs were not taken, and how many."""
    tasks: dict[str, JsonDict] = field(default_factory=dict)
    """By task id, each once; those of the runs that were there before too."""
    groups: Counter[str] = field(default_factory=Counter)
    """Runs by task."""


@dataclass(frozen=True)
class _Run:
    """One trace, read."""

    trace: str
    task: Any
    output: Any
    error: str | None
    seconds: float
    calls: tuple[Call, ...]
    places: tuple[str, ...]
    """The observations that the calls are."""


def import_traces(
    project: Project,
    store: Store,
    conditions: Sequence[JsonDict],
    renderer: Renderer,
    *,
    limit: int = 100,
    reward: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Imported:
    """Read the newest ``limit`` traces that meet the conditions and add to the store those that it has not, or not whole.

    Runs of one input are one group. Scores of a trace become metrics, their comments notes, and the one named ``reward`` the
    run's reward; None takes ``"reward"``, or the only score that there is.
    """
    found = Imported()
    whole = {it.rollout_id for it in store.rollouts() if it.finished}
    wanted: dict[str, None] = {}
    for trace in project.traces(conditions):
        wanted[trace] = None
        if len(wanted) == limit:
            break
    oldest_first = list(reversed(wanted))  # as runs are kept
    for first in range(0, len(oldest_first), SEVERAL):
        together = oldest_first[first : first + SEVERAL]
        scores = project.scores(together)
        for trace in together:
            found.traces += 1
            known = _name(trace) in whole
            _import_one(project, store, trace, scores[trace], renderer, reward, found, known)
            progress()
    return found


def _name(trace: str) -> str:
    """Return the rollout that the trace becomes."""
    return f"langfuse-{trace}"


def _import_one(
    project: Project, store: Store, trace: str, scores: Sequence[Any], renderer: Renderer, reward: str | None,
    found: Imported, known: bool,
) -> None:  # fmt: skip
    name = _name(trace)
    try:
        run = _read(trace, project.observations(trace), renderer, Counter() if known else found.left_out)
    except Unreadable as error:
        found.left_out[f"traces: {error}"] += 1
        return
    group = task_id(run.task)
    found.groups[group] += 1
    found.tasks.setdefault(group, _as_task(run))
    if known:
        found.already += 1
        return
    if not store.has_rollout(name):
        store.add_rollout(name, task=run.task, split=SPLIT, task_id=group, group=f"langfuse-{group}")
    for call in run.calls:  # takes the place of what an import that was ended kept of it
        store.record(name, call)
    found.rewarded += _score(store, name, run, scores, reward)
    # Last, so that only what is whole is finished.
    store.finish_rollout(name, output=run.output, error=run.error, seconds=run.seconds)
    found.runs.append(name)
    found.calls += len(run.calls)


def _read(trace: str, observed: Sequence[ObservationV2], renderer: Renderer, left_out: Counter[str]) -> _Run:
    """Return what a trace says; raises Unreadable where no model call of it can be taken."""
    by_id = {it.id: it for it in observed}
    above = {parent for it in observed if it.type == "GENERATION" for parent in _parents(it, by_id)}
    calls, places = [], []
    for it in observed:
        # Where one instrumentation stands in another, both tell of the same call: the inner one is nearer to it.
        if it.type != "GENERATION" or it.id in above:
            continue
        try:
            calls.append(_call(it, by_id, renderer))
            places.append(it.id)
        except (Unreadable, ConfigError) as error:
            left_out[f"model calls: {error}"] += 1
    if not calls:
        raise Unreadable("no model call of theirs can be read")
    root = next((it for it in observed if it.is_root_observation or not _parents(it, by_id)), observed[0])
    ended = max(it.end_time or it.start_time for it in observed)
    failed = root.status_message or "the trace is marked as an error" if root.level == "ERROR" else None
    # Where the root is the model call itself, what it was shown is the task.
    alone = root.id in places
    task = calls[0].messages()[:-1] if alone or root.input is None else _input(value_of(root.input))
    output = calls[-1].response.get("content") if alone or root.output is None else value_of(root.output)
    seconds = (ended - min(it.start_time for it in observed)).total_seconds()
    return _Run(trace, task, output, failed, seconds, tuple(calls), tuple(places))


def _parents(it: ObservationV2, by_id: Mapping[str, ObservationV2]) -> list[str]:
    """Return the ids of what an observation stands in, the nearest first."""
    found: list[str] = []
    while it.parent_observation_id in by_id and it.parent_observation_id not in found:
        found.append(it.parent_observation_id)
        it = by_id[it.parent_observation_id]
    return found


def _call(it: ObservationV2, by_id: Mapping[str, ObservationV2], renderer: Renderer) -> Call:
    messages, tools = shown_of(it.input)
    answer = answer_of(it.output)
    settings = value_of(it.model_parameters)
    settings = {name: settings[name] for name in SETTINGS if name in settings} if isinstance(settings, dict) else {}
    model = {"model": it.model} if it.model else {}
    return renderer.call(
        messages, answer, tools=tools, agent=_agent(it, by_id), request_id=it.id, **model, **settings
    )  # fmt: skip


def _agent(it: ObservationV2, by_id: Mapping[str, ObservationV2]) -> str | None:
    """Return the path of the agents that the call was made in, the run itself left out; LangGraph's name of a node counts."""
    metadata = it.metadata or {}
    if node := metadata.get("langgraph_node"):
        return str(node)
    names = [
        by_id[up].name for up in _parents(it, by_id) if by_id[up].type == "AGENT" and by_id[up].parent_observation_id
    ]
    return "/".join(name for name in reversed(names) if name) or None


def _input(given: Any) -> Any:
    """Return what an agent was called with; Langfuse's decorator keeps a function's arguments."""
    if isinstance(given, dict) and set(given) == {"args", "kwargs"}:
        values = [*given["args"], *given["kwargs"].values()]
        return values[0] if len(values) == 1 else given
    return given


def _as_task(run: _Run) -> JsonDict:
    if isinstance(run.task, dict) and "input" in run.task:
        return run.task
    return {"input": run.task, "recorded_output": run.output, "trace_id": run.trace}


def _score(store: Store, name: str, run: _Run, scores: Sequence[Any], wanted: str | None) -> bool:
    """Add what people and evaluators gave the trace; return whether there is a reward among it."""
    given: dict[str, list[float]] = {}
    notes: dict[str, list[str]] = {}
    of_calls: list[float | None] = [None] * len(run.calls)
    for score in scores:
        value = score.value
        number = float(value) if isinstance(value, int | float) else None
        place = score.subject.id if score.subject and score.subject.kind == "observation" else None
        if score.name == CALL_REWARD and place in run.places and number is not None:
            of_calls[run.places.index(place)] = number
            continue
        if number is not None:
            given.setdefault(score.name, []).append(number)
        if words := [it for it in (value if number is None else None, score.comment) if it]:
            notes.setdefault(score.name, []).extend(words)
    metrics = {key: sum(values) / len(values) for key, values in given.items()}
    chosen = wanted or ("reward" if "reward" in metrics or len(metrics) != 1 else next(iter(metrics)))
    reward = metrics.pop("reward", None) if chosen == "reward" else metrics.get(chosen)
    if scores:
        said = {key: "\n".join(words) for key, words in notes.items()}
        rewards = [of_calls] if any(it is not None for it in of_calls) else ()
        store.add_scores(
            [name], [reward], metrics=[metrics], notes=[said], by=f"langfuse/{chosen}", call_rewards=rewards
        )
    return reward is not None


def write_tasks(path: Path, found: Imported) -> int:
    """Write the tasks, one a line, as ``art train`` and ``art eval`` read them; return how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task, ensure_ascii=False, default=str) + "\n" for task in found.tasks.values()]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
