"""``art tasks from-mcp``: its options. What it does is imported only when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from art_core.store.run_folder import new_run_dir

LIVE = "live"


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
            help="Who answers the agent in its attempts: a model, named as for `art eval --model`, or live: the agent's own "
            "provider. If --agent is left out, live is the author, which must be an openai/ string."
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
    from art_cli.resuming import resume_hint, same_command
    from art_tasks.mcp import files
    from art_tasks.mcp.attempts import Wanted, make_tasks

    run_dir = run_dir or new_run_dir("tasks")
    headers = dict(map(files.read_header, header or ()))
    wanted = Wanted(server, author, tasks, tries, solver, agent, about, tuple(env or ()), headers, run_dir)
    files.check([out, held_out])
    wanted.check()
    again = same_command(run_dir)
    with resume_hint(run_dir, again, "continues with the tasks and attempts so far"):
        tried = asyncio.run(make_tasks(wanted))
    if not files.save(tried, wanted, share, out, held_out):
        raise typer.Exit(1)
