"""Questions about mailboxes, with their answers."""

from __future__ import annotations

import random
from typing import Any

from .mailbox import Fact, facts_of

SYSTEM_PROMPT = "You answer questions about an inbox."
"""The agents' system prompt; the tiny model was made with it."""
MAX_MODEL_CALLS = 6
"""In one rollout."""
QUESTIONS = (
    "What is the {attribute} for the {project} {kind}?",
    "Find the {attribute} of the {project} {kind}.",
    "Tell me the {attribute} for {project} {kind}.",
    "I need the {attribute} of the {project} {kind}.",
)
TRAINING_MAILBOXES = range(5_000_000, 6_000_000)
HELD_OUT_MAILBOXES = range(9_000_000, 10_000_000)
"""No mailbox is in both, or among those that the tiny model was made from (``tiny/demonstrations.py``)."""


def training_tasks(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` questions, each about a different mailbox.

    A task is ``{"input": {"messages": [...], "mailbox": int}, "answer": str, "message_id": int}``.
    """
    return _tasks(n, seed, TRAINING_MAILBOXES)


def held_out_tasks(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` questions about mailboxes that training never sees, in the form of ``training_tasks``."""
    return _tasks(n, seed, HELD_OUT_MAILBOXES)


def ask(rng: random.Random, fact: Fact) -> str:
    """Return a question that ``fact`` answers."""
    return rng.choice(QUESTIONS).format(attribute=fact.attribute, project=fact.project, kind=fact.kind)


def _tasks(n: int, seed: int, mailboxes: range) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    tasks = []
    for mailbox in rng.sample(mailboxes, n):
        fact = rng.choice(facts_of(mailbox))
        messages = [{"role": "user", "content": ask(rng, fact)}]
        tasks.append(
            {
                "input": {"messages": messages, "mailbox": mailbox},
                "answer": fact.value,
                "message_id": fact.message_id,
            }
        )
    return tasks
