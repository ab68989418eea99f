"""Imports an agent's traces as rollouts of a run folder, for judging, imitation, or as tasks.

The chat template of the model to be trained renders the tokens, which are marked as not sampled by the policy
(``art_embedded.rendering``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.plugin_api import task_id
from art_core.store import Store
from art_core.types import Call, JsonDict
from art_embedded.rendering import Renderer
from art_langfuse.api import SEVERAL, Project
from art_langfuse.vocabularies import CALL_REWARD, SETTINGS
from art_tasks.traffic.messages import Unreadable, answer_of, shown_of, value_of

if TYPE_CHECKING:
    from langfuse.api import ObservationV2

SPLIT = "train"
"""Imported rollouts can be imitated; this is the default split of ``art.load_trajectories``."""


@dataclass
class Imported:
    """The result of an import."""

    traces: int = 0
    """Traces that were read."""
    already: int = 0
    """Traces that were in the run folder before."""
    runs: list[str] = field(default_factory=list)
    """Ids of the rollouts that were added."""
    calls: int = 0
    rewarded: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of skipped traces and calls, by reason."""
    tasks: dict[str, JsonDict] = field(default_factory=dict)
    """All tasks by id, including those of rollouts that were there before."""
    groups: Counter[str] = field(default_factory=Counter)
    """Number of rollouts by task id."""


@dataclass(frozen=True)
class _Run:
    """A trace as a rollout."""

    trace: str
    task: Any
    output: Any
    error: str | None
    seconds: float
    calls: tuple[Call, ...]
    observation_ids: tuple[str, ...]
    """The observations of the calls, in the same order."""


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
    """Add the newest ``limit`` matching traces to the store, except those that it already has completely.

    Rollouts with the same input form a group. A trace's scores become metrics and their comments notes; the score named
    ``reward`` becomes the rollout's reward. None: the score ``"reward"``, or the only one.
    """
    imported = Imported()
    finished = {rollout.rollout_id for rollout in store.rollouts() if rollout.finished}
    trace_ids: dict[str, None] = {}
    for trace in project.traces(conditions):
        trace_ids[trace] = None
        if len(trace_ids) == limit:
            break
    oldest_first = list(reversed(trace_ids))
    for first in range(0, len(oldest_first), SEVERAL):
        batch = oldest_first[first : first + SEVERAL]
        scores = project.scores(batch)
        for trace in batch:
            imported.traces += 1
            known = _rollout_id(trace) in finished
            _import_one(project, store, trace, scores[trace], renderer, reward, imported, known)
            progress()
    return imported


def _rollout_id(trace: str) -> str:
    return f"langfuse-{trace}"


def _import_one(
    project: Project, store: Store, trace: str, scores: Sequence[Any], renderer: Renderer, reward: str | None,
    imported: Imported, known: bool,
) -> None:  # fmt: skip
    rollout_id = _rollout_id(trace)
    try:
        run = _read(trace, project.observations(trace), renderer, Counter() if known else imported.left_out)
    except Unreadable as error:
        imported.left_out[f"traces: {error}"] += 1
        return
    group = task_id(run.task)
    imported.groups[group] += 1
    imported.tasks.setdefault(group, _as_task(run))
    if known:
        imported.already += 1
        return
    if not store.has_rollout(rollout_id):
        store.add_rollout(rollout_id, task=run.task, split=SPLIT, task_id=group, group=f"langfuse-{group}")
    for call in run.calls:  # replaces the calls of an interrupted import
        store.record(rollout_id, call)
    imported.rewarded += _score(store, rollout_id, run, scores, reward)
    # Last, so that only complete rollouts are finished.
    store.finish_rollout(rollout_id, output=run.output, error=run.error, seconds=run.seconds)
    imported.runs.append(rollout_id)
    imported.calls += len(run.calls)


