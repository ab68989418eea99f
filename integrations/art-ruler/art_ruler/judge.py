"""Who judges: a model that LiteLLM reaches, a LangChain chat model, or a function. Knows nothing about what is asked."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from art_core.redaction import printable, without_keys
from art_core.types import JsonDict
from art_ruler.shorten import estimate, estimate_of

__all__ = ["Answer", "FunctionJudge", "Judge", "JudgeError", "LangChainJudge", "TooLong", "with_tokens"]


class JudgeError(Exception):
    """The judge gave no answer."""


class TooLong(JudgeError):
    """The question does not fit into the judge's context."""


@dataclass(frozen=True)
class Answer:
    """What a judge said, and what it took."""

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None
    """US dollars; None where nobody knows."""
    stopped: str | None = None
    """Why it ended, where that is not its own end: ``length``, ``content_filter`` ..."""


def with_tokens(answer: Answer, messages: list[JsonDict]) -> Answer:
    """Return the answer with its tokens; about as many as they are where the judge does not say."""
    asked, said = answer.input_tokens, answer.output_tokens
    return replace(
        answer,
        input_tokens=estimate_of(messages) if asked is None else asked,
        output_tokens=estimate([answer.text]) if said is None else said,
    )


class Judge(Protocol):
    """Answers chat messages."""

    name: str
    """For logs, and for the scores in the store."""
    identity: str | None
    """What decides its answers, for the cache: another identity, another judge. None: nobody knows, so nothing is cached."""
    context: int | None
    """Tokens that a question may have; None where nobody knows."""
    images: bool
    """Whether it can be shown pictures."""
    priced: bool
    """False where it is known that nobody knows what an answer costs."""

    def prepare(self) -> None:
        """Find out the above; called before it is read, and may be called again. May take seconds, and raises ConfigError for a
        judge that cannot be used."""
        ...

    async def ask(self, messages: list[JsonDict]) -> Answer:
        """Return the answer. Raises JudgeError without one, ConfigError where the judge can never give one."""
        ...


class FunctionJudge:
    """``async def judge(messages) -> str``, or ``-> Answer``. Its attribute ``identity``, where it has one, is the judge's; it
    may raise JudgeError and TooLong."""

    context: int | None = None
    images = True
    priced = True
    """An Answer may say its cost."""

    def __init__(self, function: Callable[[list[JsonDict]], Awaitable[str | Answer]], timeout: float) -> None:
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self.identity: str | None = getattr(function, "identity", None)
        self._function, self._timeout = function, timeout

    def prepare(self) -> None:
        """A function is ready."""

    async def ask(self, messages: list[JsonDict]) -> Answer:
        found = await _within(self._timeout, self.name, lambda: self._function(messages))
        answer = found if isinstance(found, Answer) else Answer(found)
        if not isinstance(answer.text, str):
            raise JudgeError(f"the judge {self.name} returned {type(answer.text).__name__}; return the answer's text")
        return answer


class LangChainJudge:
    """A LangChain chat model, or a runnable of messages that ends in a message or a text. Attempts are counted by the model."""

    context: int | None = None
    images = True
    priced = False

    def __init__(self, model: Any, timeout: float) -> None:
        names = (getattr(model, attribute, None) for attribute in ("model_name", "model"))
        self.name = next(
            (f"langchain/{it}" for it in names if isinstance(it, str)), f"langchain/{type(model).__name__}"
        )
        self._model, self._timeout = model, timeout

    @property
    def identity(self) -> str | None:
        from langchain_core.load import dumps

        written = dumps(self._model)
        # Such an object is written down by its name only: other code or settings would look the same.
        return None if '"type": "not_implemented"' in written else hashlib.sha256(written.encode()).hexdigest()

    def prepare(self) -> None:
        """A LangChain model is ready."""

    async def ask(self, messages: list[JsonDict]) -> Answer:
        try:
            found = await self._invoke(messages)
        except JudgeError as error:
            # A client that was used in an event loop that has ended keeps its connections, and fails once.
            if "Event loop is closed" not in str(error):
                raise
            found = await self._invoke(messages)
        text, usage = _text(found), getattr(found, "usage_metadata", None) or {}
        if text is None:
            raise JudgeError(f"the judge {self.name} returned {type(found).__name__}; end in a message or a text")
        reason = (getattr(found, "response_metadata", None) or {}).get("finish_reason")
        stopped = None if reason in ("stop", "end_turn") else reason
        return Answer(text, usage.get("input_tokens"), usage.get("output_tokens"), stopped=stopped)

    async def _invoke(self, messages: list[JsonDict]) -> Any:
        return await _within(self._timeout, self.name, lambda: self._model.ainvoke(messages))


async def _within(seconds: float, name: str, ask: Callable[[], Any]) -> Any:
    """Return what a foreign judge answers; whatever it raises is a JudgeError."""
    try:
        async with asyncio.timeout(seconds):
            answer = ask()
            return await answer if inspect.isawaitable(answer) else answer
    except JudgeError:
        raise
    except TimeoutError as error:
        raise JudgeError(f"the judge {name} gave no answer within {seconds:g} s; give a larger timeout=") from error
    except Exception as error:  # the boundary to the user's judge
        said = printable(without_keys(str(error)))
        raise JudgeError(f"the judge {name} failed: {type(error).__name__}: {said}") from error


def _text(found: Any) -> str | None:
    """Return the text of a LangChain message, whose content may be a list of blocks."""
    content = getattr(found, "content", found)
    if isinstance(content, list):
        blocks = [block if isinstance(block, str) else block.get("text", "") for block in content]
        return "".join(it for it in blocks if isinstance(it, str))
    return content if isinstance(content, str) else None
