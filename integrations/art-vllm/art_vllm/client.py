"""What a vLLM server answers besides OpenAI's API: adapters, whole weights, prompt logprobs, counters, sleep.

Knows nothing about who runs the server or which version is served when.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from art_core.capture import HttpUpstream
from art_core.capture.upstream import UNREACHABLE
from art_core.errors import ConfigError, UpstreamError
from art_core.types import JsonDict

ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora and --max-lora-rank RANK"
DEVELOPER = "VLLM_SERVER_DEV_MODE=1 in its environment, which must not be reachable by others"
WHOLE = f"{DEVELOPER}; or train an adapter, which needs no such server: lora_rank=16"
COUNTERS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:generation_tokens_total": "sampled_tokens",
}
"""vLLM's names of what ``counters`` returns."""


class VllmClient(HttpUpstream):
    """One server; ``base_url`` is as in ``http://127.0.0.1:8000/v1``. ``ART_UPSTREAM_API_KEY`` is sent where it is set.

    ``timeout`` is that of ``HttpUpstream``.
    """

    def __init__(self, base_url: str, timeout: float | None = 600.0) -> None:
        super().__init__(base_url, api_key=os.environ.get("ART_UPSTREAM_API_KEY"), timeout=timeout)
        self.root = self.base_url.removesuffix("/v1")

    async def base_model(self) -> tuple[str, int | None]:
        """Return the name under which the server serves the model that adapters are for, and its context in tokens."""
        served = (await self.models()).get("data") or [{}]
        whole = [it for it in served if not it.get("parent")] or served
        return str(whole[0].get("id", "")), whole[0].get("max_model_len")

    async def serves(self, name: str) -> bool:
        """Say whether the server has a model or an adapter of this name."""
        return any(it.get("id") == name for it in (await self.models()).get("data") or ())

    async def healthy(self) -> bool:
        """Say whether it answers and its engine lives."""
        try:
            await self._get("/health")
        except UpstreamError:
            return False
        return True

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter in ``folder`` as the model ``name``, in place of one that it has under this name.

        ConfigError where the server was not started for that, UpstreamError where it refuses the files.
        """
        # Not by load_inplace: the adapter is then read from the disk again at every step of the server.
        await self.unload_adapter(name)
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self._tell("/v1/load_lora_adapter", body, needs=ADAPTERS)
        except UpstreamError as error:
            if error.code == UNREACHABLE:
                raise
            if "LoRA is not enabled" in str(error) or "max_lora_rank" in str(error):
                raise ConfigError(
                    f"{self.base_url} cannot serve the adapter {folder} ({error}); start it with {ADAPTERS}, or give a "
                    "lora_rank= that it takes"
                ) from error
            raise UpstreamError(
                f"{self.base_url} does not take the adapter {folder}: {error}. vLLM adapts linear layers of the families "
                "that it supports LoRA for, experts of some; lora_rank=0 trains and serves whole weights",
                status=error.status,
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter ``name``; one that it does not have is forgotten already."""
        try:
            await self._tell("/v1/unload_lora_adapter", {"lora_name": name}, needs=ADAPTERS)
        except UpstreamError as error:
            if error.status != 404:
                raise

    async def reload(self, folder: Path, *, method: str = "reload_weights") -> None:
        """Replace the model's weights by those of a model folder of the same shape, and forget what was computed with the
        old ones. ``method`` is the worker's. No request may be in flight."""
        reload = {"method": method, "kwargs": {"weights_path": str(folder)}}
        await self._tell("/collective_rpc", reload, needs=WHOLE)
        forgotten = await self._tell("/reset_prefix_cache", {}, needs=DEVELOPER)
        if not forgotten.get("success", True):
            raise UpstreamError(
                f"{self.base_url} keeps what it computed with the weights before {folder}; is somebody asking it?"
            )

    async def score(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the logprob (nats, temperature 1) of every token of ``ids`` but the first under ``model``."""
        # vLLM computes such a prompt anew, whatever its prefix cache holds.
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._tell("/v1/completions", body)
        try:
            _, *after = answer["choices"][0]["prompt_logprobs"]
            return [float(at[str(token)]["logprob"]) for token, at in zip(ids[1:], after, strict=True)]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UpstreamError(
                f"{self.base_url} answered without the logprobs of the prompt ({error!r}), so what it serves cannot be "
                "checked; it must be a vLLM server",
                status=502,
            ) from error

    async def counters(self) -> Mapping[str, float]:
        """Return the totals of ``EngineBase.counters`` since the server's start; empty if it has none, 0 for one that it lacks
        among others."""
        totals: dict[str, float] = {}
        for line in (await self._get("/metrics")).splitlines():
            name, _, value = line.rpartition(" ")
            if counter := COUNTERS.get(name.partition("{")[0]):
                totals[counter] = totals.get(counter, 0.0) + float(value)
        return dict.fromkeys(COUNTERS.values(), 0.0) | totals if totals else {}

    async def sleep(self) -> None:
        await self._tell("/sleep?level=1", {}, needs=DEVELOPER)

    async def wake_up(self) -> None:
        await self._tell("/wake_up", {}, needs=DEVELOPER)

    async def _get(self, path: str) -> str:
        return (await self.ask(self.root + path)).decode(errors="replace")

    async def _tell(self, path: str, body: JsonDict, *, needs: str = "") -> JsonDict:
        """Send an order; return its answer, empty where that is no JSON object. ConfigError where the server does not know
        it: ``needs`` says with what it must be started."""
        try:
            content = await self.ask(self.root + path, body)
        except UpstreamError as error:
            if error.status == 404 and "Not Found" in str(error):
                raise ConfigError(f"{self.base_url} has no {path}; start that server (vLLM) with {needs}") from error
            raise
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}
