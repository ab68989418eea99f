"""Serves the policy from a vLLM server of its own: starts it, and brings it back with what it served when it dies.

Knows nothing about HTTP or command lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TypeVar

from art_core.capture.upstream import UNREACHABLE
from art_core.config import TrainConfig
from art_core.errors import ArtError, ConfigError, UpstreamError
from art_core.types import JsonDict, Weights
from art_vllm import command_line
from art_vllm import environment as environments
from art_vllm.address import AddressEngine
from art_vllm.process import Server

T = TypeVar("T")

RESTARTS, WITHIN = 3, 600.0
"""How often it is brought back within so many seconds; then requests fail."""
TRIES = 3
"""Of one request: one that ends the server each time must not do so for ever."""
DYING_SECONDS = 30.0
"""How long a server that says it is ill may take to end by itself."""

log = logging.getLogger("art_core.engine")


class VllmEngine(AddressEngine):
    """``engine="vllm"``: ``python -m vllm.entrypoints.openai.api_server`` in a process of its own.

    Where the server dies it is started again with the weights that it served; requests that were in flight are asked
    again where their client has got nothing yet, others wait. ``engine_args`` override its options.
    """

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        super().__init__(model_folder, config, base_url="http://127.0.0.1/v1")
        self._model_folder = model_folder
        self._salt = None  # a server of our own has no other users
        self._log_file: Path | None = None
        self._whole: Path | None = None
        """Of the model's weights, where they are not the start's."""
        self._running = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._failure: ArtError | None = None
        self._deaths: deque[float] = deque(maxlen=RESTARTS)
        self._watching: asyncio.Task[None] | None = None
        self._counted: dict[str, float] = {}
        """By servers that have died."""
        self._counting: dict[str, float] = {}
        """By this one, when last asked."""

    def begin(self, run_dir: Path) -> None:
        """Write the server's log to ``vllm.log`` there."""
        self._log_file = run_dir / "vllm.log"

    async def start(self) -> None:
        """Start the server and wait until it answers. ConfigError where it does not come up."""
        if self._log_file is None:
            self._log_file = Path(tempfile.mkdtemp(prefix="art-vllm-")) / "vllm.log"
        found = await asyncio.to_thread(environments.find)
        chosen = command_line.options(self._model_folder, self.config, cuda=found.cuda)
        self._base, self._sleeps = chosen["served-model-name"], bool(chosen.get("enable-sleep-mode"))
        self._cuda = found.cuda
        if not found.cuda:
            self._reload = command_line.CPU_RELOAD
        self._command = [found.python, "-m", "vllm.entrypoints.openai.api_server", *command_line.arguments(chosen)]
        self._variables = command_line.environment(self._model_folder, cuda=found.cuda, own=found.own)
        log.info(
            "formats of the model: %s for tool calls, %s for thinking (tool_parser=, reasoning_parser= change them)",
            chosen.get("tool-call-parser") or "none", chosen.get("reasoning-parser") or "none",
        )  # fmt: skip
        log.info("vLLM %s of %s: %s", found.version, found.python, " ".join(command_line.arguments(chosen)))
        await self._serve()
        self._watching = asyncio.create_task(self._watch())

    async def _serve(self) -> None:
        self._server = Server(self._command, self._variables, self._log_file, self.config.call_timeout)
        self._client = self._server.client
        try:
            await self._server.start()
            _, self._context = await self._client.base_model()
            await self._serve_again()
        except BaseException:
            await self._server.stop()
            raise
        self._running.set()

    async def _serve_again(self) -> None:
        """Load what the server before this one had."""
        if self._whole is not None:
            await self._client.reload(self._whole, method=self._reload)
        await self._load_adapters()

    async def _load_adapters(self) -> None:
        for version, folder in list(self._adapters.items()):
            if folder.is_dir():
                await self._client.load_adapter(self._adapter_name(version), folder)
            else:  # an old one, of a rollout that was held open for some steps: newer weights answer it
                del self._adapters[version]

    async def stop(self) -> None:
        """End the server, with all that it started."""
        if self._watching is None:
            return
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._server.stop()
        self._failure = UpstreamError("the engine has stopped; start it again", status=503)
        self._running.set()

    async def _watch(self) -> None:
        """Bring the server back whenever it ends."""
        while self._failure is None:
            code = await self._server.ended()
            self._running.clear()
            log.warning("vLLM died (exit code %s); the last errors in its log: %s", code, self._server.last_words())
            await self._server.stop()
            for name, count in self._counting.items():
                self._counted[name] = self._counted.get(name, 0.0) + count
            self._counting = {}
            await self._awake.wait()  # not while the GPU belongs to others
            try:
                await self._restart()
            except ArtError as error:
                self._failure = error
                log.warning("vLLM does not come back: %s", error)
                self._running.set()

    async def _restart(self) -> None:
        why = self._server.last_words()
        while len(self._deaths) < RESTARTS or time.monotonic() - self._deaths[0] > WITHIN:
            self._deaths.append(time.monotonic())
            try:
                await self._serve()
            except ArtError as error:
                why = str(error)
                log.warning("%s", why)
            else:
                return log.warning("vLLM is back; requests that were in flight are sent again")
        raise ConfigError(
            f"vLLM was started again {RESTARTS} times within {WITHIN / 60:.0f} minutes and died each time: "
            f"{why}; where memory was short: engine_args={{'gpu-memory-utilization': 0.4}}, fewer "
            "max_concurrent or a smaller max_context"
        )

    async def lasting(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what ``ask`` answers; where the server dies meanwhile, ask again when it is back."""
        tries = 0
        while True:
            server, tries = await self._up(), tries + 1
            try:
                return await ask()
            except UpstreamError as error:
                if not await self._lost(server, error):
                    raise
                self._check_tries(tries, server, error)

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        """Answer chunk by chunk; ask again where the server dies before the first."""
        begun, tries = False, 0
        while True:
            server, tries = await self._up(), tries + 1
            try:
                async with aclosing(super().chunks(request, version)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except UpstreamError as error:
                if begun or not await self._lost(server, error):
                    raise
                self._check_tries(tries, server, error)

    def _check_tries(self, tries: int, server: Server, error: UpstreamError) -> None:
        if tries == TRIES:
            raise UpstreamError(
                f"vLLM died {TRIES} times while it answered this request: {server.last_words()}", status=502
            ) from error

    async def _up(self) -> Server:
        await self._running.wait()
        if self._failure is not None:
            raise UpstreamError(str(self._failure), status=503) from self._failure
        return self._server

    async def _lost(self, server: Server, error: UpstreamError) -> bool:
        """Say whether a request failed because its server dies; return when it has."""
        if error.status < 500 and error.code != UNREACHABLE:
            return False
        # One that has ended must not be asked: that would open connections which nobody closes.
        if server.exit_code is None and await server.client.healthy():
            return False
        try:
            async with asyncio.timeout(DYING_SECONDS):
                await server.ended()
        except TimeoutError:
            await server.stop()  # not the guard alone: what ignores its death would live on
        if self._server is server and self._failure is None:
            self._running.clear()  # whoever watches the server may not have been told yet
        return True

    async def load(self, weights: Weights) -> None:
        """As in ``AddressEngine``; ConfigError for an adapter that the server was not started for, and for one of experts without
        a GPU, which would end the server."""
        if self.overlaps(weights) and not self.keeps_start():
            raise ConfigError(
                f"the learner trains an adapter ({weights.path}), and vLLM was started for whole weights, the default of "
                "models under 100M parameters; give lora_rank=16"
            )
        if self.overlaps(weights) and not self._cuda:
            adapter = json.loads((weights.path / "adapter_config.json").read_text())
            if adapter.get("target_parameters"):
                raise ConfigError(
                    f"the adapter {weights.path} changes experts ({', '.join(adapter['target_parameters'])}), which vLLM's CPU "
                    "build cannot serve; train whole weights (lora_rank=0), or give engine='embedded'"
                )
        await super().load(weights)
        if not self.overlaps(weights):
            self._whole = weights.path

    async def counters(self) -> Mapping[str, float]:
        """Return the totals of all servers so far; while one is being started, those of before."""
        if self._running.is_set() and self._failure is None:
            with suppress(UpstreamError):
                self._counting = dict(await self._client.counters())
        names = self._counted.keys() | self._counting.keys()
        return {name: self._counted.get(name, 0.0) + self._counting.get(name, 0.0) for name in names}

    async def rest(self) -> None:
        """Leave the GPU to others: the weights go to the machine's memory, what was computed is forgotten. A server that dies
        meanwhile is started again by ``wake``."""
        if self._sleeps:
            await self.lasting(lambda: self._client.sleep())
            self._awake.clear()

    async def wake(self) -> None:
        """Be ready again. Adapters are loaded anew: what a sleeping server keeps of them is not to be relied on."""
        if self._sleeps:
            self._awake.set()
            await self.lasting(self._wake)

    async def _wake(self) -> None:
        await self._client.wake_up()
        await self._load_adapters()
