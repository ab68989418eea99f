"""Complete conversations of a mediocre agent, as chat messages.

The agent is mediocre on purpose. Its usual behaviour (search for the project alone, open the newest message, answer with the
first fact in it) is mostly wrong, but it does the right thing often enough to learn it. So reinforcement learning finds the
skills in the model and has something to improve, sampled or greedy.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from examples.email_search.agent import TOOLS
from examples.email_search.mailbox import SHOWN, Fact, Mailbox, Message, format_message, format_results
from examples.email_search.tasks import SYSTEM_PROMPT, ask

MAKING_MAILBOXES = range(1, 1_000_000)
"""Seeds of the mailboxes in demonstrations."""
OPENAI_TOOLS = [convert_to_openai_tool(tool) for tool in TOOLS]
"""``tools`` as LangChain sends them."""

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Habits:
    """How often the agent does the right thing."""

    both_keywords: float = 0.25
    project_only: float = 0.50
    """The remaining searches are for the kind alone."""
    right_message: float = 0.30
    """Open the message with the right subject, if it is shown; else open the first."""
    right_attribute: float = 0.33
    """Answer with the requested fact; else with the first fact in the message."""
    answer_unread: float = 0.06
    """Give up after the search."""
    look_again: float = 0.25
    """Search again with both keywords if the message didn't help."""


SKILLED = Habits(
    both_keywords=0.6, project_only=0.4, right_message=1.0, right_attribute=1.0, answer_unread=0.0, look_again=1.0
)


def user(text: str) -> ChatMessage:
    """Return a user message."""
    return {"role": "user", "content": text}


def call(number: int, name: str, **arguments: object) -> ChatMessage:
    """Return an assistant message with one tool call, as LangChain sends it on later turns."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": f"call_{number}", "function": function}],
    }


def result(number: int, text: str) -> ChatMessage:
    """Return the tool message that answers call ``number``."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


@dataclass
class Conversation:
    """A conversation in progress."""

    mailbox: Mailbox
    messages: list[ChatMessage] = field(default_factory=list)
    answer: str | None = None
    turns: int = 0

    def search(self, *keywords: str) -> list[Message]:
        messages = self.mailbox.search(keywords)
        self._turn(call(self.turns, "search_inbox", keywords=list(keywords)), format_results(messages))
        return messages[:SHOWN]

    def read(self, message: Message) -> None:
        self._turn(call(self.turns, "read_email", id=message.id), format_message(message))

    def finish(self, answer: str) -> None:
        self.messages.append(call(self.turns, "return_final_answer", answer=answer))
        self.answer = answer

    def _turn(self, tool_call: ChatMessage, text: str) -> None:
        self.messages += [tool_call, result(self.turns, text)]
        self.turns += 1


def demonstrate(rng: random.Random, mailbox: Mailbox, fact: Fact, habits: Habits) -> Conversation:
    """Return a conversation about ``fact``; ``habits`` decide whether it is right or wrong."""
    start = [{"role": "system", "content": SYSTEM_PROMPT}, user(ask(rng, fact))]
    conversation = Conversation(mailbox, start)
    shown = conversation.search(*_keywords(rng, fact, habits))
    if rng.random() < habits.answer_unread:
        conversation.finish("unknown")
        return conversation
    opened = _open(rng, conversation, shown, fact, habits)
    if not _helps(mailbox, opened, fact) and rng.random() < habits.look_again:
        shown = conversation.search(fact.project, fact.kind)
        unread = [message for message in shown if message != opened]
        opened = _open(rng, conversation, unread, fact, habits) if unread else opened
    conversation.finish(_pick_answer(rng, mailbox, opened, fact, habits))
    return conversation


def _keywords(rng: random.Random, fact: Fact, habits: Habits) -> tuple[str, ...]:
    both, project, kind = (fact.project, fact.kind), (fact.project,), (fact.kind,)
    rest = 1 - habits.both_keywords - habits.project_only
    return rng.choices([both, project, kind], [habits.both_keywords, habits.project_only, rest])[0]


def _open(rng: random.Random, conversation: Conversation, shown: list[Message], fact: Fact, habits: Habits) -> Message:
    fitting = [message for message in shown if message.subject == f"{fact.project} {fact.kind}"]
    message = fitting[0] if fitting and rng.random() < habits.right_message else shown[0]
    conversation.read(message)
    return message


def _facts(mailbox: Mailbox, message: Message) -> list[Fact]:
    return [fact for fact in mailbox.facts if fact.message_id == message.id]


def _helps(mailbox: Mailbox, message: Message, fact: Fact) -> bool:
    return any(other.attribute == fact.attribute for other in _facts(mailbox, message))


def _pick_answer(rng: random.Random, mailbox: Mailbox, message: Message, fact: Fact, habits: Habits) -> str:
    facts = _facts(mailbox, message)
    if not facts:
        return "unknown"
    right = [other.value for other in facts if other.attribute == fact.attribute]
    return right[0] if right and rng.random() < habits.right_attribute else facts[0].value
