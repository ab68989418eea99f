"""Client for a vLLM server: OpenAI's API plus adapters, whole weights, prompt logprobs, counters and sleep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from art_core.capture import HttpUpstream
from art_core.capture.upstream import UNREACHABLE
from art_core.errors import ConfigError, UpstreamError
from art_core.types import JsonDict

NEEDS_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora and --max-lora-rank RANK"
NEEDS_DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment (others must not be able to reach it)"
NEEDS_RELOAD = f"{NEEDS_DEV_MODE}; or train an adapter, which doesn't need this: lora_rank=16"
COUNTERS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:generation_tokens_total": "sampled_tokens",
}
"""vLLM's metric names -> the names that ``counters`` returns."""


class VllmClient(HttpUpstream):
    """A client of one server; ``base_url`` is like ``http://127.0.0.1:8000/v1``, ``timeout`` as in ``HttpUpstream``.

    Sends ``ART_UPSTREAM_API_KEY`` if it is set.
    """

    def __init__(self, base_url: str, timeout: float | None = 600.0) -> None:
        super().__init__(base_url, api_key=os.environ.get("ART_UPSTREAM_API_KEY"), timeout=timeout)
        self.root = self.base_url.removesuffix("/v1")

    async def base_model(self) -> tuple[str, int | None]:
        """Return the served name of the base model, and its context length in tokens."""
        served = (await self.models()).get("data") or [{}]
        base_models = [model for model in served if not model.get("parent")] or served
        return str(base_models[0].get("id", "")), base_models[0].get("max_model_len")

    async def serves(self, name: str) -> bool:
        """Return whether the server has a model or adapter of this name."""
        return any(model.get("id") == name for model in (await self.models()).get("data") or ())

    async def healthy(self) -> bool:
        """Return whether the server answers and its engine is alive."""
        try:
            await self._get("/health")
        except UpstreamError:
            return False
        return True

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter in ``folder`` as the model ``name``, replacing any adapter of that name.

        Raises ConfigError if the server wasn't started with adapters enabled, UpstreamError if it rejects the files.
        """
        # Not load_inplace: with it the server reads the adapter from disk at every step.
        await self.unload_adapter(name)
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self._send_command("/v1/load_lora_adapter", body, needs=NEEDS_ADAPTERS)
        except UpstreamError as error:
            if error.code == UNREACHABLE:
                raise
            if "LoRA is not enabled" in str(error) or "max_lora_rank" in str(error):
                raise ConfigError(
                    f"{self.base_url} can't serve the adapter {folder} ({error}); start it with {NEEDS_ADAPTERS}, or pass a "
                    "lora_rank= that it supports"
                ) from error
            raise UpstreamError(
                f"{self.base_url} rejected the adapter {folder}: {error}. vLLM supports LoRA for the linear layers of some model "
                "families, and for the experts of fewer; lora_rank=0 trains and serves whole weights",
                status=error.status,
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """Unload the adapter ``name``; does nothing if the server doesn't have it."""
        try:
            await self._send_command("/v1/unload_lora_adapter", {"lora_name": name}, needs=NEEDS_ADAPTERS)
        except UpstreamError as error:
            if error.status != 404:
                raise

    async def reload(self, folder: Path, *, method: str = "reload_weights") -> None:
        """Replace the model's weights by those in a model folder of the same shape, and reset the prefix cache.

        ``method`` is the worker's method that loads them. No request may be in flight.
        """
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        await self._send_command("/collective_rpc", body, needs=NEEDS_RELOAD)
        answer = await self._send_command("/reset_prefix_cache", {}, needs=NEEDS_DEV_MODE)
        if not answer.get("success", True):
            raise UpstreamError(
                f"{self.base_url} loaded {folder} but couldn't reset its prefix cache; make sure that no other client uses it"
            )

    async def score(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the logprob under ``model`` (nats, temperature 1) of every token in ``ids`` except the first."""
        # For prompt_logprobs vLLM bypasses its prefix cache.
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._send_command("/v1/completions", body)
        try:
            _, *after = answer["choices"][0]["prompt_logprobs"]
            return [float(at[str(token)]["logprob"]) for token, at in zip(ids[1:], after, strict=True)]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UpstreamError(
                f"{self.base_url} answered without prompt logprobs ({error!r}), so the served weights can't be checked; use "
                "a vLLM server",
                status=502,
            ) from error

    async def counters(self) -> Mapping[str, float]:
        """Return the totals of ``EngineBase.counters`` since the server's start.

        Empty if the server has none of these metrics; 0 for the missing ones if it has some.
        """
        totals: dict[str, float] = {}
        for line in (await self._get("/metrics")).splitlines():
            name, _, value = line.rpartition(" ")
            if counter := COUNTERS.get(name.partition("{")[0]):
                totals[counter] = totals.get(counter, 0.0) + float(value)
        return dict.fromkeys(COUNTERS.values(), 0.0) | totals if totals else {}

    async def sleep(self) -> None:
        await self._send_command("/sleep?level=1", {}, needs=NEEDS_DEV_MODE)

    async def wake_up(self) -> None:
        await self._send_command("/wake_up", {}, needs=NEEDS_DEV_MODE)

    async def _get(self, path: str) -> str:
        return (await self.ask(self.root + path)).decode(errors="replace")

    async def _send_command(self, path: str, body: JsonDict, *, needs: str = "") -> JsonDict:
        """Send a request and return its answer, or {} if that isn't a JSON object.

        Raises ConfigError if the server lacks the endpoint; ``needs`` says how to start it.
        """
        try:
            content = await self.ask(self.root + path, body)
        except UpstreamError as error:
            if error.status == 404 and "Not Found" in str(error):
                raise ConfigError(f"{self.base_url} has no {path}; start that vLLM server with {needs}") from error
            raise
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}
