"""What a trajectory recorded: exchanges, all of chat completions, and the conversations that they form."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from art_core.errors import ConfigError
from art_openpipe.tokens import tokenized
from art_openpipe.types import Message, Messages, MessagesAndChoices, Tools

PARSED = {"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}  # which a client adds


def messages_of(history: MessagesAndChoices) -> Messages:
    """Return messages and choices as messages."""
    return [
        item.message.model_dump(exclude_none=True, exclude=PARSED) if isinstance(item, Choice) else item
        for item in history
    ]


class Recorded:
    """Has logs, and the token ids of its recorded answers; refuses forms that art does not have."""

    def log(self, message: str) -> None:
        """Add a line to the logs."""
        self.logs.append(message)

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("_history", "_histories")) or name in ("completions", "responses", "compact_dump"):
            raise ConfigError(
                f"{type(self).__name__}.{name} is not supported by art, which records every call as a chat completion: use "
                "exchanges.chat_completions or histories(), and model_dump_json()"
            )
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic defines it

    def tokenize(self, **options: Any) -> Any:
        """Return the token ids as they were recorded; ``options`` are those of ``art.tokenize``."""
        return tokenized(self, **options)

    def tensorize(self, *, device: Any = None, **options: Any) -> Any:
        """Return ``tokenize`` as tensors."""
        import torch

        kinds = {float: torch.float32}
        to = lambda values: torch.tensor(values, dtype=kinds.get(type(values[0]), torch.int64), device=device)  # noqa: E731
        return self.tokenize(to=to, **options)


class LegacyHistory(Recorded, BaseModel):
    """A conversation that the script built."""

    messages_and_choices: MessagesAndChoices
    tools: Tools | None = None

    def messages(self) -> Messages:
        return messages_of(self.messages_and_choices)

    def choices(self) -> list[Choice]:
        return [item for item in self.messages_and_choices if isinstance(item, Choice)]


class ChatCompletionsHistory(LegacyHistory):
    """A conversation with one model that was captured; ``messages`` is a list."""

    model: str | None

    messages = property(LegacyHistory.messages)  # type: ignore[assignment]  # a method of the other, as in OpenPipe ART


class ChatCompletionsExchange(BaseModel):
    """A request and its answer."""

    request: dict[str, Any]
    response: ChatCompletion

    @property
    def model(self) -> str:
        return self.request.get("model") or self.response.model


class TrajectoryExchanges(Recorded, BaseModel):
    """The calls of a trajectory, in the order of their answers."""

    chat_completions: list[ChatCompletionsExchange] = []

    def __bool__(self) -> bool:
        return bool(self.chat_completions)

    def choices(self, model: str | None = None) -> list[Choice]:
        return [
            choice for each in self.chat_completions if model in (None, each.model) for choice in each.response.choices
        ]

    def histories(self, model: str | None) -> list[ChatCompletionsHistory]:
        """Return the conversations: an exchange extends the one that it continues, or starts one.

        ``model`` is a name or a shell pattern.
        """
        found: list[ChatCompletionsHistory] = []
        for exchange in (each for each in self.chat_completions if fnmatchcase(each.model, model or "*")):
            prompt, tools = list(exchange.request.get("messages", ())), exchange.request.get("tools")
            for choice in exchange.response.choices:
                parent = next(
                    (each for each in reversed(found) if _continues(each, exchange.model, prompt, tools)), None
                )
                if parent is None:
                    parent = ChatCompletionsHistory(model=exchange.model, messages_and_choices=[], tools=tools)
                    found.append(parent)
                parent.messages_and_choices += [*prompt[len(parent.messages_and_choices) :], choice]
        return found


def _continues(history: ChatCompletionsHistory, model: str, prompt: Messages, tools: Any) -> bool:
    """Whether a request starts with all messages of ``history``, however a client writes empty content."""
    items = history.messages_and_choices
    if (history.model, history.tools) != (model, tools) or len(prompt) <= len(items):
        return False
    return all(_comparable(ours) == _comparable(theirs) for ours, theirs in zip(items, prompt, strict=False))


def _comparable(item: Message | Choice) -> Message:
    message = item.message.model_dump() if isinstance(item, Choice) else item
    calls = message.get("tool_calls") or ()
    functions = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"role": message.get("role"), "content": message.get("content") or "", "calls": functions}
