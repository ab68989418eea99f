"""``art init``: what a repository needs to train its agent, and what a coding agent needs to know to do it."""

from __future__ import annotations

import keyword
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.console import Console

from art_cli.arguments import import_folders
from art_cli.find_agents import FoundAgent, find_agents
from art_core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates" / "init"
FILES = {
    "train.py": "train.py",
    "tasks.jsonl": "tasks.jsonl",
    "held_out.jsonl": "held_out.jsonl",
    ".agents/skills/train-agent/SKILL.md": "SKILL.md",
    ".claude/skills/train-agent/SKILL.md": "SKILL.md",
}
"""File in the repository -> its template. Most coding agents read ``.agents/skills``, Claude Code reads ``.claude/skills``."""
GRAPHS = ("langgraph", "langchain", "deepagents")
LAST_MESSAGE = '''
def text_of(state):
    """What the reward sees as the output: the last message, or in a graph without messages all of its state."""
    return state["messages"][-1].text if "messages" in state else str(state)

'''


def init(
    agent: Annotated[
        str | None, typer.Argument(help="FILE.py:NAME of the agent; default: the only one that is found.")
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="The repository's folder.")] = Path("."),
) -> None:
    """Find the agent in a repository, and write train.py, example tasks and a skill for coding agents.

    The code is read, not run. Existing files are kept.
    """
    Console(highlight=False, soft_wrap=True).print(write_starter(agent, folder).next_steps(), markup=False)


@dataclass
class Starter:
    agent: FoundAgent
    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Files that were there already; nothing in them was changed."""

    def next_steps(self) -> str:
        """Return a message that says what was written and what to do next."""
        lines = [f"agent: {self.agent} ({self.agent.what})"]
        lines += [f"wrote {name}" for name in self.written] + [
            f"kept  {name}, which exists (if it is for another agent, delete it and run this again)"
            for name in self.kept
        ]
        if "held_out.jsonl" not in [*self.written, *self.kept]:
            lines.append(
                "no held_out.jsonl: move some tasks of tasks.jsonl there, which measure and are not trained on"
            )
        return "\n".join(
            [
                *lines,
                "next: put your tasks into tasks.jsonl and held_out.jsonl and your reward into train.py, or let a coding "
                "agent do it with the skill train-agent; then, with an input of your agent (text or JSON) as INPUT:",
                f"  art doctor --agent {shlex.quote(str(self.agent))} --task INPUT",
                "  python train.py --dry-run",
            ]
        )


def write_starter(where: str | None, folder: Path) -> Starter:
    """Write ``FILES`` into ``folder`` for the agent that ``where`` names, or for the only one that is found there.

    Raises ConfigError if none is found, if there are several, or if the agent's file can't be imported from ``folder``.
    """
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder}")
    script = folder / "train.py"
    if script.exists() and "art_core" not in script.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{script} exists and doesn't use art; nothing was written: rename it, or pass another folder with --dir"
        )
    agent = _chosen(where, folder)
    words = _words(agent, folder)
    starter = Starter(agent)
    for name, template in FILES.items():
        path = folder / name
        if path.exists():
            starter.kept.append(name)
            continue
        if name == "held_out.jsonl" and "tasks.jsonl" in starter.kept:
            continue  # examples beside the user's tasks would be of another form
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        starter.written.append(name)
    return starter


def _chosen(where: str | None, folder: Path) -> FoundAgent:
    found = find_agents(folder)
    if where is not None:
        file, colon, name = where.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier() or not (folder / file).is_file():
            raise ConfigError(f"{where!r} does not name an agent in {folder}; write FILE.py:NAME")
        named = FoundAgent(Path(os.path.relpath(folder / file, folder)), name, 0, "as named")
        return next((it for it in found if str(it) == str(named)), named)
    if not found:
        raise ConfigError(
            f"no agent was found in the Python files of {folder}; name it: art init FILE.py:NAME, an agent of a framework, "
            "a function of one task that calls a model, or a function without parameters that makes one"
        )
    if len(found) > 1:
        listed = "\n".join(f"  art init {shlex.quote(str(it))}    # line {it.line}: {it.what}" for it in found)
        raise ConfigError(f"{len(found)} agents were found in {folder}; choose one:\n{listed}")
    return found[0]


def _words(agent: FoundAgent, folder: Path) -> dict[str, str]:
    """Return what the templates' placeholders stand for."""
    root, file = Path(os.path.abspath(folder)), Path(os.path.abspath(folder / agent.file))
    *sources, outside = import_folders(file.parent)
    sources = [it for it in sources if it.is_relative_to(root)]  # the repository itself may be in a folder src
    if outside in root.parents and not root.name.isidentifier():
        outside = root  # no package, even if it has an __init__.py
    # Outside a package, Python files import their neighbours by plain names.
    start = outside if outside != file.parent else next(iter(sources), root)
    parts = list(Path(os.path.relpath(file, start)).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise ConfigError(
            f"{agent.file} cannot be imported, because a part of its path is not a Python name; rename it"
        )
    paths = [Path(os.path.relpath(it, root)).as_posix() for it in dict.fromkeys([*sources, outside]) if it != root]
    graph = agent.what in GRAPHS
    return {
        "agent": str(agent),
        "argument": shlex.quote(str(agent)),
        "name": agent.name,
        "module": ".".join(parts),
        "path_import": "import sys\nfrom pathlib import Path\n" if paths else "",
        "path_line": "".join(f'sys.path.insert(0, str(Path(__file__).parent / "{it}"))\n' for it in paths),
        "output": LAST_MESSAGE if graph else "",
        "to_output": "\n        to_output=text_of," if graph else "",
        "eval_output": " --to-output train.py:text_of" if graph else "",
    }
