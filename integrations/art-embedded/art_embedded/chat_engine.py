"""Answers chat-completions requests with sampled tokens, wherever these come from.

The event loop renders prompts, submits generations, and turns their tokens into answers.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from art_core import TrainConfig
from art_core.errors import TOO_LONG, UpstreamError
from art_core.types import EngineBase, JsonDict
from art_embedded.answer import Answer, message
from art_embedded.chat import Chat, Detokenizer
from art_embedded.formats import HERMES, Formats
from art_embedded.formats.thinking import Place
from art_embedded.grammar import Grammar
from art_embedded.requests import ChatRequest, Shape, parse, refuse
from art_embedded.sampling import Draw, Sampled
from art_embedded.scheduler import Generation

STOP_WINDOW = 8
"""Tokens that are decoded to search for a stop string, in addition to one per byte of it."""


class ChatEngine(EngineBase, ABC):
    """The part of an engine between OpenAI's API and token ids. A subclass loads the model and samples."""

    formats: Formats = HERMES
    """How the model writes tool calls and thinking."""
    max_context = 0
    """Most tokens of prompt plus answer."""
    vocab_size = 0

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._version = 0
        self._requests = 0
        self._chat: Chat | None = None

    @abstractmethod
    def _submit(self, generations: Sequence[Generation], version: int) -> None:
        """Begin to sample ``generations`` with the weights of ``version``. Raises UpstreamError if the engine isn't running."""

    def _end(self, generations: Sequence[Generation]) -> None:
        """Stop sampling ``generations``: nobody waits for them any longer."""
        for generation in generations:
            generation.cancelled = True

    @abstractmethod
    def _grammar(self, shape: Shape, place: Place) -> Grammar | None:
        """Return what enforces ``shape``, or None to ignore it. Called in a thread. Raises UpstreamError 400 if it can't."""

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a chat-completions request, as in ``Upstream``; if cancelled, return what was sampled so far."""
        return await self.answer(request, self._version)

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Answer with chunks, as in ``Upstream``. Closing the iterator stops the sampling."""
        return self.chunks(request, self._version)

    async def answer(self, request: JsonDict, version: int) -> JsonDict:
        """Like ``chat``, with the weights of ``version``."""
        async with self._sample(request, version, streaming=False) as running:
            with suppress(asyncio.CancelledError):
                while not all(choice.ended() for choice in running.choices):
                    await running.wait()
            choices = [choice.complete() for choice in running.choices]
            return {
                **running.head("chat.completion"),
                **running.prompt_fields(),
                "choices": choices,
                "usage": running.usage(),
            }

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        """Like ``stream``, with the weights of ``version``."""
        async with self._sample(request, version, streaming=True) as running:
            head = running.head("chat.completion.chunk")
            for choice in running.choices:
                first = running.prompt_fields() if choice is running.choices[0] else {}
                yield {**head, **first, "choices": [choice.chunk([], {"role": "assistant", "content": ""})]}
            open_choices = list(running.choices)
            while open_choices:
                await running.wait()
                for choice in list(open_choices):
                    ended = choice.ended()
                    fresh, deltas = choice.read(final=ended)
                    if ended:
                        open_choices.remove(choice)
                    for delta in deltas or ([{}] if fresh and ended else []):
                        yield {**head, "choices": [choice.chunk(fresh, delta)]}
                        fresh = []
                    if ended:
                        yield {**head, "choices": [choice.chunk([], {}, choice.finish_reason())]}
            if running.request.include_usage:
                yield {**head, "choices": [], "usage": running.usage()}

    @asynccontextmanager
    async def _sample(self, body: JsonDict, version: int, *, streaming: bool) -> AsyncIterator[_Running]:
        """Start sampling the answers to ``body``; cancel those that still run when the block ends."""
        running = await self._prepare(body, version, streaming)
        self._submit([choice.generation for choice in running.choices], version)
        try:
            yield running
        finally:
            self._end([choice.generation for choice in running.choices])

    async def _prepare(self, body: JsonDict, version: int, streaming: bool) -> _Running:
        chat = self._started()
        request = parse(body, self._config.max_tokens)
        draws = [self._draw(request, index, version) for index in range(request.n)]
        text, prompt = self._prompt(request, chat)
        thinking = self.formats.thinking
        # The answer to a raw completion isn't split into thinking and content.
        place: Place = "after" if thinking is None or text is None else thinking.place(text)
        if request.shape is not None:
            grammar = await asyncio.to_thread(self._grammar, request.shape, place)
            for draw in draws:
                draw.grammar = grammar and grammar.copy()
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        max_tokens = min(request.max_tokens, self.max_context - len(prompt))
        stop_check = _stop_check(chat, request.stop)
        generations = [Generation(prompt, max_tokens, draw, loop, changed, streaming, stop_check) for draw in draws]
        choices = [
            _Choice(index, each, request, chat, text, self._answer(request, place))
            for index, each in enumerate(generations)
        ]
        return _Running(request, prompt, choices, changed, version)

    def _started(self) -> Chat:
        if self._chat is None:
            raise UpstreamError("the engine hasn't been started; await engine.start() first", status=503)
        return self._chat

    def _answer(self, request: ChatRequest, place: Place) -> Answer:
        return Answer(
            tools=bool(request.tools),
            stop=request.stop,
            formats=self.formats,
            place=place,
            schemas=request.schemas(),
        )

    def _prompt(self, request: ChatRequest, chat: Chat) -> tuple[str | None, list[int]]:
        """Return the prompt's text (None for a raw prompt) and its ids."""
        if request.prompt is None:
            text = chat.render(request.messages, request.tools, request.template_arguments)
            prompt = chat.encode(text)
        else:
            text, prompt = None, chat.raw_ids(request.prompt)
        self._check_vocabulary(prompt)
        if not prompt:
            raise refuse("the prompt is empty; send at least one message with content, or one token")
        if len(prompt) >= self.max_context:
            raise refuse(
                f"This model's maximum context length is {self.max_context} tokens. However, you requested "
                f"{len(prompt) + 1} tokens ({len(prompt)} in the messages, 1 in the completion). "
                "Please reduce the length of the messages.",
                TOO_LONG,
            )
        return text, prompt

    def _check_vocabulary(self, ids: list[int]) -> None:
        unknown = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            # Some tokenizers have added tokens for which the model has no row, such as those for images.
            added = self._started().tokenizer.added_tokens_decoder.get(unknown)
            raise refuse(
                f"token id {unknown}{f' ({added})' if added else ''} is out of range; the model's ids are 0 to "
                f"{self.vocab_size - 1}, so leave it out"
            )

    def _draw(self, request: ChatRequest, index: int, version: int) -> Draw:
        self._requests += 1
        # The version is included because a resumed run counts its requests from 0 and would repeat the first step's draws.
        default = f"{self._config.seed}/{version}/{self._requests}"
        seed = default if request.seed is None else f"seed {request.seed}/{index}"
        top_logprobs = request.top_logprobs if request.logprobs else 0
        return Draw(request.temperature, request.top_p, request.top_k, top_logprobs, random.Random(seed))