def _read(trace: str, observations: Sequence[ObservationV2], renderer: Renderer, left_out: Counter[str]) -> _Run:
    """Convert a trace; raises Unreadable if none of its model calls can be read."""
    by_id = {observation.id: observation for observation in observations}
    generations = [observation for observation in observations if observation.type == "GENERATION"]
    ancestors = {parent for generation in generations for parent in _parents(generation, by_id)}
    calls, observation_ids = [], []
    for generation in generations:
        # If instrumentations are nested, both report the same call; the inner one has the actual request.
        if generation.id in ancestors:
            continue
        try:
            calls.append(_call(generation, by_id, renderer))
            observation_ids.append(generation.id)
        except (Unreadable, ConfigError) as error:
            left_out[f"model calls: {error}"] += 1
    if not calls:
        raise Unreadable("none of their model calls can be read")
    root = next((it for it in observations if it.is_root_observation or not _parents(it, by_id)), observations[0])
    ended = max(it.end_time or it.start_time for it in observations)
    error = root.status_message or "the trace is marked as an error" if root.level == "ERROR" else None
    # If the root is the model call itself, its prompt is the task.
    only_call = root.id in observation_ids
    task = calls[0].messages()[:-1] if only_call or root.input is None else _input(value_of(root.input))
    output = calls[-1].response.get("content") if only_call or root.output is None else value_of(root.output)
    seconds = (ended - min(it.start_time for it in observations)).total_seconds()
    return _Run(trace, task, output, error, seconds, tuple(calls), tuple(observation_ids))


def _parents(observation: ObservationV2, by_id: Mapping[str, ObservationV2]) -> list[str]:
    """Return the ids of an observation's ancestors, the nearest first."""
    parents: list[str] = []
    while observation.parent_observation_id in by_id and observation.parent_observation_id not in parents:
        parents.append(observation.parent_observation_id)
        observation = by_id[observation.parent_observation_id]
    return parents


def _call(generation: ObservationV2, by_id: Mapping[str, ObservationV2], renderer: Renderer) -> Call:
    messages, tools = shown_of(generation.input)
    answer = answer_of(generation.output)
    settings = value_of(generation.model_parameters)
    settings = {name: settings[name] for name in SETTINGS if name in settings} if isinstance(settings, dict) else {}
    if generation.model:
        settings = {"model": generation.model} | settings
    agent = _agent(generation, by_id)
    return renderer.call(messages, answer, tools=tools, agent=agent, request_id=generation.id, **settings)


def _agent(generation: ObservationV2, by_id: Mapping[str, ObservationV2]) -> str | None:
    """Return the LangGraph node of the call, or else the path of the agents around it, without the root."""
    metadata = generation.metadata or {}
    if node := metadata.get("langgraph_node"):
        return str(node)
    parents = [by_id[parent] for parent in _parents(generation, by_id)]
    names = [parent.name for parent in parents if parent.type == "AGENT" and parent.parent_observation_id]
    return "/".join(name for name in reversed(names) if name) or None


def _input(value: Any) -> Any:
    """Return the agent's input; Langfuse's decorator records all arguments of a function, even a single one."""
    if isinstance(value, dict) and set(value) == {"args", "kwargs"}:
        arguments = [*value["args"], *value["kwargs"].values()]
        return arguments[0] if len(arguments) == 1 else value
    return value


def _as_task(run: _Run) -> JsonDict:
    if isinstance(run.task, dict) and "input" in run.task:
        return run.task
    return {"input": run.task, "recorded_output": run.output, "trace_id": run.trace}


def _score(store: Store, rollout_id: str, run: _Run, scores: Sequence[Any], reward_name: str | None) -> bool:
    """Store the trace's scores from people and evaluators; return whether one of them is the reward."""
    numbers: dict[str, list[float]] = {}
    notes: dict[str, list[str]] = {}
    of_calls: list[float | None] = [None] * len(run.calls)
    for score in scores:
        value = score.value
        number = float(value) if isinstance(value, int | float) else None
        observation = score.subject.id if score.subject and score.subject.kind == "observation" else None
        if score.name == CALL_REWARD and observation in run.observation_ids and number is not None:
            of_calls[run.observation_ids.index(observation)] = number
            continue
        if number is not None:
            numbers.setdefault(score.name, []).append(number)
        if texts := [text for text in (value if number is None else None, score.comment) if text]:
            notes.setdefault(score.name, []).extend(texts)
    metrics = {name: sum(values) / len(values) for name, values in numbers.items()}
    chosen = reward_name or ("reward" if "reward" in metrics or len(metrics) != 1 else next(iter(metrics)))
    reward = metrics.pop("reward", None) if chosen == "reward" else metrics.get(chosen)
    if scores:
        joined = {name: "\n".join(texts) for name, texts in notes.items()}
        rewarded = [replace(call, reward=reward) for call, reward in zip(run.calls, of_calls, strict=True)]
        by = f"langfuse/{chosen}"
        store.add_scores([rollout_id], [reward], metrics=[metrics], notes=[joined], by=by, calls=[rewarded])
    return reward is not None


def write_tasks(path: Path, imported: Imported) -> int:
    """Write the tasks, one per line, in the format of ``art train`` and ``art eval``; return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task, ensure_ascii=False, default=str) + "\n" for task in imported.tasks.values()]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
