"""``art view``: the dashboard for runs that are there, without an engine or a learner. Knows nothing about training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.capture import is_loopback, listen
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

EXAMPLE = "Examples: `art view runs/my-run`; all runs in a folder: `art view runs --port 8200 --no-browser`"


def view(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a folder of runs; one that trains is shown live.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8200,
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine's own are taken.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the pages in the browser.")] = True,
) -> None:
    """Look at runs in the browser: curves, groups, trajectories, tokens. Changes nothing, and starts no engine or learner."""
    import uvicorn
    from rich.console import Console

    from art_core.loop.display import plural
    from art_server.folders import RunFolders

    check_loopback(host)
    folders = RunFolders(run)
    if not folders:
        raise typer.BadParameter(
            f"{run} is no run folder and holds none; a run folder has a run.sqlite", param_hint="RUN"
        )
    try:
        listening = listen(host, port)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    said = str(run) if folders.single else f"{plural(len(folders), 'run')} in {run}"
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"{address}  shows {said}; Ctrl-C ends it", markup=False
    )
    if browser:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(view_app(folders, host), log_level="warning", lifespan="off"))
    server.run(sockets=[listening])


def view_app(folders: Mapping[str, Path], host: str = "127.0.0.1") -> FastAPI:
    """Return the application behind ``art view``: it answers this machine's own names only, so that no web page elsewhere can
    have its own name point here and read along."""
    from fastapi import FastAPI
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from art_server.pages import pages
    from art_server.read_routes import read_routes

    # FastAPI's own pages of documentation load scripts from elsewhere; the schema itself is at /openapi.json.
    app = FastAPI(title="art view", summary="Runs of art, read only.", docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "127.0.0.1", "localhost", "[::1]", "::1"])
    app.include_router(read_routes(folders))
    app.mount("/", pages())
    return app


def check_loopback(host: str) -> None:
    """Refuse an address that others can reach: there is no key to ask them for."""
    if not is_loopback(host):
        raise typer.BadParameter(
            f"{host} can be reached from other machines, and art view asks for no key; leave it out, and reach this machine "
            "through `ssh -L 8200:127.0.0.1:8200`",
            param_hint="--host",
        )
