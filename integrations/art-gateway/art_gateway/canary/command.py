"""The command ``art route``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from art_core.plugin_api import plural, printable
from art_gateway.asking import NoAnswer, ask
from art_gateway.command import read_share

EXAMPLE = (
    "Examples: `art route` shows the comparison; `art route --follow`; `art route --set 25%`; `art route --rollback`"
)
HISTORY_SHOWN = 5
FOLLOW_SECONDS = 2


def route(
    address: Annotated[str, typer.Argument(help="The gateway's address.")] = "http://127.0.0.1:8400",
    share: Annotated[
        str | None, typer.Option("--set", help="The candidate's share of the conversations from now on, such as 25%.")
    ] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="The provider answers everything from now on.")] = False,
    why: Annotated[str | None, typer.Option(help="The reason, which the gateway keeps.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show it live until Ctrl-C; without a terminal, a line for each change.")
    ] = False,
    api_key: Annotated[str | None, typer.Option(envvar="ART_GATEWAY_API_KEY", help="The gateway's key.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how a gateway's candidate compares with the provider, and change its share of the conversations.

    A new share takes effect at once for new conversations; at a share of 0%, the candidate answers no call at all.
    """
    if follow and json_:
        raise typer.BadParameter("--follow prints text; repeat the command with --json instead", param_hint="--follow")
    if rollback and share is not None:
        raise typer.BadParameter("--rollback means --set 0%; pass only one of them", param_hint="--set")
    change: dict[str, Any] | None = None
    if rollback or share is not None:
        change = {"share": 0.0 if rollback else read_share(share or "", "--set")}
        change |= {"why": why or ("rolled back by hand" if rollback else "set by hand")}
    missing = "it has no candidate; start it with --record-text and --route"

    def routes(change: dict[str, Any] | None = None) -> dict[str, Any]:
        return ask(address.rstrip("/") + "/routes", change, api_key, has=["history"], missing=missing)

    found = routes(change)
    if json_:
        print(json.dumps(found))  # noqa: T201 - the command's result
        return
    console = Console()
    if follow:
        _follow(found, routes, console)
        return
    for part in _parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))


def _follow(found: dict[str, Any], routes: Callable[[], dict[str, Any]], console: Console) -> None:
    """Ask again and again, and show what is found, until Ctrl-C."""
    line, silent = "", False
    screen = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with suppress(KeyboardInterrupt), screen or nullcontext():
        while True:
            if screen:
                screen.update(Group(*_parts(found)), refresh=True)
            elif line != (line := _line(found)):
                typer.echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}")
            time.sleep(FOLLOW_SECONDS)
            try:
                found = routes()
            except NoAnswer as error:  # it may be starting again
                if not silent:
                    typer.echo(f"{error.message}; asking again", err=True)
                silent = True
            else:
                silent = False


def _line(found: dict[str, Any]) -> str:
    scores, difference = found["trial"]["scores"], found["trial"]["all"]["difference"]
    compared = f"{difference['mean']:+.3f}" if difference["count"] else "not known yet"
    scored = f"{plural(scores['candidate']['count'], 'score')} (of {found['live']}: {scores['live']['count']})"
    return f"{found['candidate']}: {100 * found['share']:.4g}%, {scored}, difference {compared}"


def _parts(found: dict[str, Any]) -> list[RenderableType]:
    """Return what is shown, in lines and a table."""
    parts: list[RenderableType] = []

    def say(text: str) -> None:
        parts.append(Text(printable(text)))

    candidate, live, trial = found["candidate"], found["live"], found["trial"]
    say(f"{candidate} answers {100 * found['share']:.4g}% of the conversations, {live} the others")
    table = Table("since the last change", live, candidate)
    sides = [trial["scores"][side] for side in ("live", "candidate")]
    table.add_row("conversations with a score", *(str(side["count"]) for side in sides))
    table.add_row("mean score", *(_number(side["mean"], ".3f") for side in sides))
    parts.append(table)
    for name in (live, candidate):
        seconds = (_number(found["seconds"][name][quantile], ".2f") for quantile in ("p50", "p95"))
        say(f"seconds per call of {name}, p50 and p95 of the newest: {', '.join(seconds)}")
    say(_bounds(f"score of {candidate} less that of {live}", trial["all"]["difference"], "+.3f", "pair"))
    say(_bounds(f"failed calls of {candidate}", trial["all"]["failures"], ".1%", "call"))
    for change in found["history"][-HISTORY_SHOWN:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change["at"]))
        say(f"{at}  {change['candidate']}: {100 * change['share']:.4g}%, because {change['why']}")
    if found["next"] is not None and found["share"]:
        say(f"next: {100 * found['next']:.4g}%, once the scores show that it is good enough")
    return parts


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bounds(what: str, it: dict[str, Any], form: str, each: str) -> str:
    if not it["count"]:
        return f"{what}: not known yet"
    value, lower, upper = (format(it[name], form) for name in ("mean", "lower", "upper"))
    return f"{what}: {value}, between {lower} and {upper} ({plural(it['count'], each)}; the bounds hold at all times)"
