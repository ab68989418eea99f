"""Serves the policy from its own vLLM server, and restarts the server with the weights it served if it dies."""

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

from art_core import TrainConfig
from art_core.capture.upstream import UNREACHABLE
from art_core.errors import ArtError, ConfigError, UpstreamError
from art_core.types import JsonDict, Weights
from art_embedded.tool_format import MARK
from art_vllm import command_line
from art_vllm import environment as environments
from art_vllm.address import AddressEngine
from art_vllm.process import Server

T = TypeVar("T")

MAX_RESTARTS, RESTART_WINDOW = 3, 600.0
"""Most restarts within so many seconds; after that, requests fail."""
MAX_TRIES = 3
"""Tries of one request, so that a request that crashes the server can't do so forever."""
DYING_SECONDS = 30.0
"""Seconds that an unhealthy server has to exit by itself."""

log = logging.getLogger("art_core.engine")


class VllmEngine(AddressEngine):
    """``engine="vllm"``: ``python -m vllm.entrypoints.openai.api_server`` in a separate process.

    If the server dies, it is restarted with the weights that it served. Requests in flight are sent again unless their client
    has already received something; new requests wait. ``engine_args`` overrides the server's options.
    """

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        super().__init__(model_folder, config, base_url="http://127.0.0.1/v1")
        self._model_folder = model_folder
        self._salt = None  # our own server has no other users
        self._log_file: Path | None = None
        self._whole_weights: Path | None = None
        """Folder of the whole weights that replaced the start weights."""
        self._running = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._failure: ArtError | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._watching: asyncio.Task[None] | None = None
        self._past_counters: dict[str, float] = {}
        """Totals of the servers that have died."""
        self._last_counters: dict[str, float] = {}
        """The current server's totals at the last query."""

    def begin(self, run_dir: Path) -> None:
        """Set the server's log file: ``vllm.log`` in ``run_dir``."""
        self._log_file = run_dir / "vllm.log"

    async def start(self) -> None:
        """Start the server and wait until it is ready. Raises ConfigError if it exits during startup."""
        if self._log_file is None:
            self._log_file = Path(tempfile.mkdtemp(prefix="art-vllm-")) / "vllm.log"
        vllm = await asyncio.to_thread(environments.find)
        options = command_line.options(self._model_folder, self.config, cuda=vllm.cuda)
        self._base, self._sleeps = options["served-model-name"], bool(options.get("enable-sleep-mode"))
        self._cuda = vllm.cuda
        if not vllm.cuda:
            self._reload = command_line.CPU_RELOAD
        if (template := options["chat-template"]) and template.startswith(MARK):  # else engine_args names a file
            options["chat-template"] = str(self._log_file.with_name("chat_template.jinja"))
            Path(options["chat-template"]).write_text(template, encoding="utf-8")
        arguments = command_line.arguments(options)
        self._command = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._variables = command_line.environment(self._model_folder, cuda=vllm.cuda, own=vllm.own)
        log.info(
            "model formats: %s for tool calls, %s for thinking (change them with tool_parser=, reasoning_parser=)",
            options.get("tool-call-parser") or "none", options.get("reasoning-parser") or "none",
        )  # fmt: skip
        log.info("vLLM %s (%s): %s", vllm.version, vllm.python, " ".join(arguments))
        await self._serve()
        self._watching = asyncio.create_task(self._watch())

    async def _serve(self) -> None:
        self._server = Server(self._command, self._variables, self._log_file, self.config.call_timeout)
        self._client = self._server.client
        try:
            await self._server.start()
            _, self._context = await self._client.base_model()
            await self._restore_weights()
        except BaseException:
            await self._server.stop()
            raise
        self._running.set()

    async def _restore_weights(self) -> None:
        """Load the weights that the previous server had."""
        if self._whole_weights is not None:
            await self._client.reload(self._whole_weights, method=self._reload)
        await self._load_adapters()

    async def _load_adapters(self) -> None:
        for version, folder in list(self._adapters.items()):
            if folder.is_dir():
                await self._client.load_adapter(self._adapter_name(version), folder)
            else:  # an old version, kept for a rollout that stayed open for several steps: newer weights answer it
                del self._adapters[version]

    async def stop(self) -> None:
        """Stop the server and all its child processes."""
        if self._watching is None:
            return
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._server.stop()
        self._failure = UpstreamError(
            "the vLLM engine has been stopped; call start() before sending requests", status=503
        )
        self._running.set()

    async def _watch(self) -> None:
        """Restart the server whenever it exits."""
        while self._failure is None:
            code = await self._server.ended()
            self._running.clear()
            log.warning("vLLM died (exit code %s); last errors in its log: %s", code, self._server.last_errors())
            await self._server.stop()
            for name, count in self._last_counters.items():
                self._past_counters[name] = self._past_counters.get(name, 0.0) + count
            self._last_counters = {}
            await self._awake.wait()  # while it sleeps, the learner uses the GPU
            try:
                await self._restart()
            except ArtError as error:
                self._failure = error
                log.warning("giving up on vLLM: %s", error)
                self._running.set()

    async def _restart(self) -> None:
        cause = self._server.last_errors()
        while len(self._deaths) < MAX_RESTARTS or time.monotonic() - self._deaths[0] > RESTART_WINDOW:
            self._deaths.append(time.monotonic())
            try:
                await self._serve()
            except ArtError as error:
                cause = str(error)
                log.warning("%s", cause)
            else:
                return log.warning("vLLM is running again; sending the requests that were in flight again")
        raise ConfigError(
            f"vLLM was restarted {MAX_RESTARTS} times within {RESTART_WINDOW / 60:.0f} minutes and died each time: {cause}; if "
            "it ran out of memory, pass engine_args={'gpu-memory-utilization': 0.4}, or lower max_concurrent or max_context"
        )

    async def lasting(self, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``send``; if the server dies meanwhile, send again after the restart."""
        tries = 0
        while True:
            server, tries = await self._running_server(), tries + 1
            try:
                return await send()
            except UpstreamError as error:
                if not await self._died(server, error):
                    raise
                self._check_tries(tries, server, error)

    async def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer; send the request again if the server dies before the first."""
        started, tries = False, 0
        while True:
            server, tries = await self._running_server(), tries + 1
            try:
                async with aclosing(super().chunks(request, version)) as chunks:
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except UpstreamError as error:
                if started or not await self._died(server, error):
                    raise
                self._check_tries(tries, server, error)

    def _check_tries(self, tries: int, server: Server, error: UpstreamError) -> None:
        if tries == MAX_TRIES:
            raise UpstreamError(
                f"vLLM died {MAX_TRIES} times while answering this request: {server.last_errors()}", status=502
            ) from error

    async def _running_server(self) -> Server:
        await self._running.wait()
        if self._failure is not None:
            raise UpstreamError(str(self._failure), status=503) from self._failure
        return self._server

    async def _died(self, server: Server, error: UpstreamError) -> bool:
        """Return whether a request failed because its server is dying; if so, wait until it has exited."""
        if error.status < 500 and error.code != UNREACHABLE:
            return False
        # Don't query an exited server: that would open connections that nobody closes.
        if server.exit_code is None and await server.client.healthy():
            return False
        try:
            async with asyncio.timeout(DYING_SECONDS):
                await server.ended()
        except TimeoutError:
            await server.stop()  # not just the guard: processes that ignore its death would survive
        if self._server is server and self._failure is None:
            self._running.clear()  # ``_watch`` may not have noticed yet
        return True

    async def load(self, weights: Weights) -> None:
        """As in ``AddressEngine``.

        Also raises ConfigError for an adapter if the server was started for whole weights, and for an adapter of experts
        without a GPU, which would crash the server.
        """
        if self.overlaps(weights) and not self.keeps_start():
            raise ConfigError(
                f"the learner trains an adapter ({weights.path}), but vLLM was started for whole weights, the default for "
                "models under 100M parameters; pass lora_rank=16"
            )
        if self.overlaps(weights) and not self._cuda:
            adapter = json.loads((weights.path / "adapter_config.json").read_text())
            if adapter.get("target_parameters"):
                raise ConfigError(
                    f"the adapter {weights.path} adapts experts ({', '.join(adapter['target_parameters'])}), which vLLM's CPU "
                    "build can't serve; train whole weights (lora_rank=0), or pass engine='embedded'"
                )
        await super().load(weights)
        if not self.overlaps(weights):
            self._whole_weights = weights.path

    async def counters(self) -> Mapping[str, float]:
        """Return the totals over all servers so far; during a restart, those of the previous ones."""
        if self._running.is_set() and self._failure is None:
            with suppress(UpstreamError):
                self._last_counters = dict(await self._client.counters())
        names = self._past_counters.keys() | self._last_counters.keys()
        return {name: self._past_counters.get(name, 0.0) + self._last_counters.get(name, 0.0) for name in names}

    async def rest(self) -> None:
        """Free the GPU: move the weights to main memory and drop the caches. ``wake`` restarts a server that dies meanwhile."""
        if self._sleeps:
            await self.lasting(lambda: self._client.sleep())
            self._awake.clear()

    async def wake(self) -> None:
        """Wake the server and load the adapters again: a sleeping server's copies of them are unreliable."""
        if self._sleeps:
            self._awake.set()
            await self.lasting(self._wake)

    async def _wake(self) -> None:
        await self._client.wake_up()
        await self._load_adapters()
