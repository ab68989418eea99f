"""What people prefer, and how well scores agree with it. Knows nothing about how a judge is asked."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.loop.metrics import wilson_interval

TIE = 1e-8
"""Scores that differ by less are equal: means of floats in another order differ by about 1e-16."""
FORMS = '{"better": ID, "worse": ID}, {"tie": [ID, ID]} or {"ranking": [ID or [ID, ID, ...], ...]}, best first'


@dataclass(frozen=True)
class Preference:
    """One run is better than another, or they are equally good."""

    better: str
    """A rollout id. Of a tie either of the two."""
    worse: str
    tie: bool = False

    def __post_init__(self) -> None:
        for rollout_id in (self.better, self.worse):
            if not isinstance(rollout_id, str) or not rollout_id:
                raise ConfigError(f"{rollout_id!r} is not a rollout id: give a text that is not empty")
        if self.better == self.worse:
            raise ConfigError(f"the run {self.better!r} is compared with itself: give two runs")

    @property
    def pair(self) -> frozenset[str]:
        """The two rollout ids."""
        return frozenset((self.better, self.worse))

    def agrees_with(self, other: Preference) -> bool:
        """Whether ``other``, about the same pair, says the same."""
        return self.tie if other.tie else not self.tie and self.better == other.better

    def __str__(self) -> str:
        return f"{self.better!r} {'and' if self.tie else 'better than'} {self.worse!r}{' equal' if self.tie else ''}"


@dataclass(frozen=True)
class Agreement:
    """How well scores agree with preferences. A number that has nothing to be computed from is None."""

    pairs: int
    """Preferences that were given, the unscored ones among them."""
    unscored: int
    """Pairs of which a run has no score; the numbers below leave them out."""
    strict: int
    """Scored pairs that are no tie to people: what ``accuracy`` is a share of."""
    accuracy: float | None
    """The share of the strict pairs that the scores order as people do, in [0, 1]; equal scores count half. Scores that know
    nothing have 0.5."""
    interval: tuple[float, float] | None
    """The 95 % interval of ``accuracy`` by Wilson's formula. It takes pairs for independent: pairs of one ranking are not
    quite, and then it is too narrow."""
    tau: float | None
    """Kendall's tau-b over the scored pairs, in [-1, 1]; 0 for scores that know nothing. None where people or scores hold all
    of them equal."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as JSON-able values."""
        interval = None if self.interval is None else list(self.interval)
        return {
            "pairs": self.pairs,
            "unscored": self.unscored,
            "strict": self.strict,
            "accuracy": self.accuracy,
            "interval": interval,
            "tau": self.tau,
        }


def agreement(preferences: Iterable[Preference], scores: Mapping[str, float | None]) -> Agreement:
    """Return how well ``scores``, by rollout id, agree with ``preferences``. A run without a finite score is unscored.

    Kendall's tau-b (M. G. Kendall, "The treatment of ties in ranking problems", Biometrika 33, 1945), over the given pairs
    in place of all pairs: (C - D) / sqrt((n - t)(n - u)), with n pairs, C of them ordered alike by people and scores, D
    ordered oppositely, t equal to people and u equal by score.
    """
    preferences = list(preferences)
    signs = [
        (0 if it.tie else 1, _sign(scores[it.better] - scores[it.worse]))
        for it in preferences
        if _is_scored(scores.get(it.better)) and _is_scored(scores.get(it.worse))
    ]
    strict = [judged for preferred, judged in signs if preferred]
    accuracy = sum((1 + judged) / 2 for judged in strict) / len(strict) if strict else None
    scale = len(strict) * sum(judged != 0 for _, judged in signs)
    return Agreement(
        pairs=len(preferences),
        unscored=len(preferences) - len(signs),
        strict=len(strict),
        accuracy=accuracy,
        interval=None if accuracy is None else wilson_interval(accuracy, len(strict)),
        tau=sum(strict) / math.sqrt(scale) if scale else None,
    )


def read_preferences(path: str | Path) -> list[Preference]:
    """Return the preferences that a JSONL file holds, in its order; a ranking gives one for every pair in it.

    A line is ``{"better": id, "worse": id}``, ``{"tie": [id, id]}`` or ``{"ranking": [id, id, ...]}``, best first, where an
    item may be a list of equally good ones; empty lines are passed over. Raises ConfigError that names file and line for
    anything else, and for a pair that was there before, whether it says the same or the contrary. Circles of three and more
    (a over b, b over c, c over a) are what people said, and stay.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"there is no file of preferences {path}: write one, with lines such as {FORMS}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    found: dict[frozenset[str], tuple[Preference, int]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                for preference in _preferences(_parsed(line)):
                    _check_new(preference, found)
                    found[preference.pair] = preference, number
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return [preference for preference, _ in found.values()]


def append_preference(path: str | Path, preference: Preference) -> None:
    """Write one line more to a file of preferences, or the first. Raises ConfigError where ``read_preferences`` would."""
    path = Path(path)
    known = read_preferences(path) if path.exists() else []
    _check_new(preference, {it.pair: (it, None) for it in known})
    pair = [preference.better, preference.worse]
    line = json.dumps({"tie": pair} if preference.tie else dict(zip(("better", "worse"), pair, strict=True)))
    # Somebody's editor may have left the last line without its end.
    start = "\n" if known and not path.read_bytes().endswith(b"\n") else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{start}{line}\n")


def _sign(difference: float) -> int:
    return 0 if abs(difference) < TIE else 1 if difference > 0 else -1


def _is_scored(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def _check_new(preference: Preference, found: Mapping[frozenset[str], tuple[Preference, int | None]]) -> None:
    if preference.pair in found:
        earlier, number = found[preference.pair]
        place = "" if number is None else f" in line {number}"
        if preference.agrees_with(earlier):
            raise ConfigError(f"{preference} was said before{place}; say it once")
        raise ConfigError(f"{preference} contradicts {earlier}{place}; leave one of them out")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not JSON: {error}") from error


def _preferences(said: Any) -> Iterator[Preference]:
    """Yield what one line says."""
    match said:
        case {"better": better, "worse": worse, **rest} if not rest:
            yield Preference(better, worse)
        case {"tie": [one, other], **rest} if not rest:
            yield Preference(one, other, tie=True)
        case {"ranking": [_, *_] as items, **rest} if not rest:
            yield from _ranked([item if isinstance(item, list) else [item] for item in items])
        case _:
            raise ConfigError(f"{json.dumps(said):.80} is not a preference; write {FORMS}")


def _ranked(places: list[list[Any]]) -> Iterator[Preference]:
    """Yield every pair of a ranking, best place first; runs in one place are equal."""
    ids = [(place, rollout_id) for place, equals in enumerate(places) for rollout_id in equals]
    if len(ids) < 2 or not all(places):
        raise ConfigError("a ranking needs at least two runs, and no empty place")
    for (place, better), (below, worse) in itertools.combinations(ids, 2):
        yield Preference(better, worse, tie=place == below)
