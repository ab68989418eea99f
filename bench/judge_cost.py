"""The cost of judging a group beyond the judge itself: CPU, time, imports.

Groups are built before the clock starts. "LiteLLM alone" sends what ours would send.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from art_core.types import JsonDict
from art_ruler import Ruler
from art_ruler.answer import SCHEMA
from bench.bad_judge import entries
from bench.judge_server import scores_json, text_of
from bench.judge_sides import MODEL, OurSide, Run, make_runs
from bench.tables import table

LATENCY = 50
"""The stub's latency in milliseconds."""
TURNS = 7
"""Answers per rollout; six are followed by a result, and a group has about 8,000 words."""
LOADS = ((1, 12), (32, 64))
"""Concurrent groups, total groups."""
LABEL = re.compile(r'<trajectory id="([^"]+)"')
SENT = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA}}


class LiteLLMAlone:
    """``litellm.acompletion`` with the messages that ours sends; the answer is ignored."""

    def __init__(self, name: str, **more: Any) -> None:
        self.name = name
        self._more = more

    async def group(self, runs: Sequence[Run]) -> list[JsonDict]:
        """Return the messages that ours sends."""
        asked: list[list[JsonDict]] = []

        async def judge(messages: list[JsonDict]) -> str:
            asked.append(messages)
            return scores_json(entries(messages))

        await Ruler(judge).score(await OurSide().group(runs))
        return asked[0]

    async def score(self, group: list[JsonDict], url: str, timeout: float = 60.0) -> None:
        """Call the judge once."""
        import litellm

        settings = {"api_base": url, "api_key": "none", "timeout": timeout, "max_retries": 0}
        await litellm.acompletion(model=MODEL, messages=group, **settings | self._more)


class JudgeInProcess(OurSide):
    """Ours with a judge in the process: the cost that is neither LiteLLM's nor the network's."""

    name = "ours, the judge in the process"

    def __init__(self) -> None:
        async def judge(messages: list[JsonDict]) -> str:
            await asyncio.sleep(LATENCY / 1000)
            labels = LABEL.findall(text_of(messages[1]))
            return scores_json([{"trajectory_id": label, "score": 0.5} for label in labels])

        self._ruler = Ruler(judge)

    async def score(self, group: Any, url: str, timeout: float = 60.0) -> None:
        """Call the judge; the address is not used."""
        await self._ruler.score(group)


@dataclass(frozen=True)
class Measured:
    """One round of one side under one load."""

    cpu: float
    """Milliseconds of this process per group."""
    median: float
    """Milliseconds from prompt to scores."""
    rate: float
    """Groups per second."""


async def load(side: Any, groups: Sequence[Any], at_once: int, url: str) -> Measured:
    """Let ``side`` judge ``groups``, ``at_once`` at a time."""
    remaining, times = list(groups), []

    async def lane() -> None:
        while remaining:
            group, start = remaining.pop(), time.perf_counter()
            await side.score(group, url)
            times.append(1000 * (time.perf_counter() - start))

    gc.collect()
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(at_once)))
    seconds = time.perf_counter() - start
    return Measured(1000 * (time.process_time() - cpu) / len(groups), median(times), len(groups) / seconds)


async def cost_table(url: str, sides: Sequence[Any], rounds: int, loads: Sequence[tuple[int, int]] = LOADS) -> str:
    """Return the cost of a group for every side, measured in turns."""
    url = f"{url}/good/{LATENCY}/v1"
    alone = [LiteLLMAlone("LiteLLM alone, with a schema", response_format=SENT), LiteLLMAlone("LiteLLM alone")]
    everyone = [*sides, *alone, JudgeInProcess()]
    results: dict[tuple[str, int], list[Measured]] = {}
    for number in range(-1, rounds):  # the first warms up
        for side in everyone[:: -1 if number % 2 else 1]:
            for at_once, count in loads:
                seeds = range((number + 1) * count, (number + 2) * count)
                groups = [await side.group(make_runs(seed, TURNS)) for seed in seeds]
                measured = await load(side, groups, at_once, url)
                if number >= 0:
                    results.setdefault((side.name, at_once), []).append(measured)

    ours, rows = next(side for side in sides if side.name == OurSide.name), []
    few, many = (at_once for at_once, _ in loads)
    for side in everyone:
        one, all_at_once = results[side.name, few], results[side.name, many]
        row = [median(it.cpu for it in one), median(it.cpu for it in all_at_once)]
        row += [share(results[ours.name, it], results[side.name, it]) for it in (few, many)]
        rows.append([side.name, *row, median(it.median for it in one) - LATENCY, median(it.rate for it in all_at_once)])
    head = ["side", *(f"CPU ms, {it} at a time" for it in (few, many)), *(f"ours / it, {it}" for it in (few, many))]
    head += ["ms beyond the judge", f"groups/s, {many} at a time"]
    title = f"A group of 8, about 8,000 words; a judge of {LATENCY} ms; medians of {rounds} rounds, also of the ratios"
    return f"{title}\n\n{table(head, rows)}"


def share(ours: Sequence[Measured], theirs: Sequence[Measured]) -> float:
    """Return the median over the rounds of our CPU divided by theirs."""
    return median(mine.cpu / its.cpu for mine, its in zip(ours, theirs, strict=True))


def import_table(with_peer: bool, rounds: int) -> str:
    """Return the seconds of imports, each in a fresh process, and whether they load LiteLLM."""
    statements = ["import art_core, art_ruler", "import litellm"]
    if with_peer:
        statements.insert(0, "from art.rewards import ruler_score_group")
    rows = []
    for statement in statements:
        results = [json.loads(run_alone(statement)) for _ in range(min(rounds, 3))]
        rows.append([statement, median(it[0] for it in results), "yes" if results[0][1] else "no"])
    return table(["import", "s", "loads LiteLLM"], rows)


def run_alone(statement: str) -> str:
    """Return the seconds that ``statement`` takes in a fresh process and whether LiteLLM is then loaded, as JSON."""
    code = (
        "import time, sys, json; start = time.perf_counter(); "
        f"{statement}; print(json.dumps([time.perf_counter() - start, 'litellm' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]
