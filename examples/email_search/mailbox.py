"""Made-up mailboxes: 60 messages from a seed, in SQLite with full-text search."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# fmt: off
PROJECTS = [
    "Falcon", "Orion", "Apollo", "Titan", "Nova", "Atlas", "Comet", "Phoenix", "Zephyr", "Delta", "Cobalt",
    "Ember", "Harbor", "Juniper", "Kestrel", "Lotus", "Maple", "Nimbus", "Onyx", "Pepper", "Quartz", "Raven",
    "Saffron", "Tundra", "Umber", "Velvet", "Willow", "Xenon", "Yarrow", "Zircon", "Amber", "Birch", "Cedar",
    "Dune", "Echo", "Fjord", "Garnet", "Hazel", "Iris", "Jade", "Koala", "Lemur", "Mango", "Nectar", "Opal",
    "Pine", "Quail", "Robin", "Sable", "Tulip",
]
KINDS = [
    "budget", "launch", "audit", "review", "offsite", "contract", "invoice", "workshop", "survey", "training",
    "migration", "hiring", "webinar", "renewal", "inspection", "retreat",
]
PEOPLE = [
    "Alice", "Bruno", "Carla", "Dana", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karim", "Linda",
    "Maya", "Nadia", "Oscar", "Paula", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Victor", "Wendy", "Xavier",
    "Yusuf", "Zoe", "Aaron", "Bella", "Colin", "Diego",
]
CITIES = [
    "Paris", "Tokyo", "Lima", "Oslo", "Cairo", "Delhi", "Quito", "Rome", "Seoul", "Lagos", "Dublin", "Boston",
]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
]
ATTRIBUTES = [
    "deadline", "room", "cost", "contact", "city", "time", "code", "headcount",
]
# fmt: on
REPLIES = (
    "Thanks, noted.",
    "Sounds good to me.",
    "Can we talk about this later?",
    "I will check and come back.",
)


SHOWN = 4
"""Results that a search shows at most."""


@dataclass(frozen=True)
class Message:
    """One mail."""

    id: int
    """Two digits, unique in its mailbox."""
    subject: str
    sender: str
    sent: str
    """ISO date."""
    body: str


@dataclass(frozen=True)
class Fact:
    """One fact that a message states."""

    project: str
    kind: str
    attribute: str
    value: str
    message_id: int


class Mailbox:
    """40 messages with three facts each and 20 replies with none, about 12 projects; a seed always yields the same mailbox."""

    def __init__(self, seed: int) -> None:
        messages, facts = _write_mails(random.Random(seed))
        self.facts: tuple[Fact, ...] = tuple(facts)
        # Frameworks run tools in any thread, and one mailbox may serve several rollouts.
        self._lock = threading.Lock()
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute("CREATE VIRTUAL TABLE message USING fts5(subject, sender, body, sent UNINDEXED)")
        self._db.executemany(
            "INSERT INTO message (rowid, subject, sender, sent, body) VALUES (?, ?, ?, ?, ?)",
            [(m.id, m.subject, m.sender, m.sent, m.body) for m in messages],
        )

    def search(
        self, keywords: Sequence[str], sender: str = "", sent_after: str = "", sent_before: str = ""
    ) -> list[Message]:
        """Return the messages that contain every keyword in subject, sender or body, newest first.

        Dates are ISO and exclusive; an empty string disables a filter. Without any filter, nothing is returned.
        """
        words = [
            f'"{word}"' for keyword in keywords if (word := "".join(c if c.isalnum() else " " for c in keyword).strip())
        ]
        filters = {"message MATCH ?": " AND ".join(words), "sender = ? COLLATE NOCASE": sender}
        filters |= {"sent > ?": sent_after, "sent < ?": sent_before}
        used = {condition: value for condition, value in filters.items() if value}
        if not used:
            return []
        return self._select(" AND ".join(used) + " ORDER BY sent DESC, rowid", *used.values())

    def read(self, message_id: int) -> Message | None:
        """Return one message, or None if no message has this id."""
        return next(iter(self._select("rowid = ?", message_id)), None)

    def _select(self, where: str, *values: str | int) -> list[Message]:
        with self._lock:
            rows = self._db.execute(f"SELECT rowid, subject, sender, sent, body FROM message WHERE {where}", values)
            return [Message(*row) for row in rows]


def facts_of(seed: int) -> list[Fact]:
    """Return the facts of the mailbox of ``seed``."""
    return _write_mails(random.Random(seed))[1]


@lru_cache(maxsize=512)
def open_mailbox(seed: int) -> Mailbox:
    """Return the mailbox of ``seed``; recent ones are cached."""
    return Mailbox(seed)


def format_results(messages: list[Message]) -> str:
    """Return search results as the agent sees them."""
    if not messages:
        return "no results"
    lines = [f"{message.subject} from {message.sender} id {message.id}" for message in messages[:SHOWN]]
    return "\n".join([f"{len(messages)} results", *lines])


def format_message(message: Message | None) -> str:
    """Return a message as the agent sees it."""
    if message is None:
        return "no such email"
    return f"{message.subject} from {message.sender} on {message.sent}\n{message.body}"


def random_value(rng: random.Random, attribute: str) -> str:
    """Return a possible value of ``attribute``, such as ``"42 dollars"`` for a cost."""
    match attribute:
        case "deadline":
            return f"{rng.choice(MONTHS)} {rng.randint(1, 9)}"
        case "room":
            return f"{rng.choice('ABCDEF')}{rng.randint(1, 9)}"
        case "cost":
            return f"{rng.randint(10, 99)} dollars"
        case "contact":
            return rng.choice(PEOPLE)
        case "city":
            return rng.choice(CITIES)
        case "time":
            return f"{rng.randint(8, 18)}:00"
        case "code":
            return f"{rng.randint(10, 99)}"
        case "headcount":
            return f"{rng.randint(5, 99)} people"
    raise ValueError(f"unknown attribute {attribute!r}; choose from {', '.join(ATTRIBUTES)}")


def write_body(values: dict[str, str]) -> str:
    """Return the text of a message that states ``values`` (attribute -> value)."""
    return " ".join(["Hi all.", *(f"The {attribute} is {value}." for attribute, value in values.items()), "Regards"])


def _write_mails(rng: random.Random) -> tuple[list[Message], list[Fact]]:
    projects, kinds = rng.sample(PROJECTS, 12), rng.sample(KINDS, 8)
    topics = rng.sample([(project, kind) for project in projects for kind in kinds], 40)
    ids = iter(rng.sample(range(10, 100), 60))
    messages, facts = [], []

    def write(subject: str, body: str) -> int:
        sent = f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        messages.append(Message(next(ids), subject, rng.choice(PEOPLE), sent, body))
        return messages[-1].id

    for project, kind in topics:
        values = {attribute: random_value(rng, attribute) for attribute in rng.sample(ATTRIBUTES, 3)}
        message_id = write(f"{project} {kind}", write_body(values))
        facts += [Fact(project, kind, attribute, value, message_id) for attribute, value in values.items()]
    for project, kind in rng.choices(topics, k=20):
        write(f"Re: {project} {kind}", rng.choice(REPLIES))
    return messages, facts