class _Choice:
    """One answer to a request: converts sampled tokens to OpenAI's format."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        request: ChatRequest,
        chat: Chat,
        prompt_text: str | None,
        answer: Answer,
    ) -> None:
        self.index, self.generation, self._request, self._chat = index, generation, request, chat
        self._prompt_text = prompt_text
        self._detokenizer = Detokenizer(chat)
        self._answer = answer
        self._read = 0
        self._unsent: list[Sampled] = []

    def ended(self) -> bool:
        """Return whether the answer is complete. Raises UpstreamError if the engine failed."""
        if self.generation.error is not None:
            raise self.generation.error
        return self.generation.finish_reason is not None

    def read(self, *, final: bool) -> tuple[list[Sampled], list[JsonDict]]:
        """Return the deltas that can be sent now, and the tokens to send with the first of them.

        With ``final``, return everything sampled so far, even if more is to come. The caller decides it, because the decode
        thread may end the generation at any time.
        """
        new = self.generation.sampled[self._read :]
        self._read += len(new)
        text = self._detokenizer.feed([sampled.token for sampled in new], final=final)
        deltas = self._answer.feed(text, final=final)
        self._unsent += new
        if not deltas and not final:
            return [], []
        fresh, self._unsent = self._unsent, []
        if self.generation.finish_reason == "stop" and self._prompt_text is not None:
            self._chat.remember(self._prompt_text, self.generation.prompt, [s.token for s in self.generation.sampled])
        return fresh, deltas

    def complete(self) -> JsonDict:
        """Return the choice of a completion; if it hasn't ended, return what exists, with finish reason "aborted"."""
        # Check before reading: the decode thread may end the generation in between.
        ended = self.ended()
        sampled, deltas = self.read(final=True)
        reason = self.finish_reason() if ended else "aborted"
        return {**self.tokens(sampled), "message": message(deltas), "finish_reason": reason}

    def finish_reason(self) -> str | None:
        reason = self.generation.finish_reason
        named = self._request.shape is not None and self._request.shape.named
        return "tool_calls" if reason == "stop" and self._answer.calls and not named else reason

    def tokens(self, sampled: list[Sampled]) -> JsonDict:
        """Return a choice's token fields for ``sampled``, the last tokens that were read."""
        fields: JsonDict = {
            "index": self.index,
            "logprobs": {"content": [self._logprob(s) for s in sampled]} if self._request.logprobs else None,
            "token_ids": [s.token for s in sampled],
            "token_logprobs": [s.logprob for s in sampled],
        }
        forced = [position for position, s in enumerate(sampled, self._read - len(sampled)) if s.forced]
        return fields | {"forced": forced} if forced else fields

    def _logprob(self, sampled: Sampled) -> JsonDict:
        entry = self._token(sampled.token, sampled.logprob)
        return {**entry, "top_logprobs": [self._token(token, logprob) for token, logprob in sampled.top]}

    def _token(self, token: int, logprob: float) -> JsonDict:
        text = self._chat.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def chunk(self, sampled: list[Sampled], delta: JsonDict, finish_reason: str | None = None) -> JsonDict:
        """Return the choice of one chunk."""
        return {**self.tokens(sampled), "delta": delta, "finish_reason": finish_reason}


