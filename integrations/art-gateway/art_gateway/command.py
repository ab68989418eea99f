"""The command line of ``art gateway``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from art_core.plugin_api import Plugins
    from art_gateway.routing import Server

EXAMPLE = (
    "Examples: `art gateway --upstream http://127.0.0.1:8000/v1 --port 8400 --run-dir runs/recorded`; without a server: "
    "`art gateway --model tiny`"
)


def gateway(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of a server that returns token ids, ending in /v1; repeatable. Without it, --model is served here."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8400,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for agents on other machines.")
    ] = "127.0.0.1",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder to record in; an existing recording is continued.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="ART_GATEWAY_API_KEY", help="Key that clients must send; default: any is accepted."),
    ] = None,
    upstream_api_key: Annotated[
        str | None, typer.Option(envvar="ART_UPSTREAM_API_KEY", help="Key to send to the upstreams.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name to send upstream; default: the agent's own. Without --upstream, the model that the embedded "
            "engine serves in this process: tiny, a model folder or a Hugging Face name."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Overrides the temperature of every call; default: the agent's own.")
    ] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Calls answered concurrently; others wait.")] = 1024,
    max_waiting: Annotated[int, typer.Option(min=0, help="Calls that may wait; further ones get a 429.")] = 8192,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 64,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for an upstream's whole answer, or between two chunks of a stream.")
    ] = 600.0,
    retries: Annotated[
        int, typer.Option(min=0, help="Further attempts after 429, 5xx and lost connections, with growing pauses.")
    ] = 4,
    record_text: Annotated[
        bool,
        typer.Option(
            "--record-text",
            help="Record text in front of any provider, https://api.openai.com/v1 included; such calls can't be trained on.",
        ),
    ] = False,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for calls in flight to finish after Ctrl-C.")] = 60,
) -> None:
    """Record the calls of any agent, in any language, that uses /rollouts/NAME/v1 as its base URL.

    Each NAME is a separate rollout, which begins with its first call. Ctrl-C lets the calls in flight finish; nothing is lost.
    """
    from art_core.plugin_api import Output, Plugins
    from art_core.store.run_folder import new_run_dir
    from art_gateway.app import Limits
    from art_gateway.serve import Plan, serve

    if record_text and (model or temperature is not None):
        raise typer.BadParameter(
            "requests reach the provider as they are: drop --model and --temperature", param_hint="--record-text"
        )
    if record_text and api_key and not upstream_api_key:
        raise typer.BadParameter(
            "clients send the gateway's key, so the provider needs its own", param_hint="--upstream-api-key"
        )
    plugins = Plugins()
    plan = Plan(
        upstreams=_providers(upstream or [], api_key=upstream_api_key, timeout=timeout)
        if record_text
        else _upstreams(upstream or [], model, plugins, api_key=upstream_api_key, timeout=timeout),
        run_dir=run_dir or new_run_dir("gateway"),
        host=host,
        port=port,
        api_key=api_key or None,
        temperature=temperature,
        retries=retries,
        drain=drain,
        limits=Limits(max_calls, max_waiting, max_body * 2**20),
        dialects=plugins.registered("register_dialects"),
        text=record_text,
    )
    asyncio.run(serve(plan, Output(stderr=True)))


def _providers(urls: list[str], *, api_key: str | None, timeout: float) -> list[Server]:
    from art_gateway.text import TextUpstream

    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise typer.BadParameter(
            "pass the provider's base URL, such as https://api.openai.com/v1", param_hint="--upstream"
        )
    return [TextUpstream(url, api_key=api_key, timeout=timeout) for url in urls]


def _upstreams(
    urls: list[str], model: str | None, plugins: Plugins, *, api_key: str | None, timeout: float
) -> list[Server]:
    from art_core.capture import HttpUpstream

    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith("/v1"):
            raise typer.BadParameter(
                f"{url!r} isn't a base URL ending in /v1, such as http://127.0.0.1:8000/v1",
                param_hint="--upstream",
            )
    if urls:
        return [HttpUpstream(url, model, api_key=api_key, timeout=timeout) for url in urls]
    if model is None:
        raise typer.BadParameter(
            "pass the base URL of a server that returns token ids, or --model tiny to try it without a server",
            param_hint="--upstream",
        )
    from art_gateway.local import LocalUpstream

    return [LocalUpstream(model, plugins)]
