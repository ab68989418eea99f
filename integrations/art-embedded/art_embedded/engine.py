"""The embedded engine: answers chat-completions requests with a transformers model in this process.

One thread (``scheduler.py``) runs the model. ``grammar.py`` enforces structured output and forced tool calls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from art_core import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.learner.pretrained import fixed_rope_positions, load_tokenizer, positions
from art_core.learner.sizes import SMALL_MODEL
from art_core.plugin_api import cpu, memory
from art_core.types import Weights
from art_embedded.chat import Chat
from art_embedded.chat_engine import ChatEngine
from art_embedded.formats import find_formats
from art_embedded.formats.thinking import Place
from art_embedded.grammar import Grammar, Grammars
from art_embedded.loading import (
    bind,
    load_adapter,
    load_model,
    make_key_values,
    memory_budget,
    place,
    stop_ids,
)
from art_embedded.parsers import extend_template
from art_embedded.requests import Shape, refuse
from art_embedded.scheduler import Generation, Scheduler
from art_embedded.score import MAX_SCORED, score

log = logging.getLogger("art_core.engine")

THREADS = torch.get_num_threads()
"""Of this process, before an engine sets its own: torch gives them to all threads that use it later."""


class EmbeddedEngine(ChatEngine):
    """Serves a causal LM from ``model_folder``, a folder or hub name, with the run's ``config``."""

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        super().__init__(config)
        self._folder = model_folder
        self._scheduler: Scheduler | None = None
        self._grammars: Grammars | None = None
        self._model: PreTrainedModel | None = None
        self._budget = 0
        """Bytes for keys and values, by the memory that was free at the start: later the cache itself takes of it."""
        self._settings = ExitStack()

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
        self.formats = find_formats(self._folder, self._config)
        extend_template(tokenizer, self._folder, self._config.tool_format)
        model = load_model(self._folder)
        small = model.num_parameters() < SMALL_MODEL
        torch.set_num_threads(self._config.threads or (1 if small else THREADS))
        self.max_context = self._context(model)
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        scheduler.stop_ids = stop_ids(model.generation_config, tokenizer.eos_token_id)
        self._chat = Chat(tokenizer, scheduler.stop_ids, self.formats)
        self._grammars = Grammars(tokenizer, scheduler.stop_ids, self.vocab_size, self.formats)
        self._serve(model, scheduler)
        if not small:
            self._settings.enter_context(cpu.onednn_products())

    def _context(self, model: PreTrainedModel) -> int:
        """Return the most tokens of prompt plus answer. Raises ConfigError if ``max_context`` exceeds the model's positions."""
        requested, limit, fixed = self._config.max_context, positions(model.config), fixed_rope_positions(model.config)
        if requested and limit and requested > limit:
            raise ConfigError(
                f"max_context={requested} exceeds the {limit} positions of {self._folder}; pass at most {limit}, or omit it"
            )
        context = requested or limit or 4096
        if fixed is None or context <= fixed:
            return context
        log.warning(
            "max_context is %d instead of %d: in longer contexts the rotary frequencies of %s depend on the longest sequence of "
            "the batch, so concurrent calls would change each other's logprobs; choose another model if you need them",
            fixed, context, self._folder,
        )  # fmt: skip
        return fixed

    def _serve(self, model: PreTrainedModel, scheduler: Scheduler) -> None:
        """Serve a model that has been loaded on the CPU, instead of the old one."""
        self._model = None
        scheduler.drop()
        self._model = place(model)
        key_values = make_key_values(self._model)
        self._budget = self._budget or memory_budget()
        scheduler.set_key_values(key_values, self._budget)

    async def load(self, weights: Weights) -> None:
        """Serve ``weights`` from the next request on: ``live`` tensors without copying, else those in ``path``.

        Raises ConfigError if they don't fit the model.
        """
        scheduler = self._running()
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
        scheduler, tokens = self._running(), list(ids)
        limit = min(MAX_SCORED, self.max_context)
        if not 0 < len(tokens) <= limit:
            raise refuse(f"score takes 1 to {limit} tokens, got {len(tokens)}")
        self._check_vocabulary(tokens)
        return await scheduler.call(lambda: score(scheduler.rows.kv, tokens))

    async def counters(self) -> dict[str, float]:
        """Return the totals since ``start``, as in ``EngineBase.counters``."""
        return {name: float(count) for name, count in self._running().counts.items()}

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

    def _running(self) -> Scheduler:
        if self._scheduler is None:
            raise UpstreamError("the embedded engine hasn't been started; await engine.start() first", status=503)
        return self._scheduler

    def _submit(self, generations: Sequence[Generation], version: int) -> None:
        self._running().submit(generations)

    def _grammar(self, shape: Shape, place: Place) -> Grammar:
        assert self._grammars is not None
        return self._grammars.begin(shape, place)
