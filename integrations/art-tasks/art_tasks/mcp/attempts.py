"""Writes tasks for an MCP server's tools and tries them, with what the command line asked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.errors import ArtError, ConfigError
from art_core.plugin_api import Plugins, model_folder, plural
from art_core.store import recorded_settings
from art_core.types import JsonDict, Trajectory
from art_tasks.console import say
from art_tasks.traffic.curate import as_lines

if TYPE_CHECKING:
    from art_tasks.mcp.author import Written
    from art_tasks.mcp.rubric import Rubric
    from art_tasks.mcp.server import Server

LIVE, OPENAI = "live", "openai/"
UNTRIED = Path("untried.jsonl")
AUTHOR_SECONDS = 600.0
NEEDED = ("mcp", "art_ruler", "datasketch", "art_langgraph", "langchain_openai")
INSTALL = (
    "pip install -e . -e integrations/art-cli -e integrations/art-gateway -e integrations/art-ruler -e plugins/art-http "
    "-e plugins/art-openai -e plugins/art-langchain -e plugins/art-langgraph -e 'integrations/art-tasks[mcp]'"
)


@dataclass(frozen=True)
class Tried:
    """What became of the tasks."""

    solved: list[JsonDict]
    """Those that an attempt solved, with ``solved``, the share of the judged attempts that did."""
    unknown: list[JsonDict] = field(default_factory=list)
    """Those of which no attempt ran to its end and was judged."""


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
    run_dir: Path

    @property
    def model(self) -> str:
        """The name that the stock agent sends if it runs by itself."""
        return self.author.removeprefix(OPENAI) if self.author.startswith(OPENAI) else "policy"

    @property
    def shows_keys(self) -> bool:
        """Whether the address or a header may contain a key, and not just the name of a variable."""
        from art_tasks.mcp import Server

        addresses = [] if str(Server(self.address)) == self.address else [self.address]
        return any("$" not in text for text in (*addresses, *self.headers.values()))

    def check(self) -> None:
        """Raise ConfigError for what can only fail, before anything is paid for."""
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ConfigError(f"{', '.join(missing)} not installed; in the checkout of art, run: {INSTALL}")
        if not self.tries:
            return
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise ConfigError(f"--run-dir {self.run_dir} is a file; pass a folder")
        if self.solver != LIVE:
            if not recorded_settings(self.solver):
                model_folder(self.solver)
            return Plugins().offer("register_engines", "embedded").check()
        if self.agent is None and not self.author.startswith(OPENAI):
            raise ConfigError(
                f"the stock agent can call {self.author!r} only through OpenAI's API; pass --solver with a model that art "
                "serves, --agent with your own agent, --tries 0 to keep all tasks untried, or an author that begins with openai/"
            )
        return Plugins().offer("register_engines", LIVE).check()


async def make_tasks(wanted: Wanted) -> Tried:
    """Write the tasks and try them. Until they have been tried, they are in ``UNTRIED``, from which a later call continues."""
    from art_cli.arguments import load_agent
    from art_ruler.judge import JudgeError
    from art_tasks.mcp import Rubric, Server, agent_of

    server, reward = Server(wanted.address, wanted.env, wanted.headers), Rubric(wanted.author)
    agent = load_agent(wanted.agent) if wanted.agent else agent_of(server, model=wanted.model)
    Plugins().adapt(agent)  # refuses what can't be run
    try:
        written = await _write(wanted, server)
        for reason, count in written.dropped.most_common():
            say(f"dropped: {count}, {reason}")
        if written.ended:
            say(f"the author stopped after {plural(len(written.tasks), 'task')}: {written.ended}")
        tried = Tried(written.tasks)
        if wanted.tries and written.tasks:
            tried = await _try(agent, written.tasks, wanted, reward)
    except JudgeError as error:
        raise ArtError(f"the author wrote no task: {error}") from error
    finally:
        await server.close()
    if cost := written.cost + reward.cost:
        say(
            f"the author and the judge cost ${cost:.2f}"
            if cost >= 0.1
            else f"the author and the judge cost ${cost:.2g}"
        )
    return tried


async def _write(wanted: Wanted, server: Server) -> Written:
    from art_cli.arguments import load_tasks
    from art_ruler.judge_choice import judge_of
    from art_tasks.mcp.author import write_tasks

    say(f"connecting to {server}")
    tools, (resources, unread) = await server.tools(), await server.resources()
    if not tools:
        raise ConfigError(f"the MCP server {server} has no tools")
    say(f"{plural(len(tools), 'tool')}, {plural(len(resources), 'resource')} with text")
    if unread:
        say(f"{plural(unread, 'resource')} could not be read")
    known = load_tasks(str(UNTRIED)) if UNTRIED.exists() else []
    if known:
        say(f"{UNTRIED}: {plural(len(known), 'task')} of an earlier start; delete the file to begin anew")
    author = judge_of(wanted.author, timeout=AUTHOR_SECONDS, retries=3, schema=None)
    author.prepare()

    def keep(tasks: Sequence[JsonDict]) -> None:
        UNTRIED.write_bytes(as_lines(list(tasks)))
        say(f"{len(tasks)} of {wanted.tasks} tasks written")

    return await write_tasks(author, tools, resources, wanted.tasks, about=wanted.about, known=known, keep=keep)


async def _try(agent: object, tasks: list[JsonDict], wanted: Wanted, reward: Rubric) -> Tried:
    import art_core as art

    report = await art.evaluate(agent, tasks * wanted.tries, model=wanted.solver, reward=reward, run_dir=wanted.run_dir)
    tried = Tried([])
    for number, task in enumerate(tasks):
        judged = [t for t in report.trajectories[number :: len(tasks)] if t.reward is not None]
        if solved := sum(t.metrics["success"] for t in judged):
            tried.solved.append({**task, "solved": solved / len(judged)})
        elif all(t.error for t in judged):
            tried.unknown.append(task)
    attempts = plural(wanted.tries, "attempt")
    say(f"solved in at least one of {attempts}: {len(tried.solved)} of {plural(len(tasks), 'task')}")
    _say_failed("failed", [t for t in report.trajectories if t.error], wanted)
    _say_failed("could not be judged", [t for t in report.trajectories if t.reward is None and not t.error], wanted)
    return tried


def _say_failed(how: str, attempts: Sequence[Trajectory], wanted: Wanted) -> None:
    if attempts:
        first: Any = attempts[0].error or attempts[0].notes.get("unscored", "no reason given")
        see = f"art view {shlex.quote(str(wanted.run_dir))}"
        say(f"{plural(len(attempts), 'attempt')} {how}; the first: {first}; to see them: {see}")
