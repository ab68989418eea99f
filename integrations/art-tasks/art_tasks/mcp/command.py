"""``art tasks from-mcp``: tasks for the tools of an MCP server, written by a model and tried out."""

from __future__ import annotations

import asyncio
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from art_core.errors import ConfigError
from art_core.plugin_api import plural
from art_core.store.run_folder import new_run_dir
from art_core.types import JsonDict
from art_tasks.console import say
from art_tasks.mcp.attempts import LIVE, UNTRIED, Wanted, make_tasks
from art_tasks.traffic.curate import as_lines

CODE = Path("mcp_agent.py")
AGENT_TEMPLATE = """
agent = agent_of(Server({server}), model={model!r})
"""
CODE_TEMPLATE = '''"""{what}"""

from art_tasks.mcp import {names}
{agent}reward = Rubric({author!r})
'''


def from_mcp(
    server: Annotated[str, typer.Argument(help="A command that starts an MCP server, or the URL of one.")],
    author: Annotated[
        str, typer.Option(help="The model that writes tasks and rubrics and judges attempts: a LiteLLM string, with its key.")
    ],
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to write.")] = 24,
    tries: Annotated[int, typer.Option(min=0, help="Attempts at each task; 0: keep all tasks untried.")] = 2,
    solver: Annotated[
        str,
        typer.Option(
            help="Who answers the agent in its attempts: live (its own provider; for the stock agent the author, an openai/ "
            "string only), or what --model of art eval takes."
        ),
    ] = LIVE,
    agent: Annotated[
        str | None, typer.Option(help="Your own agent, as FILE.py:NAME. Otherwise a LangGraph agent is written to mcp_agent.py.")
    ] = None,
    about: Annotated[str, typer.Option(help="What the author should know about the server's content, and your users.")] = "",
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Environment variable to pass to the command; repeatable.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME: VALUE", help="Header for a URL, such as 'Authorization: Bearer $TOKEN'; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the training tasks.")] = Path("tasks.jsonl"),
    held_out: Annotated[Path, typer.Option(help="File for the held-out tasks.")] = Path("held_out.jsonl"),
    share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the tasks to hold out.")] = 0.2,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the attempts. An interrupted command continues in it.")] = None,
) -> None:  # fmt: skip
    """Write tasks for the tools of an MCP server, try them, and keep those that can be solved.

    A model reads the server's tools and resources and writes tasks, each with a rubric. Duplicates are dropped, and so are tasks
    that no attempt solves. Rollouts call the tools for real: point the command at a server whose data may change. Exit code 1: no
    task.
    """
    from art_cli.main import resume_hint

    headers = dict(_header(text) for text in header or ())
    run_dir = run_dir or new_run_dir("tasks")
    wanted = Wanted(server, author, tasks, tries, solver, agent, about, tuple(env or ()), headers, run_dir)
    _check_files([out, held_out, CODE])
    wanted.check()
    with resume_hint(
        run_dir, f"the same command with --run-dir {run_dir}", "continues with the tasks and attempts so far"
    ):
        tried = asyncio.run(make_tasks(wanted))
    if not tried.solved:
        if UNTRIED.exists():
            say(
                f"no task was solved; to try those in {UNTRIED} again, repeat the command with another --solver or more --tries"
            )
        say(
            "for other tasks, delete that file if there is one, and pass --about with what the server holds, or a better --author"
        )
        raise typer.Exit(1)
    files = _save_split(tried.solved, share, out, held_out)
    name = _write_code(wanted)
    if tried.unknown:
        UNTRIED.write_bytes(as_lines(tried.unknown))
        say(f"{UNTRIED}: {plural(len(tried.unknown), 'task')} whose attempts all failed or could not be judged")
    else:
        UNTRIED.unlink(missing_ok=True)
    say(f"next: art train {shlex.quote(name)} {files} --reward {CODE}:reward --model tiny --dry-run")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(
            "--header takes NAME: VALUE, such as 'Authorization: Bearer $TOKEN'; one of those passed has no colon"
        )
    return name.strip(), value.strip()


def _check_files(paths: Sequence[Path]) -> None:
    """Raise ConfigError if a file can't be written, and make the folders."""
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{path} exists and may have been edited; move it away, or run the command in another folder"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error}") from error
    if len({path.resolve() for path in (*paths, UNTRIED)}) <= len(paths):
        raise ConfigError("--out, --held-out and the files that are written beside them must differ; pass another name")


def _save_split(tasks: list[JsonDict], share: float, out: Path, held_out: Path) -> str:
    """Write the training and the held-out tasks, and return the arguments that name them.

    Which are held out is drawn by the number of the tasks alone.
    """
    order = random.Random(0).sample(range(len(tasks)), len(tasks))
    count = min(max(round(share * len(tasks)), 1 if share > 0 else 0), len(tasks) - 1)
    apart, arguments = set(order[:count]), []
    for option, path, is_held_out, what in (
        ("", out, False, "for training"),
        ("--eval-tasks ", held_out, True, "held out"),
    ):
        if chosen := [task for number, task in enumerate(tasks) if (number in apart) is is_held_out]:
            path.write_bytes(as_lines(chosen))
            say(f"{path}: {plural(len(chosen), 'task')} {what}")
            arguments.append(option + shlex.quote(str(path)))
    return " ".join(arguments)


def _write_code(wanted: Wanted) -> str:
    """Write the file with the reward, and the stock agent if it is used; return where the agent is."""
    if wanted.agent:
        what, names, agent = "The reward of the tasks: a judge reads each task's rubric.", "Rubric", "\n"
    else:
        what = (
            "An agent with the tools of an MCP server, and the reward of its tasks: a judge reads each task's rubric."
        )
        more = {name: value for name in ("env", "headers") if (value := getattr(wanted, name))}
        server = ", ".join([repr(wanted.address), *(f"{name}={value!r}" for name, value in more.items())])
        names, agent = "Rubric, Server, agent_of", AGENT_TEMPLATE.format(server=server, model=wanted.model)
    if wanted.shows_keys and not wanted.agent:
        say(f"{CODE} will contain the address and the headers with any keys in them; '$NAME' keeps them out")
    CODE.write_text(CODE_TEMPLATE.format(what=what, names=names, agent=agent, author=wanted.author), encoding="utf-8")
    say(f"{CODE}: {'the reward' if wanted.agent else 'the agent and the reward'}")
    return wanted.agent or f"{CODE}:agent"
