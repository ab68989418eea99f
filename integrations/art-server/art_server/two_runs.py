"""Two runs compared: by their newest evaluations on the same tasks, and by what these took."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from art_core import Trajectory
from art_core.store.rollouts import trajectory_of
from art_server import answers, outcome, paired, reading
from art_server.paired import Evaluation, Key, Rollouts
from art_server.plain import readable
from art_server.store_view import StoreView, read_snapshot

if TYPE_CHECKING:
    from art_compare.sides import Side

CHANGED_SHOWN = 200


@dataclass(frozen=True)
class _Newest:
    """A run's newest evaluation at each temperature, and the name of its reward."""

    reward: str
    rollouts: Mapping[str, tuple[Evaluation, Rollouts]]


@dataclass(frozen=True)
class _Pair:
    """An evaluation of each run, at the same temperature."""

    names: list[str]
    first: Rollouts
    second: Rollouts
    change: answers.Change


def between(first: Path, second: Path) -> answers.RunsComparison:
    """Compare the newest evaluations of two runs at each temperature that both have."""
    one, other = _newest(first), _newest(second)
    pairs = list(_pairs(one, other))
    tasks = paired.changed(pairs[0].first, pairs[0].second) if pairs else []
    return answers.RunsComparison(
        changes=[pair.change for pair in pairs],
        evaluations=pairs[0].names if pairs else [],
        rewards=[one.reward, other.reward] if one.reward != other.reward else [],
        changed=len(tasks),
        tasks=tasks[:CHANGED_SHOWN],
    )


def measures(first: Path, second: Path) -> list[answers.Measured]:
    """Return what ``art compare`` measures of the tasks that both runs have at the first temperature, unscored ones too."""
    from art_compare.comparison import comparison_of  # not at the top: it imports typer and rich
    from art_compare.measures import MEASURES

    pair = next(_pairs(_newest(first), _newest(second)), None)
    if pair is None:
        return []
    shared = pair.first.keys() & pair.second.keys()
    comparison = comparison_of([_side(first, pair.first, shared), _side(second, pair.second, shared)])
    measured = []
    for name in MEASURES:
        values = [reading.number(comparison.value(name, side)) for side in (0, 1)]
        apart = comparison.difference(name, 1)
        difference, low, high = (apart.value, *apart.interval) if apart else (None, None, None)
        measured.append(
            answers.Measured(
                name=name,
                first=values[0],
                second=values[1],
                difference=reading.number(difference),
                low=reading.number(low),
                high=reading.number(high),
            )
        )
    return [each for each in measured if (each.first, each.second) != (None, None)]


def _newest(folder: Path) -> _Newest:
    return read_snapshot(folder / reading.STORE, _newest_by_temperature)


def _newest_by_temperature(view: StoreView) -> _Newest:
    newest: dict[str, Evaluation] = {}
    for each in paired.evaluations_of(view):
        temperature = each.get("temperature")
        key = repr(float(temperature) if isinstance(temperature, int | float) else temperature)
        newest[key] = max(newest.get(key, each), each, key=outcome.step_of)
    rollouts = {key: (each, paired.by_task(view, each)) for key, each in newest.items()}
    return _Newest(readable(str(view.meta("reward"))), rollouts)


def _pairs(one: _Newest, other: _Newest) -> Iterator[_Pair]:
    """Yield the evaluations that can be compared."""
    for key, (evaluation, before) in one.rollouts.items():
        also, after = other.rollouts.get(key, ({}, {}))
        if (change := paired.compared(before, after, evaluation.get("temperature"))) is not None:
            yield _Pair([_named(evaluation), _named(also)], before, after, change)


def _named(evaluation: Evaluation) -> str:
    return readable(f"{evaluation.get('name')}, step {evaluation.get('step')}")


def _side(folder: Path, rollouts: Rollouts, keys: Collection[Key]) -> Side:
    """Read an evaluation's calls as a side of ``art compare``, whose own reader may write to the store."""
    from art_compare.sides import Side

    def read(view: StoreView) -> dict[Key, Trajectory]:
        chosen = ((key, rollout.stored) for key, rollout in rollouts.items() if key in keys)
        return {key: trajectory_of(stored, view.calls(stored.rollout_id)) for key, stored in chosen}

    trajectories = read_snapshot(folder / reading.STORE, read)
    return Side(str(folder), folder, "", temperature=None, reward=None, trajectories=trajectories)
