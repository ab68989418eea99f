"""RULER compared with ART's: how each handles a judge's bad answers, and what judging a group costs.

    .bench/bin/python -m bench.judge          # .bench: python -m bench.peers setup

Both run in one process and call the same stub judge in another (``bench/bad_judge.py``) over the network, with the same model
string. A Python without openpipe-art measures ours alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.capture import free_port, running
from bench.judge_cost import cost_table, import_table
from bench.judge_sides import ArtSide, OurSide, Outcome, Run, Side, make_runs
from bench.tables import table

NO_PEER = (
    "openpipe-art is not installed, so only ours is measured; `python -m bench.peers setup` installs it into .bench."
)
RIGHT, BY_PLACE, UNSCORED = "right scores", "right by position, no id says so", "unscored"
MISASSIGNED, WRONG, OUTSIDE, RAISES = "MISASSIGNED", "WRONG", "OUT OF RANGE", "raises"
KINDS = (RIGHT, BY_PLACE, UNSCORED, MISASSIGNED, WRONG, OUTSIDE, RAISES)


@dataclass(frozen=True)
class Row:
    """One behaviour of a judge."""

    what: str
    way: str
    """Its name in ``bench.bad_judge``."""
    named: bool = True
    """Whether the answer's ids say to which rollout each score belongs."""
    timeout: float = 60.0
    alike: bool = False
    side_questions: bool = False


ROWS = (
    Row("a good answer", "good"),
    Row("JSON that is cut off", "cut-off"),
    Row("JSON in a code fence", "fenced"),
    Row("prose before the JSON", "prose"),
    Row("nothing", "empty"),
    Row("one rollout missing", "missing"),
    Row("one rollout twice", "doubled"),
    Row("the right ids in another order", "permuted"),
    Row("the same id for all", "same-id", named=False),
    Row("ids of no rollout", "unknown", named=False),
    Row("the right ids, as numbers if possible; scores as text", "text"),
    Row("ids 1, 2, ... whatever the labels; scores as text", "counted", named=False),
    Row("scores of -3 and 7.5", "range"),
    Row("NaN for all", "nan"),
    Row("HTTP 500, always", "500"),
    Row("HTTP 500 once, then good", "500-once"),
    Row("no answer for 20 s, timeout 2 s", "silent", timeout=2.0),
    Row("good; rollouts with a second conversation", "good", side_questions=True),
    Row("good; all 8 rollouts alike", "good", alike=True),
)


def verdict(runs: Sequence[Run], outcome: Outcome | Exception, *, named: bool = True) -> str:
    """Describe how an answer was handled, beginning with one of ``KINDS``; ``named`` as in ``Row``."""
    if isinstance(outcome, Exception):
        return f"{RAISES} {type(outcome).__name__}: {first_line(str(outcome))}"
    worths, scores = [run.worth for run in runs], outcome.scores
    scored = [score for score in scores if score is not None]
    if len(scored) < len(scores):
        reason = first_line(outcome.reason) or "no reason given"
        return f"{UNSCORED}{f' in part, {len(scored)} scored' if scored else ''}: {reason}"
    shown = ", ".join(f"{score:.3g}" for score in scored)
    if not all(0 <= score <= 1 for score in scored):  # NaN too
        return f"{OUTSIDE}, accepted: {shown}"
    if all(math.isclose(score, worth) for score, worth in zip(scored, worths, strict=True)):
        return RIGHT if named else BY_PLACE
    if all(math.isclose(score, worth) for score, worth in zip(sorted(scored), sorted(worths), strict=True)):
        return f"{MISASSIGNED}: scores belong to other rollouts"
    return f"{WRONG}, accepted: {shown}"


def first_line(text: str) -> str:
    """Return the first line, cut to fit into a cell."""
    line = next(iter(text.strip().splitlines()), "").replace("|", "\\|")
    return line if len(line) <= 72 else f"{line[:69]}..."


async def outcome_of(side: Side, row: Row, url: str) -> tuple[list[Run], Outcome | Exception]:
    """Let ``side`` judge the group of ``row``."""
    runs = make_runs(1, alike=row.alike, side_questions=row.side_questions)
    with contextlib.redirect_stdout(io.StringIO()):  # both sides' libraries print
        try:
            return runs, await side.score(await side.group(runs), f"{url}/{row.way}/0/{side.name[:3]}/v1", row.timeout)
        except Exception as error:  # noqa: BLE001 - whatever a side raises is its result
            return runs, error


async def answer_tables(url: str, sides: Sequence[Side], rows: Sequence[Row] = ROWS) -> str:
    """Return how every side handles every row, and the totals by kind."""
    cells, counts = [], {side.name: dict.fromkeys(KINDS, 0) for side in sides}
    for row in rows:
        cells.append([row.what])
        for side in sides:
            result = verdict(*await outcome_of(side, row, url), named=row.named)
            cells[-1].append(result)
            counts[side.name][next(kind for kind in KINDS if result.startswith(kind))] += 1
    names = [side.name for side in sides]
    totals = [[kind, *(counts[name][kind] for name in names)] for kind in KINDS]
    return f"{table(['the judge answers', *names], cells)}\n\n{table(['in all', *names], totals)}"


async def measure(url: str, options: argparse.Namespace) -> str:
    """Return all tables as Markdown."""
    sides: list[Side] = [OurSide()]
    parts = []
    try:
        sides.insert(0, ArtSide())
    except ImportError:
        parts.append(NO_PEER)
    if options.only != "cost":
        parts.append(await answer_tables(url, sides))
    if options.only != "answers":
        parts += [await cost_table(url, sides, options.rounds), import_table(len(sides) > 1, options.rounds)]
    return "\n\n".join(parts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the timings; medians are printed")
    parser.add_argument("--only", choices=("answers", "cost"))
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> None:
    """Start the stub, measure, print."""
    warnings.filterwarnings("ignore", module="pydantic")  # LiteLLM's objects cause them
    url = f"http://127.0.0.1:{free_port()}"
    stub = [sys.executable, "-m", "bench.bad_judge", "--port", url.rpartition(":")[2]]
    with running(stub, f"{url}/v1/models"):
        report = asyncio.run(measure(url, options))
    print(report)
    if options.out:
        options.out.write_text(f"{report}\n")


if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    logging.getLogger("art_ruler").setLevel(logging.ERROR)  # the tables show them
    main(parse())
