"""``art tasks from-mcp``: tasks for the tools of an MCP server, written by a model and tried out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_core.errors import ArtError, ConfigError
from art_core.plugin_api import Plugins, plural
from art_core.types import JsonDict
from art_tasks.console import say

if TYPE_CHECKING:
    from art_tasks.mcp.author import Written
    from art_tasks.mcp.rubric import Rubric
    from art_tasks.mcp.server import Server

LIVE, OPENAI = "live", "openai/"
CODE, UNTRIED = Path("mcp_agent.py"), Path("untried.jsonl")
AUTHOR_SECONDS = 600.0
NEEDED = ("mcp", "art_ruler", "datasketch", "art_langgraph", "langchain_openai")
INSTALL = (
    "pip install -e . -e integrations/art-cli -e integrations/art-gateway -e integrations/art-ruler -e plugins/art-http "
    "-e plugins/art-openai -e plugins/art-langchain -e plugins/art-langgraph -e 'integrations/art-tasks[mcp]'"
)
AGENT_TEMPLATE = """
agent = agent_of(Server({server}), model={model!r})
"""
CODE_TEMPLATE = '''"""{what}"""

from art_tasks.mcp import {names}
{agent}reward = Rubric({author!r})
'''


@dataclass(frozen=True)
class Tried:
    """The tasks that were solved at least once, and how the attempts went."""

    tasks: list[JsonDict]
    """With ``solved``, the share of the judged attempts that solved it."""
    unjudged: int = 0
    """Attempts without a score."""
    why: str = ""
    """The first reason."""
    run_dir: Path | None = None


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    address: str
    author: str
    tasks: int
    tries: int
    solver: str
    agent: str | None
    about: str
    env: tuple[str, ...]
    headers: dict[str, str]
    run_dir: Path | None

    @property
    def model(self) -> str:
        """The name that the stock agent sends if it runs by itself."""
        return self.author.removeprefix(OPENAI) if self.author.startswith(OPENAI) else "policy"

    def check(self) -> None:
        """Raise ConfigError for what can only fail, before anything is paid for."""
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ConfigError(f"{', '.join(missing)} not installed; in the checkout of art, run: {INSTALL}")
        if not self.tries or self.solver != LIVE:
            return
        if self.agent is None and not self.author.startswith(OPENAI):
            raise ConfigError(
                f"the stock agent can call {self.author!r} only through OpenAI's API; pass --solver with a model that art "
                "serves, --agent with your own agent, --tries 0 to keep all tasks untried, or an author that begins with openai/"
            )
        Plugins().offer("register_engines", LIVE).check()


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
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the attempts [default: a new one under runs/].")] = None,
) -> None:  # fmt: skip
    """Write tasks for the tools of an MCP server, try them, and keep those that can be solved.

    A model reads the server's tools and resources and writes tasks, each with a rubric. Duplicates are dropped, and so are tasks
    that no attempt solves. Rollouts call the tools for real: point the command at a server whose data may change. Exit code 1: no
    task.
    """
    headers = dict(_header(text) for text in header or ())
    wanted = Wanted(server, author, tasks, tries, solver, agent, about, tuple(env or ()), headers, run_dir)
    _check_files([out, held_out, CODE, UNTRIED])
    wanted.check()
    tried = asyncio.run(_make_tasks(wanted))
    if not tried.tasks:
        say("no task is left; pass --about with what the server holds, a better --author or --solver, or --tries 0")
        raise typer.Exit(1)
    _save_split(tried.tasks, share, out, held_out)
    name = _write_code(wanted)
    say(f"next: art train {name} {out} --reward {CODE}:reward --model tiny --dry-run")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"a header is NAME: VALUE, such as 'Authorization: Bearer $TOKEN', not {name!r}")
    return name.strip(), value.strip()


def _check_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{path} exists and may have been edited; move it away, or run the command in another folder"
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("--out, --held-out and the files that are written beside them must differ; pass another name")


async def _make_tasks(wanted: Wanted) -> Tried:
    """Write the tasks and try them."""
    from art_cli.arguments import load_agent
    from art_ruler.judge import JudgeError
    from art_tasks.mcp import Rubric, Server, agent_of

    server, reward = Server(wanted.address, wanted.env, wanted.headers), Rubric(wanted.author)
    agent = load_agent(wanted.agent) if wanted.agent else agent_of(server, model=wanted.model)
    try:
        written = await _write_tasks(wanted, server)
    except JudgeError as error:
        raise ArtError(f"the author wrote no task: {error}") from error
    for reason, count in written.dropped.most_common():
        say(f"dropped: {count}, {reason}")
    if written.ended:
        say(f"the author stopped after {plural(len(written.tasks), 'task')}: {written.ended}")
    if not wanted.tries or not written.tasks:
        await server.close()
        return Tried(written.tasks)
    _save(UNTRIED, written.tasks)
    say(f"{UNTRIED}: the tasks as written; removed after all have been tried")
    tried = await _try_tasks(agent, written.tasks, wanted, reward)
    await server.close()
    UNTRIED.unlink()
    say(
        f"solved in at least one of {plural(wanted.tries, 'attempt')}: {len(tried.tasks)} of {plural(len(written.tasks), 'task')}"
    )
    if tried.unjudged:
        say(
            f"{plural(tried.unjudged, 'attempt')} could not be judged ({tried.why}); to see them: art view {tried.run_dir}"
        )
    if cost := written.cost + reward.cost:
        say(f"the author and judge cost ${cost:.2f}")
    return tried


async def _write_tasks(wanted: Wanted, server: Server) -> Written:
    from art_ruler.judge_choice import judge_of
    from art_tasks.mcp.author import write_tasks

    say(f"connecting to {server}")
    tools, (resources, unread) = await server.tools(), await server.resources()
    if not tools:
        raise ConfigError(f"the MCP server {server} has no tools")
    say(f"{plural(len(tools), 'tool')}, {plural(len(resources), 'resource')} with text")
    if unread:
        say(f"{plural(unread, 'resource')} could not be read")
    author = judge_of(wanted.author, timeout=AUTHOR_SECONDS, retries=3, schema=None)
    author.prepare()
    return await write_tasks(author, tools, resources, wanted.tasks, about=wanted.about, say=say)


async def _try_tasks(agent: object, tasks: list[JsonDict], wanted: Wanted, reward: Rubric) -> Tried:
    import art_core as art

    report = await art.evaluate(agent, tasks * wanted.tries, model=wanted.solver, reward=reward, run_dir=wanted.run_dir)
    kept: list[JsonDict] = []
    unjudged: list[Any] = []
    for number, task in enumerate(tasks):
        attempts = report.trajectories[number :: len(tasks)]
        judged = [t for t in attempts if t.reward is not None]
        unjudged += [t for t in attempts if t.reward is None]
        if solved := sum(t.metrics["success"] for t in judged):
            kept.append({**task, "solved": solved / len(judged)})
    why = unjudged[0].notes.get("unscored", "") if unjudged else ""
    return Tried(kept, len(unjudged), why, report.run_dir)


def _save_split(tasks: list[JsonDict], share: float, out: Path, held_out: Path) -> None:
    """Write the training and the held-out tasks; which are held out is drawn by the tasks' number alone."""
    order = random.Random(0).sample(range(len(tasks)), len(tasks))
    count = max(round(share * len(tasks)), 1 if share > 0 and len(tasks) > 1 else 0)
    apart = set(order[:count])
    for path, is_held_out, what in ((out, False, "for training"), (held_out, True, "held out")):
        chosen = [task for number, task in enumerate(tasks) if (number in apart) is is_held_out]
        _save(path, chosen)
        say(f"{path}: {plural(len(chosen), 'task')} {what}")


def _save(path: Path, tasks: list[JsonDict]) -> None:
    from art_tasks.traffic.curate import as_lines

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_lines(tasks))


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
    CODE.write_text(CODE_TEMPLATE.format(what=what, names=names, agent=agent, author=wanted.author), encoding="utf-8")
    say(f"{CODE}: {'the reward' if wanted.agent else 'the agent and the reward'}")
    return wanted.agent or f"{CODE}:agent"
