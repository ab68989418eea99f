"""What is compared: the evaluations that run folders record, one rollout for each task."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import plural, task_id, without_keys
from art_core.store import Store
from art_core.store.run_folder import last_checkpoint, store_file
from art_core.types import Trajectory

NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
NEWEST_FIRST = ("evaluation", "after", "before")
"""Which evaluation of a folder is meant if none is named; the last of the others if it has none of these."""


@dataclass(frozen=True)
class Side:
    """One evaluation."""

    name: str
    run_dir: Path
    evaluation: str
    temperature: float | None
    reward: str | None
    """The names of what scored it."""
    trajectories: dict[tuple[str, int], Trajectory] = field(repr=False)
    """By the task's id, and how many of the same task came before it."""


@dataclass(frozen=True)
class _Source:
    name: str | None
    run_dir: Path
    evaluation: str
    reward: str | None
    rows: dict[float | None, Sequence[str]]
    """Temperature -> the ids of its rollouts."""


def read_sides(specs: Sequence[str], temperature: float | str | None = None) -> list[Side]:
    """Read what ``specs`` name, each ``[NAME=]FOLDER[@EVALUATION]``. One folder alone is its evaluations before and after.

    ``temperature``: a number, ``"own"``, or None, the agents' own if all sides have it, else the first that all have. Raises
    ConfigError if a side is missing, or nothing of it can be compared with the others.
    """
    if len(specs) == 1:
        specs = [f"{specs[0]}@before", f"{specs[0]}@after"]
    sources = [_source(spec) for spec in specs]
    chosen = _common_temperature(sources, temperature)
    return [_side(source, name, chosen) for source, name in zip(sources, _names(sources), strict=True)]


def named(spec: str) -> tuple[str | None, str]:
    """Return the name in ``NAME=REST``, or None, and the rest; a path that exists has no name in it."""
    match = None if Path(spec).exists() else NAMED.fullmatch(spec)
    return (match[1], match[2]) if match else (None, spec)


def _folder(spec: str) -> tuple[Path, str]:
    """Return the folder in ``FOLDER@EVALUATION`` and the evaluation, or an empty string."""
    folder, at, wanted = spec.rpartition("@")
    if not at or Path(spec).exists():
        folder, wanted = spec, ""
    return Path(folder).expanduser(), wanted


def has_evaluation(spec: str) -> bool:
    """Whether ``[NAME=]FOLDER[@EVALUATION]`` names an evaluation in a run folder, or the folder holds one."""
    run_dir, wanted = _folder(named(spec)[1])
    if wanted.startswith(("http://", "https://")) or not (run_dir / "run.sqlite").is_file():
        return False
    with Store(store_file(run_dir)) as store:
        return bool(wanted or store.meta("evaluations", []))


def names_of(specs: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Return the sides' names: from ``names``, or else their folder's. Raises ConfigError if two are the same."""
    return _distinct([names[spec] if spec in names else _name(_source(spec)) for spec in specs], specs[0])


def _source(spec: str) -> _Source:
    name, rest = named(spec)
    run_dir, wanted = _folder(rest)
    if not (run_dir / "run.sqlite").is_file():
        raise ConfigError(f"{rest} is not a run folder; to evaluate it now, pass --agent, --tasks and --reward")
    with Store(store_file(run_dir)) as store:
        rows, reward = store.meta("evaluations", []), store.meta("reward")
    names = list(dict.fromkeys(row["name"] for row in rows))
    if not names:
        measure = "pass the folder of an `art eval`"
        if last_checkpoint(run_dir):
            measure = f"evaluate it with `art eval --model {shlex.quote(str(run_dir))}`"
        raise ConfigError(f"{run_dir} has no evaluation; train with eval_tasks=, or {measure}")
    evaluation = wanted or next((each for each in NEWEST_FIRST if each in names), names[-1])
    if evaluation not in names:
        raise ConfigError(f"{run_dir} has no evaluation {evaluation!r}; it has {', '.join(map(repr, names))}")
    of_it = {row["temperature"]: row["rollout_ids"] for row in rows if row["name"] == evaluation}
    return _Source(name, run_dir, evaluation, reward, of_it)


def _names(sources: Sequence[_Source]) -> list[str]:
    """Return a name for each: its own, the folder's, or the evaluation's if all are of one folder."""
    one_folder = len({source.run_dir.resolve() for source in sources}) == 1
    names = [(source.name or source.evaluation) if one_folder else _name(source) for source in sources]
    return _distinct(names, str(sources[0].run_dir))


def _distinct(names: list[str], first: str) -> list[str]:
    counts = Counter(names)
    if twice := [name for name in names if counts[name] > 1]:
        raise ConfigError(f"two sides are called {twice[0]!r}; name them: NAME=SIDE, such as old={without_keys(first)}")
    return names


def _name(source: _Source) -> str:
    return source.name or source.run_dir.resolve().name.replace(" ", "_")


def _common_temperature(sources: Sequence[_Source], wanted: float | str | None) -> float | None:
    common = [temperature for temperature in sources[0].rows if all(temperature in it.rows for it in sources)]
    if wanted is not None:
        common = [temperature for temperature in common if temperature == (None if wanted == "own" else wanted)]
    if not common:
        has = "; ".join(f"{it.run_dir}: {', '.join(map(_shown, it.rows))}" for it in sources)
        wish = "the same temperature" if wanted is None else f"temperature {wanted}"
        raise ConfigError(f"the sides were not all evaluated at {wish}; they have: {has}")
    return None if None in common else common[0]


def _shown(temperature: float | None) -> str:
    return "the agent's own" if temperature is None else f"{temperature:g}"


def _side(source: _Source, name: str, temperature: float | None) -> Side:
    seen: Counter[str] = Counter()
    trajectories: dict[tuple[str, int], Trajectory] = {}
    rewards: set[str] = set()
    with Store(store_file(source.run_dir)) as store:
        for rollout_id in source.rows[temperature]:
            trajectory = store.trajectory(rollout_id)
            id = task_id(trajectory.task)
            trajectories[id, seen[id]] = trajectory
            seen[id] += 1
            # eval_reward isn't the run's reward, and `art judge` scores again.
            newest = [score for score in store.scores(rollout_id) if not score.aside][-1:]
            rewards |= {score.by for score in newest if score.by is not None and score.reward is not None}
    reward = ", ".join(sorted(rewards)) or source.reward
    return Side(name, source.run_dir, source.evaluation, temperature, reward, trajectories)


def shared_tasks(sides: Sequence[Side]) -> list[tuple[str, int]]:
    """Return the keys of the tasks that all sides have, in the first side's order. Raises ConfigError if there are none."""
    keys = [key for key in sides[0].trajectories if all(key in side.trajectories for side in sides)]
    if not keys:
        sizes = ", ".join(f"{side.name}: {plural(len(side.trajectories), 'task')}" for side in sides)
        raise ConfigError(f"the sides have no task in common ({sizes}); evaluate all of them on the same tasks")
    return keys


def as_json(side: Side) -> dict[str, Any]:
    """Return what identifies a side."""
    fields = ("name", "evaluation", "temperature", "reward")
    return {
        **{name: getattr(side, name) for name in fields},
        "run_dir": str(side.run_dir),
        "tasks": len(side.trajectories),
    }
