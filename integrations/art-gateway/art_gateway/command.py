"""The command line of ``art gateway``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from art_core.plugin_api import Plugins
    from art_gateway.canary.routes import Candidate
    from art_gateway.canary.trial import Rule
    from art_gateway.routing import Server

EXAMPLE = (
    "Examples: `art gateway --upstream http://127.0.0.1:8000/v1 --port 8400 --run-dir runs/recorded`; without a server: "
    "`art gateway --model tiny`; a candidate beside a provider: `art gateway --record-text --upstream "
    "live=https://api.openai.com/v1 --upstream mine=http://127.0.0.1:8000/v1 --model my-model --route mine=5%`"
)
NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.+)")
SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def gateway(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of a server that returns token ids, ending in /v1; repeatable. Without it, --model is served here. "
            "With --route: NAME=URL, the provider and the candidate, which may also be a model to be served here."
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
        str | None,
        typer.Option(
            envvar="ART_UPSTREAM_API_KEY", help="Key to send to the upstreams; with --route, to the provider."
        ),
    ] = None,
    candidate_api_key: Annotated[
        str | None, typer.Option(envvar="ART_CANDIDATE_API_KEY", help="Key to send to the candidate of --route.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name to send upstream; default: the agent's own. Without --upstream, the model that the embedded "
            "engine serves in this process: tiny, a model folder or a Hugging Face name. With --route: what the candidate's "
            "server calls its model."
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
    route: Annotated[
        str | None,
        typer.Option(
            help="NAME=SHARE, such as mine=5%: this upstream answers that share of the conversations. The other one, the "
            "provider, answers the rest, and whatever the candidate cannot. Change the share with `art route`."
        ),
    ] = None,
    ramp: Annotated[
        str | None,
        typer.Option(
            help="Further shares, such as 25%,50%. The share rises to the next one as soon as scores show that the candidate is "
            "good enough, and falls to 0% as soon as they show that it is worse."
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, max=1, help="How much lower the candidate's mean score may be for --ramp.")
    ] = 0.05,
    patience: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds until the provider answers in the candidate's place; less than clients wait."
        ),
    ] = 30.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for calls in flight to finish after Ctrl-C.")] = 60,
    prompts: Annotated[
        str | None, typer.Option(help="The file of `art optimize`: its texts replace the agents' own.")
    ] = None,
) -> None:
    """Record the calls of any agent, in any language, that uses /rollouts/NAME/v1 as its base URL.

    Each NAME is a separate rollout, which begins with its first call. Ctrl-C lets the calls in flight finish; nothing is lost.
    """
    from art_cli.arguments import with_prompts
    from art_core.plugin_api import Output, Plugins
    from art_core.store.run_folder import new_run_dir
    from art_gateway.app import Limits
    from art_gateway.serve import Plan, serve

    if record_text and ((model and not route) or temperature is not None or prompts):
        raise typer.BadParameter(
            "requests reach the provider as they are: drop --model, --temperature and --prompts",
            param_hint="--record-text",
        )
    if ramp and not route:
        raise typer.BadParameter("--ramp needs --route NAME=SHARE, with the first share", param_hint="--ramp")
    if route and not record_text:
        raise typer.BadParameter(
            "a candidate needs a provider to compare with: add --record-text", param_hint="--route"
        )
    if record_text and api_key and not upstream_api_key:
        raise typer.BadParameter(
            "with --api-key, clients send the gateway's key instead of the provider's; pass the provider's key here",
            param_hint="--upstream-api-key",
        )
    plugins, candidate, upstream = with_prompts(prompts) or Plugins(), None, upstream or []
    if route:
        named = _named(upstream, route)
        rule = _rule(route, ramp, margin)
        candidate = _candidate(named, route, rule, model, candidate_api_key, patience, plugins)
        upstream = [url for name, url in named.items() if name == candidate.live]
    plan = Plan(
        upstreams=_providers(upstream, api_key=upstream_api_key, timeout=timeout)
        if record_text
        else _upstreams(upstream, model, plugins, api_key=upstream_api_key, timeout=timeout),
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
        candidate=candidate,
    )
    asyncio.run(serve(plan, Output(stderr=True)))


def _named(upstreams: list[str], route: str) -> dict[str, str]:
    named = dict(found.groups() for upstream in upstreams if (found := NAMED.fullmatch(upstream)))
    if len(named) != 2 or len(upstreams) != 2 or route.partition("=")[0] not in named:
        raise typer.BadParameter(
            "with --route pass two upstreams, --upstream live=URL of the provider and --upstream mine=URL of the candidate, and "
            "name the candidate: --route mine=5%",
            param_hint="--upstream",
        )
    return named


def _rule(route: str, ramp: str | None, margin: float) -> Rule | None:
    from art_gateway.canary.trial import Rule

    if not ramp:
        return None
    shares = [read_share(route.partition("=")[2], "--route"), *(read_share(step, "--ramp") for step in ramp.split(","))]
    if shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] < 1:
        raise typer.BadParameter(
            f"the shares must increase from {route} and stay above 0% and below 100%, because the provider's scores are needed",
            param_hint="--ramp",
        )
    return Rule(tuple(shares), margin=margin)


def _candidate(
    named: dict[str, str],
    route: str,
    rule: Rule | None,
    model: str | None,
    api_key: str | None,
    patience: float,
    plugins: Plugins,
) -> Candidate:
    from art_gateway.canary.routes import Candidate

    successor = None
    name, _, share = route.partition("=")
    url, live = named[name], next(each for each in named if each != name)
    if url.startswith(("http://", "https://")):
        [upstream] = _upstreams([url], model, plugins, api_key=api_key, timeout=patience)
    elif model or api_key:
        raise typer.BadParameter(
            f"{url} is served here, so it needs no --model and no --candidate-api-key", param_hint="--upstream"
        )
    else:
        from art_gateway.local import Link

        [upstream] = _upstreams([], url, plugins, api_key=None, timeout=patience)
        folder = Path(url).expanduser()
        successor = Link(folder, plugins) if folder.is_symlink() else None
    return Candidate(name, upstream, read_share(share, "--route"), live, rule, patience, model, successor)


def read_share(text: str, option: str) -> float:
    """Return the share that a text such as ``"5%"`` means. Raises typer.BadParameter, which names ``option``."""
    found = SHARE.fullmatch(text.strip())
    if found is None or float(found[1]) > 100:
        raise typer.BadParameter(f"{text!r} isn't a share from 0% to 100%", param_hint=option)
    return float(found[1]) / 100


def _check_no_query(urls: list[str]) -> None:
    """Refuse addresses with a query or a fragment, without showing them, because they may contain a key."""
    if any("?" in url or "#" in url for url in urls):
        raise typer.BadParameter(
            "a base URL has a query (? or #), to which no path can be added; drop it. With --record-text, the provider gets the "
            "query that the agent's client sends (?api-version=...). A key belongs in --upstream-api-key or, for the candidate, "
            "in --candidate-api-key.",
            param_hint="--upstream",
        )


def _providers(urls: list[str], *, api_key: str | None, timeout: float) -> list[Server]:
    from art_gateway.text import TextUpstream

    _check_no_query(urls)
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise typer.BadParameter(
            "pass the provider's base URL, such as https://api.openai.com/v1", param_hint="--upstream"
        )
    return [TextUpstream(url, api_key=api_key, timeout=timeout) for url in urls]


def _upstreams(
    urls: list[str], model: str | None, plugins: Plugins, *, api_key: str | None, timeout: float
) -> list[Server]:
    from art_core.capture import HttpUpstream

    _check_no_query(urls)
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
