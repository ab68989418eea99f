"""``art view``: the dashboard for existing runs, without an engine or a learner."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.capture import is_loopback, listen
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

EXAMPLE = "Examples: `art view runs/my-run`; all runs in a folder: `art view runs --port 8200 --no-browser`"

CONSOLE_BROWSERS = {"www-browser", "links", "elinks", "lynx", "w3m"}
"""They run no scripts, so they show nothing of the dashboard, and they take the terminal."""


def view(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a folder of runs; a run in progress is shown live.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8200,
    host: Annotated[str, typer.Option(help="Address to listen on; must be a loopback address.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the dashboard in the browser.")] = True,
) -> None:
    """Show runs in the browser: curves, groups, trajectories, tokens. Read-only; starts no engine or learner."""
    import uvicorn
    from rich.console import Console

    from art_core.plugin_api import plural
    from art_server.folders import RunFolders

    check_loopback(host)
    folders = RunFolders(run)
    if not folders:
        raise typer.BadParameter(
            f"{run} isn't a run folder and contains none; a run folder has a run.sqlite", param_hint="RUN"
        )
    try:
        listening = listen(host, port)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    shown = str(run) if folders.single else f"{plural(len(folders), 'run')} in {run}"
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"{address}  shows {shown}; Ctrl-C stops it", markup=False
    )
    if browser:
        # In a thread, because some commands end only when the browser is closed, and it waits for the page.
        Thread(target=_open_browser, args=(address,), daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(view_app(folders, host), log_level="warning", lifespan="off"))
    server.run(sockets=[listening])


def _open_browser(address: str) -> None:
    import webbrowser

    with suppress(webbrowser.Error):  # there is none
        if Path(webbrowser.get().name).name not in CONSOLE_BROWSERS:
            webbrowser.open(address)


def view_app(folders: Mapping[str, Path], host: str = "127.0.0.1") -> FastAPI:
    """Return the application behind ``art view``.

    It answers only to this machine's own names, so that a web page can't read runs through a name that resolves to this machine
    (DNS rebinding).
    """
    from fastapi import FastAPI
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from art_server.pages import pages
    from art_server.read_routes import read_routes

    # FastAPI's documentation pages load scripts from other servers; the schema itself is at /openapi.json.
    app = FastAPI(title="art view", summary="Runs of art, read-only.", docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "127.0.0.1", "localhost", "[::1]", "::1"])
    app.include_router(read_routes(folders))
    app.mount("/", pages())
    return app


def check_loopback(host: str) -> None:
    """Raise BadParameter for an address that other machines can reach, because there is no authentication."""
    if not is_loopback(host):
        raise typer.BadParameter(
            f"other machines can reach {host}, and art view has no authentication; omit --host, and connect from other machines "
            "with `ssh -L 8200:127.0.0.1:8200`",
            param_hint="--host",
        )
