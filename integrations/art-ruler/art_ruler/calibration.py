"""People's preferences, and how well scores agree with them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import wilson_interval

TIE = 1e-8
"""Scores that differ by less are equal: the order of summation alone changes means by about 1e-16."""
FORMS = '{"better": ID, "worse": ID}, {"tie": [ID, ID]} or {"ranking": [ID or [ID, ID, ...], ...]}, best first'


@dataclass(frozen=True)
class Preference:
    """One rollout is better than another, or they are equally good."""

    better: str
    """A rollout id; in a tie, either of the two."""
    worse: str
    tie: bool = False

    def __post_init__(self) -> None:
        for rollout_id in (self.better, self.worse):
            if not isinstance(rollout_id, str) or not rollout_id:
                raise ConfigError(f"a rollout id must be a non-empty string, got {rollout_id!r}")
        if self.better == self.worse:
            raise ConfigError(f"the rollout {self.better!r} is compared with itself; name two rollouts")

    @property
    def pair(self) -> frozenset[str]:
        """The two rollout ids."""
        return frozenset((self.better, self.worse))

    def agrees_with(self, other: Preference) -> bool:
        """Whether ``other``, which is about the same pair, expresses the same preference."""
        return self.tie if other.tie else not self.tie and self.better == other.better

    def __str__(self) -> str:
        return f"{self.better!r} {'and' if self.tie else 'better than'} {self.worse!r}{' equal' if self.tie else ''}"


@dataclass(frozen=True)
class Agreement:
    """How well scores agree with preferences. A number that can't be computed is None."""

    pairs: int
    """All preferences, including the unscored ones."""
    unscored: int
    """Pairs in which a rollout has no score; the numbers below exclude them."""
    strict: int
    """Scored pairs that people did not call a tie; the denominator of ``accuracy``."""
    accuracy: float | None
    """Share of the strict pairs that the scores order as people do, in [0, 1]; equal scores count half. Random scores have
    0.5."""
    interval: tuple[float, float] | None
    """The 95 % Wilson interval of ``accuracy``. It assumes independent pairs; pairs from one ranking are not, so for rankings
    it is too narrow."""
    tau: float | None
    """Kendall's tau-b over the scored pairs, in [-1, 1]; random scores have 0. None if all pairs are ties for people, or all
    are for the scores."""

    def as_json(self) -> dict[str, Any]:
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
    """Return how well ``scores``, by rollout id, agree with ``preferences``. A rollout without a finite score is unscored.

    Kendall's tau-b (M. G. Kendall, "The treatment of ties in ranking problems", Biometrika 33, 1945), over the preferences
    instead of all pairs: (C - D) / sqrt((n - t)(n - u)), with n pairs, C concordant, D discordant, t ties by people and u ties
    by score.
    """
    preferences = list(preferences)
    signs = [
        (0 if preference.tie else 1, _sign(scores[preference.better] - scores[preference.worse]))
        for preference in preferences
        if _is_scored(scores.get(preference.better)) and _is_scored(scores.get(preference.worse))
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
    """Return the preferences in a JSONL file, in order; a ranking yields one for each of its pairs.

    A line is ``{"better": id, "worse": id}``, ``{"tie": [id, id]}`` or ``{"ranking": [id, id, ...]}``, best first; an item of a
    ranking may be a list of equally good ids. Empty lines are skipped. Raises ConfigError, with file and line, for any other
    line, and for a pair that occurs twice, repeated or contradicted. Longer cycles (a over b, b over c, c over a) are allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no such preferences file: {path}; write one with lines such as {FORMS}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    by_pair: dict[frozenset[str], tuple[Preference, int]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                for preference in _preferences(_parsed(line)):
                    _check_new(preference, by_pair)
                    by_pair[preference.pair] = preference, number
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return [preference for preference, _ in by_pair.values()]


def append_preference(path: str | Path, preference: Preference) -> None:
    """Append one line to a preferences file, which is created if missing. Raises ConfigError as ``read_preferences`` does."""
    path = Path(path)
    known = read_preferences(path) if path.exists() else []
    _check_new(preference, {earlier.pair: (earlier, None) for earlier in known})
    pair = [preference.better, preference.worse]
    line = json.dumps({"tie": pair} if preference.tie else dict(zip(("better", "worse"), pair, strict=True)))
    # An edited file may lack the last newline.
    start = "\n" if known and not path.read_bytes().endswith(b"\n") else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{start}{line}\n")


def _sign(difference: float) -> int:
    return 0 if abs(difference) < TIE else 1 if difference > 0 else -1


def _is_scored(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def _check_new(preference: Preference, by_pair: Mapping[frozenset[str], tuple[Preference, int | None]]) -> None:
    if preference.pair in by_pair:
        earlier, number = by_pair[preference.pair]
        place = "" if number is None else f" in line {number}"
        if preference.agrees_with(earlier):
            raise ConfigError(f"{preference} repeats an earlier preference{place}; remove one of them")
        raise ConfigError(f"{preference} contradicts {earlier}{place}; remove one of them")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not JSON: {error}") from error


def _preferences(entry: Any) -> Iterator[Preference]:
    """Yield the preferences in one line."""
    match entry:
        case {"better": better, "worse": worse, **rest} if not rest:
            yield Preference(better, worse)
        case {"tie": [one, other], **rest} if not rest:
            yield Preference(one, other, tie=True)
        case {"ranking": [_, *_] as items, **rest} if not rest:
            yield from _ranked([item if isinstance(item, list) else [item] for item in items])
        case _:
            raise ConfigError(f"{json.dumps(entry):.80} is not a preference; write {FORMS}")


def _ranked(places: list[list[Any]]) -> Iterator[Preference]:
    """Yield every pair of a ranking, best place first; rollouts in the same place are equal."""
    ids = [(place, rollout_id) for place, equals in enumerate(places) for rollout_id in equals]
    if len(ids) < 2 or not all(places):
        raise ConfigError("a ranking needs at least two rollouts and no empty places")
    for (place, better), (below, worse) in itertools.combinations(ids, 2):
        yield Preference(better, worse, tie=place == below)