class _Running:
    """A request that is being answered."""

    def __init__(
        self, request: ChatRequest, prompt: list[int], choices: list[_Choice], changed: asyncio.Event, version: int
    ) -> None:
        self.request, self.prompt, self.choices = request, prompt, choices
        self._changed, self._version = changed, version
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    async def wait(self) -> None:
        """Wait until something has been sampled or has ended since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def head(self, kind: str) -> JsonDict:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.request.model}

    def prompt_fields(self) -> JsonDict:
        """Return the prompt's ids and the policy's version."""
        return {"prompt_token_ids": self.prompt, "policy_version": self._version}

    def usage(self) -> JsonDict:
        completion = sum(len(choice.generation.sampled) for choice in self.choices)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt) + completion,
            "prompt_tokens_details": {"cached_tokens": self.choices[0].generation.cached_tokens},
        }


def _stop_check(chat: Chat, stop: tuple[str, ...]) -> Callable[[list[Sampled]], bool] | None:
    if not stop:
        return None
    window = max(len(text.encode(errors="surrogatepass")) for text in stop) + STOP_WINDOW

    def is_stopped(sampled: list[Sampled]) -> bool:
        tail = chat.decode([s.token for s in sampled[-window:]])
        return any(text in tail for text in stop)

    return is_stopped
