"""A judge that answers well or badly, depending on the path: python -m bench.bad_judge --port 9000

It recognises a rollout by its content (``worth 0.3``), never by its label or position, so that a right score is the rollout's
own. The path is ``/WAY/anything``, or ``/WAY/MILLISECONDS/anything``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from bench.judge_server import Answer, JudgeServer, runs_shown, scores_json

WORTH = re.compile(r"worth (\d\.\d+)")
Entries = list[dict[str, Any]]


def entries(messages: list[dict[str, Any]]) -> Entries:
    """Return the right entry of every rollout, in the order of the prompt."""
    shown = [(label, WORTH.search(text)) for label, text in runs_shown(messages)]
    return [{"trajectory_id": label, "explanation": "e", "score": float(it[1])} for label, it in shown if it]


def each(right: Entries, **change: Callable[[dict[str, Any]], Any]) -> Entries:
    """Return ``right`` with some fields replaced."""
    return [it | {field: new(it) for field, new in change.items()} for it in right]


def number_or_text(label: str) -> int | str:
    """Return a label as a number if it is one."""
    return int(label) if label.isdigit() else label


def counted(right: Entries) -> Entries:
    """Return ``right`` with 1, 2, ... as ids, whatever the labels are, and scores as text."""
    return [it | {"trajectory_id": i, "score": str(it["score"])} for i, it in enumerate(right, start=1)]


def out_of_range(right: Entries) -> Entries:
    """Return ``right`` with -3 and 7.5 for two of the rollouts."""
    scores = [it["score"] for it in right]
    return [it | {"score": score} for it, score in zip(right, [-3.0, 7.5, *scores[2:]], strict=True)]


WAYS: dict[str, Callable[[Entries], str]] = {
    "good": scores_json,
    "cut-off": lambda right: scores_json(right)[:60],
    "fenced": lambda right: f"```json\n{scores_json(right)}\n```",
    "prose": lambda right: f"Here are the scores: {scores_json(right)}",
    "empty": lambda right: "",
    "missing": lambda right: scores_json(right[:-1]),
    "doubled": lambda right: scores_json([*right, right[-1]]),
    "permuted": lambda right: scores_json(right[::-1]),
    "same-id": lambda right: scores_json(each(right, trajectory_id=lambda it: right[0]["trajectory_id"])),
    "unknown": lambda right: scores_json(each(right, trajectory_id=lambda it: f"t{it['trajectory_id']}")),
    "text": lambda right: scores_json(
        each(right, trajectory_id=lambda it: number_or_text(it["trajectory_id"]), score=lambda it: str(it["score"]))
    ),
    "counted": lambda right: scores_json(counted(right)),
    "range": lambda right: scores_json(out_of_range(right)),
    "nan": lambda right: scores_json(each(right, score=lambda it: float("nan"))),
}


class BadJudge:
    """Judges in the way that the path names."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, path: str, messages: list[dict[str, Any]]) -> Answer:
        """Return the answer for the way in the path."""
        way, *more = path.strip("/").split("/")
        delay = float(more[0]) / 1000 if more and more[0].isdigit() else 0.0
        right = entries(messages)
        if way == "500" or (way == "500-once" and path not in self._failed):
            self._failed.add(path)
            return Answer("", status=500)
        if way == "silent":
            return Answer(scores_json(right), delay=20.0)
        return Answer(WAYS.get(way, scores_json)(right), delay=delay)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    JudgeServer(BadJudge(), parser.parse_args().port).serve_forever()
