"""The command line of ``art gateway``. Knows nothing about serving; what is heavy is imported when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from art_core.plugins import Plugins
    from art_gateway.routing import Server

EXAMPLE = (
    "Examples: `art gateway --upstream http://127.0.0.1:8000/v1 --port 8400 --run-dir runs/recorded`; without a server: "
    "`art gateway --model tiny`"
)


def gateway(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of a server that returns token ids, ending in /v1; repeatable. Without one, --model is answered here."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for agents on other machines.")
    ] = "127.0.0.1",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder to record in; one that has been recorded in goes on.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ART_GATEWAY_API_KEY", help="Ask clients for this key; default: any will do.")
    ] = None,
    upstream_api_key: Annotated[
        str | None, typer.Option(envvar="ART_UPSTREAM_API_KEY", help="Sent to the upstreams.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name to send upstream; default: the agent's own. Without --upstream: tiny, a model folder or a "
            "Hugging Face name that the embedded engine serves in this process."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Imposed on every call; default: the agent's own.")
    ] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Calls answered at a time; others wait.")] = 1024,
    max_waiting: Annotated[int, typer.Option(min=0, help="Calls that may wait; the next one gets a 429.")] = 8192,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 64,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for an upstream's whole answer, or between two chunks.")
    ] = 600.0,
    retries: Annotated[
        int, typer.Option(min=0, help="Further attempts on 429, 5xx and lost connections, with growing pauses.")
    ] = 4,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that calls in flight get to end after Ctrl-C.")] = 60,
) -> None:
    """Record the calls of any agent, in any language, that is given /rollouts/NAME/v1 as its base URL.

    Every NAME is a run of the agent of its own and begins with its first call. Ctrl-C ends the calls in flight and loses nothing.
    """
    from art_core.loop.display import Output
    from art_core.plugins import Plugins
    from art_core.store.run_folder import new_run_dir
    from art_gateway.app import Limits
    from art_gateway.serve import Plan, serve

    plugins = Plugins()
    plan = Plan(
        upstreams=_upstreams(upstream or [], model, plugins, api_key=upstream_api_key, timeout=timeout),
        run_dir=run_dir or new_run_dir("gateway"),
        host=host,
        port=port,
        api_key=api_key or None,
        temperature=temperature,
        retries=retries,
        drain=drain,
        limits=Limits(max_calls, max_waiting, max_body * 2**20),
        dialects=plugins.registered("register_dialects"),
    )
    asyncio.run(serve(plan, Output(stderr=True)))


def _upstreams(
    urls: list[str], model: str | None, plugins: Plugins, *, api_key: str | None, timeout: float
) -> list[Server]:
    from art_core.capture import HttpUpstream

    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith("/v1"):
            raise typer.BadParameter(
                f"{url!r} is not a base URL such as http://127.0.0.1:8000/v1, which ends in /v1",
                param_hint="--upstream",
            )
    if urls:
        return [HttpUpstream(url, model, api_key=api_key, timeout=timeout) for url in urls]
    if model is None:
        raise typer.BadParameter(
            "give the base URL of a server that returns token ids, or --model tiny to try it without one",
            param_hint="--upstream",
        )
    from art_gateway.local import LocalUpstream

    return [LocalUpstream(model, plugins)]
