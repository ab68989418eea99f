"""Samples on a server: renders prompts and reads answers here, as the embedded engine does."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

import tinker
from tinker import types

from art_core import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.learner.pretrained import load_config, load_generation_config, load_tokenizer, positions
from art_core.plugin_api import describe_error, in_thread
from art_core.types import JsonDict, Upstream, Weights
from art_embedded.chat import Chat
from art_embedded.chat_engine import ChatEngine
from art_embedded.formats import find_formats
from art_embedded.formats.thinking import Place
from art_embedded.loading import stop_ids
from art_embedded.parsers import extend_template
from art_embedded.requests import Shape, refuse
from art_embedded.sampling import Sampled
from art_embedded.scheduler import Generation
from art_embedded.version import Version
from art_tinker.service import address, begin, sampler_path, status_of, wait

log = logging.getLogger("art_core.engine")


class TinkerEngine(ChatEngine):
    """Serves ``model_folder`` (a name that the server knows) and the adapters that the learner trains on it.

    The tokenizer is loaded here, from a folder or hub of that name. Every version is served until it is retired.
    """

    loads_files = True

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        super().__init__(config)
        self._folder = model_folder
        self._service = tinker.ServiceClient()
        self._samplers: dict[int, tinker.SamplingClient] = {}
        self._stop_ids: list[int] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By the id of the generation."""
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "sampled_tokens": 0}
        self._warned = False

    async def start(self) -> None:
        """Load the tokenizer and ask the server for the model. Raises ConfigError if it doesn't have it."""
        await in_thread(self._load_tokenizer)
        await self._serve(0, base_model=self._folder)

    def _load_tokenizer(self) -> None:
        tokenizer, config = load_tokenizer(self._folder), load_config(self._folder)
        self.formats = find_formats(self._folder, self._config)
        extend_template(tokenizer, self._folder, self._config.tool_format)
        ends = stop_ids(load_generation_config(self._folder), tokenizer.eos_token_id)
        self._stop_ids = sorted(ends)
        self._chat = Chat(tokenizer, ends, self.formats)
        self.vocab_size = config.get_text_config().vocab_size
        self.max_context = min(self._config.max_context or positions(config) or 4096, self._server_context())

    def _server_context(self) -> int:
        """Return the most tokens that the server takes for this model, if it says so. Raises ConfigError if it lacks it."""
        models = wait(begin(self._service.get_server_capabilities), "list its models").supported_models
        limits = {it.model_name: it.max_context_length for it in models}
        if self._folder not in limits:
            raise ConfigError(f"{address()} doesn't serve {self._folder}; it serves {', '.join(map(str, limits))}")
        return limits[self._folder] or sys.maxsize

    async def _serve(self, version: int, **weights: str) -> None:
        create = partial(self._service.create_sampling_client, **weights)
        what = f"serve {', '.join(weights.values())}"
        self._samplers[version] = await in_thread(lambda: wait(begin(create), what))

    async def load(self, weights: Weights) -> None:
        """Serve what a learner published in ``weights.path``. Raises ConfigError if that isn't on the server.

        Version 0 is the base model, whose adapter changes nothing, so it is served already.
        """
        if weights.path is None:
            raise ConfigError(
                f"version {weights.version} of the weights has no folder; engine='tinker' needs learner='tinker'"
            )
        if weights.version:
            await self._serve(weights.version, model_path=sampler_path(weights.path))
        self._version = weights.version

    def overlaps(self, weights: Weights) -> bool:
        return True

    def keeps_start(self) -> bool:
        return True

    def at(self, version: int) -> Upstream:
        """Return an upstream that answers with the weights of ``version``."""
        return Version(self, version)

    async def retire(self, version: int) -> None:
        """Forget a version; version 0, the base model, stays."""
        if version:
            self._samplers.pop(version, None)

    async def stop(self) -> None:
        """End the session; running requests fail."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._service.holder.close()

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob of every token except the first, as in ``EngineBase.score``."""
        sampler, prompt = self._samplers[self._version], types.ModelInput.from_ints(list(ids))
        logprobs = await in_thread(lambda: wait(sampler.compute_logprobs(prompt), "compute logprobs"))
        # Some servers have one for the first token too: None.
        return [math.nan if it is None else it for it in logprobs[len(logprobs) - len(ids) + 1 :]]

    async def counters(self) -> dict[str, float]:
        """Return the totals since ``start``, as in ``EngineBase.counters``."""
        return {name: float(count) for name, count in self._counts.items()}

    async def answer(self, request: JsonDict, version: int) -> JsonDict:
        return await super().answer(request, self._current(version)) | {"logprobs_temperature": 1.0}

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        async with aclosing(super().chunks(request, self._current(version))) as chunks:
            async for chunk in chunks:
                yield chunk | {"logprobs_temperature": 1.0}

    def _current(self, version: int) -> int:
        return version if version in self._samplers else self._version

    def _submit(self, generations: Sequence[Generation], version: int) -> None:
        for generation in generations:
            if generation.draw.top_logprobs:
                raise refuse("a Tinker server reports no alternatives to a sampled token; omit top_logprobs")
            sampler = self._samplers[self._current(version)]
            self._tasks[id(generation)] = asyncio.create_task(self._generate(generation, sampler))

    def _end(self, generations: Sequence[Generation]) -> None:
        super()._end(generations)
        for generation in generations:
            if task := self._tasks.pop(id(generation), None):
                task.cancel()

    def _grammar(self, shape: Shape, place: Place) -> None:
        """Ignore, with a warning, what a server without grammars can't enforce; refuse what the agent relies on."""
        if shape.required or shape.content is not None:
            raise refuse(
                "a Tinker server samples without a grammar, so it can't force a call (tool_choice) or a response_format; use "
                "tool_choice='auto' and read the text, or serve the policy with engine='vllm'"
            )
        if not self._warned:
            self._warned = True
            log.warning("strict tools and parallel_tool_calls=False are not enforced: a Tinker server has no grammars")

    async def _generate(self, generation: Generation, sampler: tinker.SamplingClient) -> None:
        try:
            async with asyncio.timeout(self._config.call_timeout):
                prompt = types.ModelInput.from_ints(generation.prompt)
                self._read(generation, await sampler.sample_async(prompt, 1, self._parameters(generation)))
        except TimeoutError:
            generation.error = UpstreamError(f"{address()} sent no answer in time", status=504)
        except asyncio.CancelledError:
            generation.error = UpstreamError("the engine was stopped", status=503)
        except Exception as error:  # noqa: BLE001 - whatever happens, somebody waits for this answer
            status = status_of(error)
            # A key or an account that the server refuses isn't the agent's.
            passed_on = status if status >= 400 and status not in (401, 402, 403) else 502
            generation.error = UpstreamError(f"{address()}: {describe_error(error)}", status=passed_on)
        finally:
            generation.changed.set()

    def _parameters(self, generation: Generation) -> types.SamplingParams:
        draw = generation.draw
        return types.SamplingParams(
            max_tokens=generation.max_tokens, seed=draw.random.getrandbits(31), stop=self._stop_ids,
            temperature=draw.temperature, top_k=draw.top_k or -1, top_p=draw.top_p,
        )  # fmt: skip

    def _read(self, generation: Generation, answer: types.SampleResponse) -> None:
        """Give the generation its tokens, up to a stop string of the request: the server samples on after it."""
        [sequence] = answer.sequences
        assert sequence.logprobs is not None
        generation.cached_tokens = answer.prompt_cache_hit_tokens
        self._counts["prompt_tokens"] += len(generation.prompt)
        self._counts["cached_tokens"] += answer.prompt_cache_hit_tokens
        self._counts["sampled_tokens"] += len(sequence.tokens)
        reason = sequence.stop_reason
        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
            generation.sampled.append(Sampled(token, logprob))
            if generation.is_stopped is not None and generation.is_stopped(generation.sampled):
                reason = "stop"
                break
        generation.finish_reason = reason
