"""A language model writes tasks for the tools of an MCP server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from art_core.types import JsonDict
from art_tasks.traffic.similar import SAME, Found

if TYPE_CHECKING:
    from art_ruler.judge import Judge

SYSTEM = (
    "You write tasks that test an assistant with tools. You are given the tools, what the server holds, and the tasks that exist "
    "already. A good task is what a real user would ask; it can be solved with these tools and nothing else; it says everything "
    "that is needed, with the names and values of what is there; and one can tell from the tools' results whether it was solved. "
    "Vary the tools, the number of calls (one to five) and the difficulty. Answer with a JSON array and nothing else, of "
    '{"input": what the user asks, "rubric": what must have been called and answered for full marks, and what earns half}.'
)
AT_ONCE = 8
"""Tasks that are asked for in one question."""
MOST_EMPTY = 3
"""Questions in a row that may bring nothing new."""


@dataclass
class Written:
    """The tasks, and what became of everything else."""

    tasks: list[JsonDict] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    cost: float = 0.0
    """US dollars, as far as they are known."""
    ended: str | None = None
    """Why there are fewer tasks than wanted: the model stopped answering."""


async def write_tasks(
    judge: Judge, tools: Sequence[JsonDict], resources: Mapping[str, str], count: int, *, about: str = "",
    same: float = SAME, known: Sequence[JsonDict] = (), keep: Callable[[Sequence[JsonDict]], None] = lambda _: None,
) -> Written:  # fmt: skip
    """Return up to ``count`` different tasks with ``input`` and ``rubric``; fewer if the model has no more ideas.

    ``judge`` is any of art-ruler's. ``about`` is what the model should know besides; ``same`` the similarity from which two
    inputs are the same task. ``known`` tasks are the first of the result, and ``keep`` gets the tasks so far after each answer.
    If the model stops answering, the tasks so far are returned; raises JudgeError if there are none.
    """
    from art_ruler.judge import JudgeError

    written, found, empty = Written(list(known)), Found(same), 0
    for task in known:
        found.add(task["input"])
    while len(written.tasks) < count and empty < MOST_EMPTY:
        wanted = min(AT_ONCE, count - len(written.tasks))
        try:
            answer = await judge.ask(_question(tools, resources, about, [it["input"] for it in written.tasks], wanted))
        except JudgeError as error:
            if not written.tasks:
                raise
            written.ended = str(error)
            break
        written.cost += answer.cost or 0.0
        if answer.stopped:
            written.dropped[f"an answer that was cut short ({answer.stopped})"] += 1
        before = len(written.tasks)
        for each in _read(answer.text, written.dropped):
            if found.exact(each["input"]) is not None:
                written.dropped["the same as another"] += 1
            elif found.near(each["input"]) is not None:
                written.dropped["nearly the same as another"] += 1
            elif len(written.tasks) < count:
                found.add(each["input"])
                written.tasks.append(each)
        empty = empty + 1 if len(written.tasks) == before else 0
        keep(written.tasks)
    return written


def _question(
    tools: Sequence[JsonDict], resources: Mapping[str, str], about: str, known: Sequence[str], wanted: int
) -> list[JsonDict]:
    shown = {
        "tools": "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        "server": "\n\n".join([*filter(None, [about]), *(f"{uri}:\n{text}" for uri, text in resources.items())]),
        "existing tasks": "\n".join(f"- {text}" for text in known),
    }
    parts = [f"<{name}>\n{text}\n</{name}>" for name, text in shown.items() if text]
    content = "\n\n".join([*parts, f"Write {wanted} new tasks."])
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def _read(text: str, dropped: Counter[str]) -> list[JsonDict]:
    """Return the tasks in the model's answer; count everything else in ``dropped``."""
    tasks = []
    for each in _array(text, dropped):
        fields = [each.get(name) if isinstance(each, dict) else None for name in ("input", "rubric")]
        if all(isinstance(it, str) and it.strip() for it in fields):
            tasks.append({"input": fields[0].strip(), "rubric": fields[1].strip()})
        else:
            dropped["without an input or a rubric"] += 1
    return tasks


def _array(text: str, dropped: Counter[str]) -> list[Any]:
    """Return the first JSON array of objects in a text, which may have words and fences around it."""
    start = text.find("[")
    while start >= 0:
        try:
            found, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            found = None
        if isinstance(found, list) and any(isinstance(it, dict) for it in found):
            return found
        start = text.find("[", start + 1)
    dropped["an answer that isn't a JSON array"] += 1
    return []
