"""Short lessons with clean labels, one skill each, as chat messages.

A small model learns slowly to copy the right word from a list or a message, and complete conversations hardly teach it,
because few of their tokens need it. A fragment is one turn of a conversation, and nearly all of its loss is on the words to
copy.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from examples.email_search.mailbox import (
    ATTRIBUTES,
    KINDS,
    PEOPLE,
    PROJECTS,
    SHOWN,
    Fact,
    Message,
    format_message,
    format_results,
    random_value,
    write_body,
)
from examples.email_search.tasks import ask
from tiny.demonstrations import ChatMessage, call, result, user


@dataclass(frozen=True)
class Fragment:
    """A question, sometimes a tool's answer, and the right next call."""

    messages: list[ChatMessage]
    label: str
    """The text to learn: the end of the call's arguments."""


def make_fragment(rng: random.Random, level: int) -> Fragment:
    """Return a lesson in searching, opening or answering.

    ``level`` (1 to 4) limits the number of results to choose from and of facts in a message.
    """
    fact = Fact(rng.choice(PROJECTS), rng.choice(KINDS), rng.choice(ATTRIBUTES), "", rng.randint(10, 99))
    skill = rng.choices([_search, _open, _answer], [0.12, 0.38, 0.50])[0]
    return skill(rng, fact, level)


def _search(rng: random.Random, fact: Fact, level: int) -> Fragment:
    keywords = [fact.project, fact.kind]
    messages = [user(ask(rng, fact)), call(0, "search_inbox", keywords=keywords)]
    return Fragment(messages, json.dumps(keywords).removeprefix('["') + "}")


def _open(rng: random.Random, fact: Fact, level: int) -> Fragment:
    right = f"{fact.project} {fact.kind}"
    subjects = {right}
    shown = rng.randint(1, min(SHOWN, level))
    while len(subjects) < shown:
        subjects.add(_similar_subject(rng, fact))
    ids = rng.sample([other for other in range(10, 100) if other != fact.message_id], len(subjects))
    # The order of a set of strings differs between processes.
    results = [
        Message(fact.message_id if subject == right else other, subject, rng.choice(PEOPLE), "", "")
        for subject, other in zip(sorted(subjects), ids, strict=True)
    ]
    rng.shuffle(results)
    messages = [
        user(ask(rng, fact)),
        result(0, format_results(results)),
        call(1, "read_email", id=fact.message_id),
    ]
    return Fragment(messages, f"{fact.message_id}}}")


def _similar_subject(rng: random.Random, fact: Fact) -> str:
    project, kind = rng.choice(PROJECTS), rng.choice(KINDS)
    similar = [
        f"{fact.project} {kind}",
        f"{project} {fact.kind}",
        f"{project} {kind}",
        f"Re: {fact.project} {fact.kind}",
    ]
    return rng.choices(similar, [0.45, 0.3, 0.15, 0.1])[0]


def _answer(rng: random.Random, fact: Fact, level: int) -> Fragment:
    others = rng.sample([other for other in ATTRIBUTES if other != fact.attribute], rng.randrange(min(3, level)))
    attributes = [fact.attribute, *others]
    rng.shuffle(attributes)
    values = {attribute: random_value(rng, attribute) for attribute in attributes}
    sent = f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    subject = f"{fact.project} {fact.kind}"
    message = Message(fact.message_id, subject, rng.choice(PEOPLE), sent, write_body(values))
    messages = [
        user(ask(rng, fact)),
        result(1, format_message(message)),
        call(2, "return_final_answer", answer=values[fact.attribute]),
    ]
    return Fragment(messages, json.dumps(values[fact.attribute]).removeprefix('"') + "}")
