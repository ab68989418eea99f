"""``art serve``: binds the address, opens the run and prints the addresses."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from art_core.capture import LimitedHeadProtocol, is_loopback, listen
from art_core.errors import ConfigError, ServingDied, StoreError
from art_core.plugin_api import Output
from art_server.app import make_app
from art_server.messages import MAX_MESSAGE
from art_server.roster import LEASE

GRACE = 5
"""Seconds for requests in flight to finish after Ctrl-C; collections resume when the server is started again."""


@dataclass(frozen=True)
class Plan:
    """What to serve, and where."""

    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings for ``open_run``."""
    lease: float = LEASE
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None

    def check(self) -> None:
        """Raise ConfigError if strangers could use the server, or if a TLS file is missing."""
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"other machines can reach {self.host}, so the server needs a token: set ART_SERVER_TOKEN in the environment or "
                ".env, or serve on 127.0.0.1"
            )
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii()):
            raise ConfigError("the token must have at least 16 ASCII characters; create one with: openssl rand -hex 32")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both --ssl-keyfile and --ssl-certfile")
        for path in filter(None, (self.ssl_keyfile, self.ssl_certfile)):
            if not path.is_file():
                raise ConfigError(f"no file {path}; TLS needs a key and a certificate in PEM")


async def serve_forever(plan: Plan) -> None:
    """Serve until Ctrl-C.

    Raises ConfigError if the address is in use or would let strangers in, ServingDied if the engine's process has died, and
    StoreError if the result of a job can't be written. A server that is started again resumes unfinished jobs.
    """
    plan.check()
    console = Output(stderr=True, highlight=False, soft_wrap=True)
    log = logging.getLogger("art_server")
    # Not rich's handler: it takes half a millisecond per line, and a thousand reconnecting workers log three thousand.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Bind before the engine starts, so that a port in use is noticed at once.
    with listen(plan.host, plan.port) as listener:
        app = make_app(plan.run_dir, plan.settings, token=plan.token, lease=plan.lease)
        tls = {"ssl_keyfile": _text(plan.ssl_keyfile), "ssl_certfile": _text(plan.ssl_certfile)}
        server = _Announcing(configured(app, **tls), console, plan, listener.getsockname()[1])
        console.print(f"starting the engine; the run is stored in {plan.run_dir}", markup=False)
        await server.serve([listener])
        if (failed := app.state.failed or server.died) is not None:
            raise failed


def configured(app: Any, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``; ``settings`` override our defaults."""
    defaults = {
        "http": LimitedHeadProtocol,
        "ws": "websockets-sansio",
        "ws_max_size": MAX_MESSAGE,
        "ws_ping_interval": 10,
        "ws_ping_timeout": 10,
        # Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), so that none is closed while a request is on
        # its way.
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE,
        "log_level": "warning",
        "lifespan": "on",
    }
    return uvicorn.Config(app, **{**defaults, **settings})


class _Announcing(uvicorn.Server):
    """A server that prints its addresses once it is serving."""

    def __init__(self, config: uvicorn.Config, console: Output, plan: Plan, port: int) -> None:
        super().__init__(config)
        self._console, self._plan, self._port = console, plan, port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.setLevel(logging.CRITICAL)  # if the run can't be opened, that is raised later as a single message
        try:
            await super().startup(sockets)
        except SystemExit:  # how uvicorn ends if the run can't be opened
            self.should_exit = True
        uvicorn_log.setLevel(logging.WARNING)
        if not self.should_exit:
            s, host = "s" if self._plan.ssl_certfile else "", self._plan.host
            host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            token = " --token ..." if self._plan.token else ""
            self._console.print(
                f"serving at http{s}://{host}:{self._port}\n"
                f"  workers:   art worker ws{s}://{host}:{self._port} --id client_1 --agent FILE.py:NAME{token}\n"
                f"  training:  art_server.connect('http{s}://{host}:{self._port}')\n"
                f"  Ctrl-C stops it; the same command with --run-dir {self._plan.run_dir} resumes",
                markup=False,
            )

    @property
    def died(self) -> ServingDied | StoreError | None:
        """The fatal error after which this process must be restarted; else None."""
        served = getattr(self.config.app.state, "served", None)
        return None if served is None else served.jobs.died

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.died is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.served.jobs.stop_waiting()
        await super().shutdown(sockets)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
