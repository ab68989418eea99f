"""The embedded engine: answers chat-completions requests with a transformers model in this process.

The event loop renders prompts and builds answers; one thread (``scheduler.py``) runs the model. ``grammar.py`` enforces
structured output and forced tool calls.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress

import torch
from transformers import PreTrainedModel

from art_core import TrainConfig
from art_core.errors import TOO_LONG, ConfigError, UpstreamError
from art_core.learner.pretrained import load_tokenizer, positions
from art_core.learner.sizes import SMALL_MODEL
from art_core.plugin_api import cpu, memory
from art_core.types import EngineBase, JsonDict, Weights
from art_embedded.answer import Answer, message
from art_embedded.chat import Chat, Detokenizer
from art_embedded.formats import HERMES, find_formats
from art_embedded.formats.thinking import Place
from art_embedded.grammar import Grammars
from art_embedded.loading import bind, load_adapter, load_model, make_key_values, memory_budget, stop_ids
from art_embedded.parsers import extend_template
from art_embedded.requests import ChatRequest, parse, refuse
from art_embedded.sampling import Draw, Sampled
from art_embedded.scheduler import Generation, Scheduler
from art_embedded.score import MAX_SCORED, score

THREADS = torch.get_num_threads()
"""Of this process, before an engine sets its own: torch gives them to all threads that use it later."""
STOP_WINDOW = 8
"""Tokens that are decoded to search for a stop string, in addition to one per character of it."""


class EmbeddedEngine(EngineBase):
    """Serves a causal LM from ``model_folder``, a folder or hub name, with the run's ``config``."""

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        self._folder = model_folder
        self._config = config
        self._version = 0
        self._requests = 0
        self._scheduler: Scheduler | None = None
        self._chat: Chat | None = None
        self._formats = HERMES
        self._grammars: Grammars | None = None
        self._model: PreTrainedModel | None = None
        self._settings = ExitStack()
        self.max_context = 0
        """Most tokens of prompt plus answer; set by ``start``."""

    async def start(self) -> None:
        """Load tokenizer and model. Raises ConfigError if the folder has no causal LM, or a setting is invalid."""
        scheduler = Scheduler(max_rows=2 * self._config.max_concurrent)
        try:
            await scheduler.call(lambda: self._open(scheduler))
        except BaseException:
            await scheduler.stop()
            raise
        self._scheduler = scheduler

    def _open(self, scheduler: Scheduler) -> None:
        tokenizer = load_tokenizer(self._folder)
        # After the tokenizer, because loading it downloads a hub model's chat template.
        self._formats = find_formats(self._folder, self._config)
        extend_template(tokenizer, self._folder, self._config.tool_format)
        model = load_model(self._folder)
        small = model.num_parameters() < SMALL_MODEL
        torch.set_num_threads(self._config.threads or (1 if small else THREADS))
        limit = positions(model.config)
        if self._config.max_context and limit and self._config.max_context > limit:
            raise ConfigError(
                f"max_context={self._config.max_context} exceeds the {limit} positions of {self._folder}; "
                f"pass at most {limit}, or omit it"
            )
        self.max_context = self._config.max_context or limit or 4096
        scheduler.stop_ids = stop_ids(model.generation_config, tokenizer.eos_token_id)
        self._chat = Chat(tokenizer, scheduler.stop_ids, self._formats)
        self._grammars = Grammars(tokenizer, scheduler.stop_ids, _vocab_size(model), self._formats)
        self._serve(model, scheduler)
        if not small:
            self._settings.enter_context(cpu.onednn_products())

    def _serve(self, model: PreTrainedModel, scheduler: Scheduler) -> None:
        self._model = model
        scheduler.set_key_values(make_key_values(model), memory_budget())

    async def load(self, weights: Weights) -> None:
        """Serve ``weights`` from the next request on: ``live`` tensors without copying, else those in ``path``.

        Raises ConfigError if they don't fit the model.
        """
        scheduler = self._started()
        await scheduler.call(lambda: self._load(weights, scheduler))

    def _load(self, weights: Weights, scheduler: Scheduler) -> None:
        if weights.live is not None:
            assert self._model is not None
            bind(self._model, weights.live)
            scheduler.forget()
        elif weights.path is None:
            raise ConfigError(
                f"version {weights.version} of the weights has neither live tensors nor a folder; pass live= or path="
            )
        elif (weights.path / "adapter_config.json").is_file():
            self._serve(load_adapter(self._folder, weights.path), scheduler)
        else:
            self._serve(load_model(str(weights.path)), scheduler)
        self._version = weights.version
        memory.return_freed_memory()

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob of every token except the first, as in ``EngineBase.score``; waits for running answers to end.

        Raises UpstreamError 400 for no tokens, more than 4096, or an unknown token id.
        """
        scheduler, tokens = self._started(), list(ids)
        limit = min(MAX_SCORED, self.max_context)
        if not 0 < len(tokens) <= limit:
            raise refuse(f"score takes 1 to {limit} tokens, got {len(tokens)}")
        self._check_vocabulary(tokens)
        return await scheduler.call(lambda: score(scheduler.rows.kv, tokens))

    async def counters(self) -> dict[str, float]:
        """Return the totals since ``start``, as in ``EngineBase.counters``."""
        return {name: float(count) for name, count in self._started().counts.items()}

    async def stop(self) -> None:
        """Stop the decode thread; running requests fail. A second call does nothing."""
        if self._scheduler is not None:
            await self._scheduler.stop()
        self._settings.close()

    def close(self) -> None:
        """Like ``stop``, but without an event loop: for the exit of the process."""
        if self._scheduler is not None:
            self._scheduler.close()
        self._settings.close()

    def _started(self) -> Scheduler:
        if self._scheduler is None:
            raise UpstreamError("the embedded engine hasn't been started; await engine.start() first", status=503)
        return self._scheduler

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a chat-completions request, as in ``Upstream``; if cancelled, return what was sampled so far."""
        async with self._sample(request, streaming=False) as running:
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

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Answer with chunks, as in ``Upstream``. Closing the iterator stops the sampling."""
        async with self._sample(request, streaming=True) as running:
            head = running.head("chat.completion.chunk")
            for choice in running.choices:
                first = running.prompt_fields() if choice is running.choices[0] else {}
                yield {**head, **first, "choices": [choice.chunk([], {"role": "assistant", "content": ""})]}
            open_choices = list(running.choices)
            while open_choices:
                await running.wait()
                for choice in list(open_choices):
                    ended = choice.ended()
                    fresh, deltas = choice.read()
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
    async def _sample(self, body: JsonDict, *, streaming: bool) -> AsyncIterator[_Running]:
        """Start sampling the answers to ``body``; cancel those that still run when the block ends."""
        scheduler = self._started()
        running = await self._prepare(body, streaming)
        scheduler.submit([choice.generation for choice in running.choices])
        try:
            yield running
        finally:
            for choice in running.choices:
                choice.generation.cancelled = True

    async def _prepare(self, body: JsonDict, streaming: bool) -> _Running:
        assert self._chat is not None and self._grammars is not None
        request = parse(body, self._config.max_tokens)
        draws = [self._draw(request, index) for index in range(request.n)]
        text, prompt = self._prompt(request, self._chat)
        thinking = self._formats.thinking
        # The answer to a raw completion isn't split into thinking and content.
        place: Place = "after" if thinking is None or text is None else thinking.place(text)
        if request.shape is not None:
            grammar = await asyncio.to_thread(self._grammars.begin, request.shape, place)
            for draw in draws:
                draw.grammar = grammar.copy()
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        max_tokens = min(request.max_tokens, self.max_context - len(prompt))
        stop_check = _stop_check(self._chat, request.stop)
        generations = [Generation(prompt, max_tokens, draw, loop, changed, streaming, stop_check) for draw in draws]
        choices = [
            _Choice(index, each, request, self._chat, text, self._answer(request, place))
            for index, each in enumerate(generations)
        ]
        return _Running(request, prompt, choices, changed, self._version)

    def _answer(self, request: ChatRequest, place: Place) -> Answer:
        return Answer(
            tools=bool(request.tools),
            stop=request.stop,
            formats=self._formats,
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
        vocab_size = _vocab_size(self._model)
        if unknown := [token for token in ids if not 0 <= token < vocab_size]:
            raise refuse(f"token id {unknown[0]} is out of range; the model's ids are 0 to {vocab_size - 1}")

    def _draw(self, request: ChatRequest, index: int) -> Draw:
        self._requests += 1
        # The version is included because a resumed run counts its requests from 0 and would repeat the first step's draws.
        default = f"{self._config.seed}/{self._version}/{self._requests}"
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

    def read(self, *, final: bool = False) -> tuple[list[Sampled], list[JsonDict]]:
        """Return the deltas that can be sent now, and the tokens to send with the first of them.

        With ``final``, return everything sampled so far, even if more is to come.
        """
        ended = self.ended() or final
        new = self.generation.sampled[self._read :]
        self._read += len(new)
        text = self._detokenizer.feed([sampled.token for sampled in new], final=ended)
        deltas = self._answer.feed(text, final=ended)
        self._unsent += new
        if not deltas and not ended:
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


def _vocab_size(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _stop_check(chat: Chat, stop: tuple[str, ...]) -> Callable[[list[Sampled]], bool] | None:
    if not stop:
        return None
    window = max(len(text) for text in stop) + STOP_WINDOW

    def is_stopped(sampled: list[Sampled]) -> bool:
        tail = chat.decode([s.token for s in sampled[-window:]])
        return any(text in tail for text in stop)

    return is_stopped
