"""The files of ``art tasks from-mcp``."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from pathlib import Path

from art_core.errors import ConfigError
from art_core.plugin_api import plural
from art_core.types import JsonDict
from art_tasks.console import say
from art_tasks.mcp.attempts import UNTRIED, Tried, Wanted
from art_tasks.traffic.curate import as_lines

CODE = Path("mcp_agent.py")
AGENT_TEMPLATE = """
agent = agent_of(Server({server}), model={model!r})
"""
CODE_TEMPLATE = '''"""{what}"""

from art_tasks.mcp import {names}
{agent}reward = Rubric({author!r})
'''


def read_header(text: str) -> tuple[str, str]:
    """Return the name and the value of a header. Raises ConfigError without repeating it, because it may be a key."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(
            "--header takes NAME: VALUE, such as 'Authorization: Bearer $TOKEN'; one of those passed has no colon"
        )
    return name.strip(), value.strip()


def check(paths: Sequence[Path]) -> None:
    """Raise ConfigError if a file can't be written, and make the folders."""
    paths = [*paths, CODE]
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


def save(tried: Tried, wanted: Wanted, share: float, out: Path, held_out: Path) -> bool:
    """Write the tasks, the agent and the reward, and say what to do next. Return whether there is any task."""
    if not tried.solved:
        if UNTRIED.exists():
            say(
                f"no task was solved; to try those in {UNTRIED} again, repeat the command with another --solver or more --tries"
            )
        say(
            "for other tasks, delete that file, if it exists, and pass --about with what the server holds, or a better --author"
        )
        return False
    files = _save_split(tried.solved, share, out, held_out)
    name = _write_code(wanted)
    if tried.unknown:
        UNTRIED.write_bytes(as_lines(tried.unknown))
        say(f"{UNTRIED}: {plural(len(tried.unknown), 'task')} whose attempts all failed or could not be judged")
    else:
        UNTRIED.unlink(missing_ok=True)
    say(f"next: art train {shlex.quote(name)} {files} --reward {CODE}:reward --model tiny --dry-run")
    return True


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
