"""Serves the policy from a vLLM server at an address: which version is asked for under which name, and how it gets there.

Knows nothing about who started the server.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from art_core.config import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.types import EngineBase, JsonDict, Upstream, Weights
from art_vllm import command_line
from art_vllm.client import VllmClient
from art_vllm.unmasked import is_constrained, is_plain, unmask, unmask_stream

T = TypeVar("T")

log = logging.getLogger("art_core.engine")


class AddressEngine(EngineBase):
    """``engine="http://HOST:PORT/v1"``: a server that somebody else runs, on a machine that sees the run's folder.

    The base model is version 0. An adapter is loaded beside the others under the name ``policy@VERSION``, with a mark of the run
    where others may use the server; whole weights replace those before them. Answers carry the version that answered.
    """

    loads_files = True

    def __init__(self, model_folder: str, config: TrainConfig, *, base_url: str) -> None:
        self.config = config
        self._client = VllmClient(base_url, config.call_timeout)
        self._base = ""
        """The base model's name on the server."""
        self._context: int | None = None
        """Tokens of prompt and answer, where the server says."""
        self._reload = "reload_weights"
        """The method of the server's worker that loads whole weights."""
        self._newest = self._whole_version = 0
        """The newest version, and that of the server's whole weights."""
        self._adapters: dict[int, Path] = {}
        """By version, those that the server has."""
        self._bringing_back = asyncio.Lock()
        """Held while an adapter is loaded again that the server has lost: of many requests that miss it one does that."""
        # Another run may use this server: neither its adapters nor what is cached under their names are ours.
        self._salt: str | None = uuid.uuid4().hex
        self._keeps_start = command_line.adapter_rank(model_folder, config) > 0

    @property
    def base_url(self) -> str:
        """The server's; of our own another after each of its deaths."""
        return self._client.base_url

    async def start(self) -> None:
        """Ask the server for its model. Raises UpstreamError where it does not answer."""
        try:
            self._base, self._context = await self._client.base_model()
        except UpstreamError as error:
            await self._client.stop()
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self.base_url} has no list of models ({error}); give the address of a vLLM server as its clients "
                "use it: engine='http://HOST:PORT/v1'"
            ) from error

    async def stop(self) -> None:
        """Take our adapters off the server, and close the connections."""
        for version in list(self._adapters):
            await self.retire(version)
        await self._client.stop()

    def at(self, version: int) -> Upstream:
        """Return what answers with the weights of ``version``."""
        return _Policy(self, version)

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer with the newest weights."""
        return await self.answer(request, self._newest)

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Answer with the newest weights, chunk by chunk."""
        return self.chunks(request, self._newest)

    async def answer(self, request: JsonDict, version: int) -> JsonDict:
        version, constrained = self._current(version), self._constrained(request)
        answer = await self._there(version, lambda: self._client.chat(self._asking(request, version)))
        if constrained:
            await unmask(answer, partial(self._score, version))
        return answer | self._of(request, version)

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        version, constrained = self._current(version), self._constrained(request)
        async with aclosing(self._streamed(request, version)) as chunks:
            async for chunk in unmask_stream(chunks, partial(self._score, version)) if constrained else chunks:
                yield chunk | self._of(request, version)

    async def _streamed(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        tries = 0
        while True:
            try:
                async with aclosing(self._client.stream(self._asking(request, version))) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except UpstreamError as error:  # a 404 comes before the first chunk
                tries += 1
                if tries > 1 or not await self._lost_adapter(version, error):
                    raise

    async def _there(self, version: int, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what ``ask`` answers; where the server has lost the adapter of ``version``, ask again when it has it."""
        try:
            return await self.lasting(ask)
        except UpstreamError as error:
            if not await self._lost_adapter(version, error):
                raise
        return await self.lasting(ask)

    async def _lost_adapter(self, version: int, error: UpstreamError) -> bool:
        """Say whether a request was refused because the server, which others may start anew, has an adapter no more; load it
        again then."""
        if error.status != 404 or version not in self._adapters:
            return False
        async with self._bringing_back:
            if version in self._adapters and not await self._client.serves(self._adapter_name(version)):
                log.warning("%s has lost version %d of the weights (was it started anew?)", self.base_url, version)
                await self._client.load_adapter(self._adapter_name(version), self._adapters[version])
        return True

    def _current(self, version: int) -> int:
        """Return the version that answers who asks for ``version``: whole weights are gone when the next have come."""
        return version if version in self._adapters or version == self._whole_version else self._newest

    def _constrained(self, request: JsonDict) -> bool:
        """Say whether the answer's logprobs must be put right; UpstreamError 400 where that cannot be done."""
        constrained, temperature = is_constrained(request), request.get("temperature")
        if constrained and not self._raw and not is_plain(temperature):
            raise UpstreamError(
                f"vLLM tells no logprobs at temperature {temperature} of an answer that a grammar constrains (tool_choice, "
                "strict tools, response_format), so the call cannot be trained; use temperature=1 or engine='embedded'",
                status=400,
            )
        return constrained

    @property
    def _raw(self) -> bool:
        """Whether logprobs are those at temperature 1, whatever is sampled at."""
        return self.config.temperature == 1

    def _of(self, request: JsonDict, version: int) -> JsonDict:
        """Return which weights answered, and what the logprobs are of where that is not the request's temperature."""
        stamp: JsonDict = {"policy_version": version}
        if self._raw and not is_plain(request.get("temperature")):
            stamp["logprobs_temperature"] = 1.0
        return stamp

    async def lasting(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what ``ask`` answers; an engine that can bring its server back asks again then."""
        return await ask()

    def _asking(self, request: JsonDict, version: int) -> JsonDict:
        named = {**request, "model": self._name(version), **self._limit(request)}
        return named if self._salt is None else {"cache_salt": self._salt, **named}

    def _limit(self, request: JsonDict) -> JsonDict:
        """Return the answer's limit in tokens: vLLM has none of its own but the context, and refuses one beyond that."""
        name = "max_tokens" if request.get("max_completion_tokens") is None else "max_completion_tokens"
        asked = request.get(name)
        limit = self.config.max_tokens if asked is None else asked
        beyond = self._context is not None and isinstance(limit, int) and limit > self._context
        return {name: self._context if beyond else limit}

    def _name(self, version: int) -> str:
        return self._adapter_name(version) if version in self._adapters else self._base

    def _adapter_name(self, version: int) -> str:
        return f"policy@{version}" if self._salt is None else f"policy-{self._salt[:6]}@{version}"

    def keeps_start(self) -> bool:
        """Whether version 0 is served all the time: adapters leave the start weights as they are."""
        return self._keeps_start

    def overlaps(self, weights: Weights) -> bool:
        """Whether these are an adapter: those are served side by side."""
        return weights.path is not None and (weights.path / "adapter_config.json").is_file()

    async def load(self, weights: Weights) -> None:
        """Serve an adapter's or a model's folder, which must stay as it is until the version is retired.

        Raises ConfigError where the server was not started for that, UpstreamError where it refuses the files.
        """
        version, folder = weights.version, weights.path
        if folder is None:
            raise ConfigError(f"version {version} of the weights has no folder; vLLM loads files only")
        folder = folder.absolute()
        if self.overlaps(weights):
            await self.lasting(lambda: self._client.load_adapter(self._adapter_name(version), folder))
            self._adapters[version] = folder
        else:
            await self.lasting(lambda: self._client.reload(folder, method=self._reload))
            self._whole_version = version
        self._newest = version

    async def retire(self, version: int) -> None:
        """Forget an adapter; whole weights were forgotten when the next came. A server that cannot be told keeps it."""
        if version in self._adapters:
            try:
                await self.lasting(lambda: self._client.unload_adapter(self._adapter_name(version)))
            except UpstreamError as error:  # of no use to whoever closes a rollout
                log.info("version %d of the weights was not taken off %s: %s", version, self.base_url, error)
            self._adapters.pop(version, None)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob (nats, temperature 1) of every token but the first under the newest weights."""
        return await self._score(self._newest, ids)

    async def _score(self, version: int, ids: Sequence[int]) -> list[float]:
        return await self._there(version, lambda: self._client.score(self._name(version), ids))

    async def counters(self) -> Mapping[str, float]:
        """Return the server's totals; other users of the server are counted too."""
        return await self._client.counters()


class _Policy:
    """One version of what an engine serves."""

    def __init__(self, engine: AddressEngine, version: int) -> None:
        self._engine, self._version = engine, version

    async def chat(self, request: JsonDict) -> JsonDict:
        return await self._engine.answer(request, self._version)

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        return self._engine.chunks(request, self._version)
