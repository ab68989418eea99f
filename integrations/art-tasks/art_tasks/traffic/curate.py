"""Makes tasks of requests: removes duplicates, redacts, and holds out the newest conversations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import task_id, task_input
from art_core.types import JsonDict
from art_tasks.traffic.redact import SECRET, names_secret
from art_tasks.traffic.similar import SAME, Found, kinds
from art_tasks.traffic.sources import Request

HELD_OUT = 0.2
Redact = Callable[[str], tuple[str, Counter[str]]]
"""Returns a text without what it must not have, and how much of each sort was removed."""


@dataclass
class Curated:
    """Tasks, and what became of everything else."""

    train: list[JsonDict] = field(default_factory=list)
    held_out: list[JsonDict] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of requests that did not become tasks, by reason."""
    redacted: Counter[str] = field(default_factory=Counter)
    """Number of replaced texts, by sort, in all requests."""

    @property
    def tasks(self) -> list[JsonDict]:
        return [*self.train, *self.held_out]


def curate(
    requests: Iterable[Request],
    *,
    held_out: float = HELD_OUT,
    same: float = SAME,
    per_kind: int | None = None,
    system: str | None = None,
    known: Sequence[Any] = (),
    redact: Redact | None = None,
) -> Curated:
    """Return the tasks of ``requests``, the share ``held_out`` of the conversations, the newest, apart.

    Of requests that say the same (``same``: from which similarity), the first is kept. Those that say the same as a task in
    ``known``, such as an older held-out set, are dropped. ``per_kind``: how many of one kind are kept, the newest. ``system``:
    keeps the requests whose system prompt contains this text.
    """
    if not 0 <= held_out < 1:
        raise ConfigError(f"the share that is held out must be at least 0 and less than 1, got {held_out:g}")
    curated = Curated()
    ordered = sorted(requests, key=lambda it: it.time.timestamp() if it.time else 0.0)
    if system is not None:
        matching = [it for it in ordered if system in it.system]
        curated.dropped["with another system prompt"] = len(ordered) - len(matching)
        ordered = matching
    kept, tasks = _distinct(ordered, same, known, redact, curated)
    for task, kind in zip(tasks, kinds([text_of(task["input"]) for task in tasks]), strict=True):
        task["kind"] = kind
    if per_kind is not None:
        kept, tasks = _fewer(kept, tasks, per_kind, curated)
    apart = _newest([request.conversation for request in ordered], {it.conversation for it in kept}, held_out)
    for request, task in zip(kept, tasks, strict=True):
        (curated.held_out if request.conversation in apart else curated.train).append(task)
    curated.dropped = +curated.dropped
    return curated


def _distinct(
    requests: Sequence[Request], same: float, known: Sequence[Any], redact: Redact | None, curated: Curated
) -> tuple[list[Request], list[JsonDict]]:
    before, found = Found(same), Found(same)
    for task in known:  # it may have been made without redaction
        asked = task_input(task)
        before.add(text_of(_without(asked, redact, Counter()) if redact else asked))
    conversations = {task.get("conversation") for task in known if isinstance(task, dict)}
    conversations |= {task_id(conversation) for conversation in conversations}
    kept: list[Request] = []
    tasks: list[JsonDict] = []
    for request in requests:
        # Redacted first: requests that differ only in what is redacted are the same task.
        task = _task(request, redact, curated.redacted)
        text = text_of(task["input"])
        if not text.strip():
            curated.dropped["without text"] += 1
        elif {task["conversation"], task_id(request.conversation)} & conversations:
            curated.dropped["in a conversation of a known task"] += 1
        elif before.exact(text) is not None or before.near(text) is not None:
            curated.dropped["the same as a known task, or nearly"] += 1
        elif (number := found.exact(text)) is not None:
            curated.dropped["the same as another"] += 1
            tasks[number]["seen"] += 1
        elif (number := found.near(text)) is not None:
            curated.dropped["nearly the same as another"] += 1
            tasks[number]["seen"] += 1
        else:
            found.add(text)
            kept.append(request)
            tasks.append(task)
    return kept, tasks


def _task(request: Request, redact: Redact | None, redacted: Counter[str]) -> JsonDict:
    said = {"input": request.input, "recorded_output": request.answer}
    facts, conversation = dict(request.facts), request.conversation
    if redact:  # the name of a conversation may be a person's
        said, facts = _without(said, redact, redacted), _without(facts, redact, redacted)
        conversation = task_id(conversation)
    time = request.time.isoformat(timespec="seconds") if request.time else None
    task = {**facts, **said, "recorded_reward": request.reward, "conversation": conversation, "time": time, "seen": 1}
    return {name: value for name, value in task.items() if value is not None or name == "input"}


def _without(value: Any, redact: Redact, redacted: Counter[str], name: str = "") -> Any:
    """Return a JSON value whose texts and long numbers are redacted, names of fields included; ``name`` is its own."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if names_secret(name) and (is_number or isinstance(value, str)):
        redacted[SECRET] += 1
        return f"<{SECRET}>"
    if isinstance(value, str) or is_number:
        text, found = redact(str(value))
        redacted.update(found)
        return text if found else value
    if isinstance(value, dict):
        fields: dict[str, Any] = {}
        for each, it in value.items():
            renamed = new = _without(each, redact, redacted)
            while new in fields:
                new = f"{renamed} {len(fields)}"
            fields[new] = _without(it, redact, redacted, each)
        return fields
    if isinstance(value, list | tuple):
        return [_without(it, redact, redacted) for it in value]
    return value


def _fewer(
    kept: Sequence[Request], tasks: Sequence[JsonDict], per_kind: int, curated: Curated
) -> tuple[list[Request], list[JsonDict]]:
    counts: Counter[int] = Counter()
    chosen = []
    for request, task in reversed(list(zip(kept, tasks, strict=True))):
        counts[task["kind"]] += 1
        if counts[task["kind"]] <= per_kind:
            chosen.append((request, task))
    curated.dropped["beyond --per-kind"] = len(tasks) - len(chosen)
    chosen.reverse()
    return [request for request, _ in chosen], [task for _, task in chosen]


def _newest(conversations: Sequence[str], with_tasks: set[str], share: float) -> set[str]:
    """Return the newest conversations by their last request: a share of those with a task, at least one of several."""
    last = {conversation: number for number, conversation in enumerate(conversations) if conversation in with_tasks}
    order = sorted(last, key=last.__getitem__)
    count = max(round(share * len(order)), 1 if share > 0 and len(order) > 1 else 0)
    return set(order[len(order) - count :])


def text_of(value: Any) -> str:
    """Return everything that an input says."""
    return "\n".join(_texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        role = value.get("role") if "content" in value else None
        for name, it in value.items():
            if not (name == "role" and role is not None):
                yield from _texts(it)
    elif isinstance(value, list | tuple):
        for it in value:
            yield from _texts(it)
    elif value is not None:
        yield json.dumps(value)


def as_lines(tasks: Sequence[JsonDict]) -> bytes:
    """Return one task per line, as ``art train`` and ``art eval`` read them. Other characters that end lines are escaped."""
    text = "".join(json.dumps(it, ensure_ascii=False, default=str) + "\n" for it in tasks)
    for end in "\u0085\u2028\u2029":
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "backslashreplace")  # half an emoji, which UTF-8 does not have, becomes JSON's escape
