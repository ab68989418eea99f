"""Grades the email agent's rollouts by what a reader of their text can see, without the tasks' answers.

Beyond ``judge_server``, it relies on messages as ``[role] text`` and tool calls as ``calls NAME({json})``, each on its own line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from bench.judge_server import judging_by
from examples.email_search.tasks import QUESTIONS

MESSAGE = re.compile(r"^\[(system|user|assistant|tool)(?: \w+)?\] ?", re.MULTILINE)
CALL = re.compile(r"^calls (\w+)\((.*)\)\s*$", re.MULTILINE)
ASKED = [re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(form))) for form in QUESTIONS]
REFUSED = re.compile(r"^(Error|.* is not a valid tool)")


@dataclass
class Seen:
    """What one rollout did, as far as its text shows it."""

    searched: bool = False
    found: bool = False
    """A search showed the mail that the question is about."""
    read: str = ""
    """That mail's text."""
    answer: str | None = None
    faults: int = 0
    """Messages without a tool call, and refused calls."""


def grade(text: str) -> tuple[float, str]:
    """Return a rollout's score and the reason.

    1 if it answers what the mail in question says, and it read that mail. Otherwise partial credit for each step on the way.
    Every fault costs a little.
    """
    asked = next((found for form in ASKED if (found := form.search(text))), None)
    if asked is None:
        return 0.0, "no question"
    seen = look(text, f"{asked['project']} {asked['kind']}")
    stated = re.search(rf"The {asked['attribute']} is (.+?)\.(?= |$)", seen.read)
    if seen.answer is not None and stated is not None and seen.answer.strip() == stated[1]:
        return 1.0 - 0.05 * min(seen.faults, 4), "answers what the mail says"
    quoted = bool(seen.answer and seen.answer.strip() in seen.read)
    parts = {
        "searched": 0.05 * seen.searched,
        "found the mail": 0.05 * seen.found,
        "read the mail": 0.15 * bool(seen.read),
        "answered": 0.05 * (seen.answer is not None),
        "answered from the mail": 0.1 * quoted,
    }
    why = ", ".join(name for name, points in parts.items() if points) or "did nothing"
    return round(max(sum(parts.values()) - 0.05 * seen.faults, 0.0), 3), f"{why}; not what was asked for"


judge = judging_by(grade)


def look(text: str, subject: str) -> Seen:
    """Return what the rollout in ``text`` did about the mail with this subject."""
    seen = Seen()
    pieces = MESSAGE.split(text)
    for role, message in zip(pieces[1::2], pieces[2::2], strict=True):
        if role == "assistant":
            calls = CALL.findall(message)
            seen.faults += not calls
            for name, arguments in calls:
                note(seen, name, arguments)
        elif role == "tool":
            lines = map(str.strip, message.splitlines())
            seen.found |= any(line.startswith(f"{subject} from ") and " id " in line for line in lines)
            if message.startswith(f"{subject} from ") and " on " in message.partition("\n")[0]:
                seen.read = message.partition("\n")[2]
            seen.faults += bool(REFUSED.match(message))
    return seen


def note(seen: Seen, name: str, arguments: str) -> None:
    """Note one call."""
    seen.searched |= name == "search_inbox"
    if name != "return_final_answer":
        return
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and isinstance(parsed.get("answer"), str):
        seen.answer = parsed["answer"]
    else:
        seen.faults += 1
