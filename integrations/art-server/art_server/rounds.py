"""The rounds of ``art retrain`` in a folder of runs, from its ``rounds.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_server import reading, responses
from art_server.folders import RunFolders
from art_server.plain import plain, readable

FILE = "rounds.json"


def rounds_of(folders: Mapping[str, Path]) -> list[responses.Round]:
    """Return the rounds, newest first; none if ``folders`` isn't a folder of rounds, or its file can't be read."""
    if not isinstance(folders, RunFolders) or folders.single:
        return []
    try:
        rows = reading.list_of(json.loads((folders.root / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    return [_round(row) for row in reversed(rows) if isinstance(row, dict)]


def _round(row: dict[str, Any]) -> responses.Round:
    low, high = map(reading.number, (*reading.list_of(row.get("interval")), None, None)[:2])
    texts = {name: readable(str(row.get(name) or "")) for name in ("name", "state", "why", "start")}
    numbers = {name: reading.number(row.get(name)) for name in ("began", "difference", "seconds", "judge_cost")}
    counts = {name: int(reading.number(row.get(name)) or 0) for name in ("new", "older", "held_out", "rollouts")}
    before, after = (plain(reading.mapping(row.get(name))) or None for name in ("before", "after"))
    points = row.get("measure") == "success"
    return responses.Round(
        **texts, **numbers, **counts, before=before, after=after, low=low, high=high, counts_successes=points
    )
