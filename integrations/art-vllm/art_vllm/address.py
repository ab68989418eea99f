"""Serves the policy from a vLLM server at an address: loads weights, and maps their versions to the server's model names."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from art_core import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.types import EngineBase, JsonDict, Upstream, Weights
from art_embedded.version import Version
from art_vllm import command_line
from art_vllm.client import VllmClient
from art_vllm.unmasked import is_constrained, is_plain, unmask, unmask_stream

T = TypeVar("T")

log = logging.getLogger("art_core.engine")


class AddressEngine(EngineBase):
    """``engine="http://HOST:PORT/v1"``: a server that somebody else runs, on a machine that can read the run folder.

    The base model is version 0. Adapters are served side by side under the name ``policy@VERSION``, with a mark of the run if
    others may use the server. Whole weights replace the previous ones. Answers carry the version that produced them.
    """

    loads_files = True

    def __init__(self, model_folder: str, config: TrainConfig, *, base_url: str) -> None:
        self.config = config
        self._client = VllmClient(base_url, config.call_timeout)
        self._base = ""
        """The base model's name on the server."""
        self._context: int | None = None
        """Tokens of prompt plus answer, if the server reports it."""
        self._reload = "reload_weights"
        """Method of the server's worker that loads whole weights."""
        self._newest = self._whole_version = 0
        """The newest version, and the version of the server's whole weights."""
        self._adapters: dict[int, Path] = {}
        """Version -> folder of each adapter on the server."""
        self._reloading = asyncio.Lock()
        """Held while a lost adapter is reloaded, so that only one of the requests that miss it does so."""
        # Another run may use this server; the salt keeps its adapters and cached prefixes apart from ours.
        self._salt: str | None = uuid.uuid4().hex
        self._keeps_start = command_line.adapter_rank(model_folder, config) > 0

    @property
    def base_url(self) -> str:
        """The server's address; if art started the server, a new one after each restart."""
        return self._client.base_url

    async def start(self) -> None:
        """Get the served model from the server. Raises UpstreamError if it doesn't answer, ConfigError if it lists no models."""
        try:
            self._base, self._context = await self._client.base_model()
        except UpstreamError as error:
            await self._client.stop()
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self.base_url} has no list of models ({error}); pass the address that the vLLM server's clients use: "
                "engine='http://HOST:PORT/v1'"
            ) from error

    async def stop(self) -> None:
        """Unload this run's adapters from the server and close the connections."""
        for version in list(self._adapters):
            await self.retire(version)
        await self._client.stop()

    def at(self, version: int) -> Upstream:
        """Return an upstream that answers with the weights of ``version``."""
        return Version(self, version)

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer with the newest weights."""
        return await self.answer(request, self._newest)

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Answer with the newest weights, chunk by chunk."""
        return self.chunks(request, self._newest)

    async def answer(self, request: JsonDict, version: int) -> JsonDict:
        version, constrained = self._current(version), self._constrained(request)
        answer = await self._with_adapter(version, lambda: self._client.chat(self._prepared(request, version)))
        if constrained:
            await unmask(answer, partial(self._score, version))
        return answer | self._stamp(request, version)

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        version, constrained = self._current(version), self._constrained(request)
        async with aclosing(self._streamed(request, version)) as chunks:
            async for chunk in unmask_stream(chunks, partial(self._score, version)) if constrained else chunks:
                yield chunk | self._stamp(request, version)

    async def _streamed(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        tries = 0
        while True:
            try:
                async with aclosing(self._client.stream(self._prepared(request, version))) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except UpstreamError as error:  # a 404 comes before the first chunk
                tries += 1
                if tries > 1 or not await self._reloaded_adapter(version, error):
                    raise

    async def _with_adapter(self, version: int, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``send``; if the server has lost the adapter of ``version``, reload it and send again."""
        try:
            return await self.lasting(send)
        except UpstreamError as error:
            if not await self._reloaded_adapter(version, error):
                raise
        return await self.lasting(send)

    async def _reloaded_adapter(self, version: int, error: UpstreamError) -> bool:
        """Return whether a request failed for lack of an adapter, after loading it again.

        Whoever runs the server may have restarted it.
        """
        if error.status != 404 or version not in self._adapters:
            return False
        async with self._reloading:
            if version in self._adapters and not await self._client.serves(self._adapter_name(version)):
                log.warning(
                    "%s has lost version %d of the weights (was it restarted?); loading it again",
                    self.base_url,
                    version,
                )
                await self._client.load_adapter(self._adapter_name(version), self._adapters[version])
        return True

    def _current(self, version: int) -> int:
        """Return the version that answers requests for ``version``: whole weights are gone once newer ones are loaded."""
        return version if version in self._adapters or version == self._whole_version else self._newest

    def _constrained(self, request: JsonDict) -> bool:
        """Return whether the answer's logprobs must be corrected. Raises UpstreamError 400 if they can't be."""
        constrained, temperature = is_constrained(request), request.get("temperature")
        if constrained and not self._raw and not is_plain(temperature):
            raise UpstreamError(
                f"vLLM doesn't report logprobs at temperature {temperature} for grammar-constrained answers (tool_choice, "
                "strict tools, response_format), so the call can't be trained; use temperature=1 or engine='embedded'",
                status=400,
            )
        return constrained

    @property
    def _raw(self) -> bool:
        """Whether the server reports logprobs at temperature 1, whatever the sampling temperature."""
        return {self.config.temperature, self.config.max_temperature} <= {None, 1}

    def _stamp(self, request: JsonDict, version: int) -> JsonDict:
        """Return the version that answered, and the logprobs' temperature if it differs from the request's."""
        stamp: JsonDict = {"policy_version": version}
        if self._raw and not is_plain(request.get("temperature")):
            stamp["logprobs_temperature"] = 1.0
        return stamp

    async def lasting(self, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``send``; an engine that restarts its server sends again after a restart."""
        return await send()

    def _prepared(self, request: JsonDict, version: int) -> JsonDict:
        named = {**request, "model": self._name(version), **self._limit(request)}
        return named if self._salt is None else {"cache_salt": self._salt, **named}

    def _limit(self, request: JsonDict) -> JsonDict:
        """Return the answer's token limit: vLLM has no default but the context, and rejects a larger limit."""
        name = "max_tokens" if request.get("max_completion_tokens") is None else "max_completion_tokens"
        requested = request.get(name)
        limit = self.config.max_tokens if requested is None else requested
        too_large = self._context is not None and isinstance(limit, int) and limit > self._context
        return {name: self._context if too_large else limit}

    def _name(self, version: int) -> str:
        return self._adapter_name(version) if version in self._adapters else self._base

    def _adapter_name(self, version: int) -> str:
        return f"policy@{version}" if self._salt is None else f"policy-{self._salt[:6]}@{version}"

    def keeps_start(self) -> bool:
        """Whether version 0 stays available: adapters don't change the start weights."""
        return self._keeps_start

    def overlaps(self, weights: Weights) -> bool:
        """Whether ``weights`` are an adapter: adapters are served side by side."""
        return weights.path is not None and (weights.path / "adapter_config.json").is_file()

    async def load(self, weights: Weights) -> None:
        """Serve the folder of an adapter or model, which must not change until the version is retired.

        Raises ConfigError if the server wasn't started for such weights, UpstreamError if it rejects the files.
        """
        version, folder = weights.version, weights.path
        if folder is None:
            raise ConfigError(
                f"version {version} of the weights has no folder, and vLLM only loads files; save the weights first"
            )
        folder = folder.absolute()
        if self.overlaps(weights):
            await self.lasting(lambda: self._client.load_adapter(self._adapter_name(version), folder))
            self._adapters[version] = folder
        else:
            await self.lasting(lambda: self._client.reload(folder, method=self._reload))
            self._whole_version = version
        self._newest = version

    async def retire(self, version: int) -> None:
        """Unload an adapter; whole weights were already replaced by newer ones. If the server can't be reached, it keeps it."""
        if version in self._adapters:
            try:
                await self.lasting(lambda: self._client.unload_adapter(self._adapter_name(version)))
            except UpstreamError as error:  # the rollout that is closing can't do anything about it
                log.info("version %d of the weights was not unloaded from %s: %s", version, self.base_url, error)
            self._adapters.pop(version, None)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob under the newest weights (nats, temperature 1) of every token except the first."""
        return await self._score(self._newest, ids)

    async def _score(self, version: int, ids: Sequence[int]) -> list[float]:
        return await self._with_adapter(version, lambda: self._client.score(self._name(version), ids))

    async def counters(self) -> Mapping[str, float]:
        """Return the server's totals, including its other users' requests."""
        return await self._client.counters()
