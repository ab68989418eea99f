"""The judge protocol, and judges that are a LangChain chat model or a function."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from art_core.plugin_api import printable, without_keys
from art_core.types import JsonDict
from art_ruler.shorten import estimate, estimate_of

__all__ = ["Answer", "FunctionJudge", "Judge", "JudgeError", "LangChainJudge", "TimedOut", "TooLong", "with_tokens"]


class JudgeError(Exception):
    """The judge gave no answer."""


class TooLong(JudgeError):
    """The question does not fit into the judge's context."""


class TimedOut(JudgeError):
    """The judge gave no answer in time. It has the question, so that is billed."""

    def __init__(self, name: str, seconds: float, cost: float | None = None) -> None:
        """``cost``: US dollars of the question; None if unknown."""
        super().__init__(f"the judge {name} gave no answer within {seconds:g} s; pass a larger timeout=")
        self.cost = cost


@dataclass(frozen=True)
class Answer:
    """A judge's answer, and its cost."""

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None
    """US dollars; None if unknown."""
    stopped: str | None = None
    """Why it was cut short: ``length``, ``content_filter`` ...; None if it ended by itself."""


def with_tokens(answer: Answer, messages: list[JsonDict]) -> Answer:
    """Return the answer with token counts, estimated if the judge reports none."""
    input_tokens, output_tokens = answer.input_tokens, answer.output_tokens
    return replace(
        answer,
        input_tokens=estimate_of(messages) if input_tokens is None else input_tokens,
        output_tokens=estimate([answer.text]) if output_tokens is None else output_tokens,
    )


class Judge(Protocol):
    """Answers chat messages."""

    name: str
    """Name in logs, and of the scores in the store."""
    identity: str | None
    """Everything that decides its answers, as the cache key; None: unknown, so nothing is cached."""
    context: int | None
    """Most tokens in a question; None if unknown."""
    images: bool
    """Whether it accepts images."""
    priced: bool
    """False if the cost of its answers can't be known."""

    def prepare(self) -> None:
        """Set the attributes above; called before they are read, possibly more than once. May take seconds.

        Raises ConfigError if the judge cannot be used.
        """
        ...

    async def ask(self, messages: list[JsonDict]) -> Answer:
        """Return the answer. Raises JudgeError if there is none, and ConfigError if the judge can never answer."""
        ...


class FunctionJudge:
    """``async def judge(messages) -> str``, or ``-> Answer``.

    The function may have an attribute ``identity``, the judge's, and may raise JudgeError and TooLong.
    """

    context: int | None = None
    images = True
    priced = True
    """An Answer may include its cost."""

    def __init__(self, function: Callable[[list[JsonDict]], Awaitable[str | Answer]], timeout: float) -> None:
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self.identity: str | None = getattr(function, "identity", None)
        self._function, self._timeout = function, timeout

    def prepare(self) -> None:
        """Nothing to prepare."""

    async def ask(self, messages: list[JsonDict]) -> Answer:
        result = await _within(self._timeout, self.name, lambda: self._function(messages))
        answer = result if isinstance(result, Answer) else Answer(result)
        if not isinstance(answer.text, str):
            raise JudgeError(f"the judge {self.name} returned {type(answer.text).__name__}; return the answer's text")
        return answer


class LangChainJudge:
    """A LangChain chat model, or a runnable from messages to a message or a string. The model does its own retries."""

    context: int | None = None
    images = True
    priced = False

    def __init__(self, model: Any, timeout: float) -> None:
        names = (getattr(model, attribute, None) for attribute in ("model_name", "model"))
        name = next((name for name in names if isinstance(name, str)), type(model).__name__)
        self.name = f"langchain/{name}"
        self._model, self._timeout = model, timeout

    @property
    def identity(self) -> str | None:
        from langchain_core.load import dumps

        serialized = dumps(self._model)
        # LangChain serializes such an object by its name only, so different code or settings would look the same.
        return None if '"type": "not_implemented"' in serialized else hashlib.sha256(serialized.encode()).hexdigest()

    def prepare(self) -> None:
        """Nothing to prepare."""

    async def ask(self, messages: list[JsonDict]) -> Answer:
        try:
            result = await self._invoke(messages)
        except JudgeError as error:
            # A client that was used in an event loop that is closed now still has its connections, and fails once.
            if "Event loop is closed" not in str(error):
                raise
            result = await self._invoke(messages)
        text, usage = _text(result), getattr(result, "usage_metadata", None) or {}
        if text is None:
            raise JudgeError(f"the judge {self.name} returned {type(result).__name__}; return a message or a string")
        reason = (getattr(result, "response_metadata", None) or {}).get("finish_reason")
        stopped = None if reason in ("stop", "end_turn") else reason
        return Answer(text, usage.get("input_tokens"), usage.get("output_tokens"), stopped=stopped)

    async def _invoke(self, messages: list[JsonDict]) -> Any:
        return await _within(self._timeout, self.name, lambda: self._model.ainvoke(messages))


async def _within(seconds: float, name: str, ask: Callable[[], Any]) -> Any:
    """Return the answer of a user's judge; anything that it raises becomes a JudgeError."""
    try:
        async with asyncio.timeout(seconds):
            answer = ask()
            return await answer if inspect.isawaitable(answer) else answer
    except JudgeError:
        raise
    except TimeoutError as error:
        raise TimedOut(name, seconds) from error
    except Exception as error:  # the user's judge may raise anything
        message = printable(without_keys(str(error)))
        raise JudgeError(f"the judge {name} failed: {type(error).__name__}: {message}") from error


def _text(result: Any) -> str | None:
    """Return the text of a LangChain message, whose content may be a list of blocks; None if it has none."""
    content = getattr(result, "content", result)
    if isinstance(content, list):
        blocks = [block if isinstance(block, str) else block.get("text", "") for block in content]
        return "".join(text for text in blocks if isinstance(text, str))
    return content if isinstance(content, str) else None
