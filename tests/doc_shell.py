"""Check shell commands that are shown: that commands, options, make targets, modules, files and extras are there."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import typer

from art_cli import main

ROOT = Path(__file__).parent.parent
BETWEEN = {"&&", "||", ";", "|", "&"}
ORDINARY = {
    *("cat", "cd", "cp", "curl", "deactivate", "docker", "echo", "export", "git", "kill", "mkdir", "nice", "node", "npm", "npx"),
    *("nvidia-smi", "openssl", "ray", "set", "sky", "sleep", "source", "ssh", "sudo", "ulimit", "unset"),
    *("wait", "wandb", "wsl", "."),
}  # fmt: skip
"""Commands of others, which are taken as they are."""
INSTALLED = {"art-core", "art-cli"}
"""Distributions that whoever reads such a command has already."""
INSTALLED_BY_OTHERS = {"vllm"}
"""Modules of other environments."""
USAGE = typer.BadParameter.__mro__[1]
"""What a command raises for a word that it does not take; typer gives it no name."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class Wrong(Exception):
    """A command that would not run."""


def check(code: str, page: Path) -> Iterator[str]:
    """Yield what is wrong with the commands of a block."""
    code = re.sub(r"<<\s*'?(\w+)'?\n.*?\n\1\n", "\n", code.replace("\\\n", " "), flags=re.DOTALL)
    folder = ROOT
    for line in code.splitlines():
        if placeholder := re.search(r"(?<![<'\"])<[^<>()&\n]+>", line.partition("#")[0]):
            yield f"{line.strip()}: a shell takes {placeholder[0]} for files to read and write"
        for words in commands(line):
            if words[0] == "cd" and (folder / words[1]).is_dir():
                folder /= words[1]
            try:
                check_command(words, page, folder)
            except Wrong as wrong:
                yield f"{shlex.join(words)}: {wrong}"


def check_mentioned(code: str, page: Path) -> Iterator[str]:
    """Yield what is wrong with a command within a text, which may leave arguments out and is for where art is installed."""
    for words in commands(code):
        try:
            if words[0] == "pip":
                check_pip(words[1:], have=INSTALLED)
            elif words[0] != "art" or words[1:] not in (["judge"], []):
                check_command(words, page, ROOT)
        except Wrong as wrong:
            if not re.match("Missing |Option .* requires an argument", str(wrong)):
                yield f"{code}: {wrong}"


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without variables set before them and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in BETWEEN:
            words.append(word)
            continue
        while words and ASSIGNMENT.match(words[0]):
            words = words[1:]
        if words:
            yield words[: next((i for i, it in enumerate(words) if set(it) <= set("<>")), None)]
        words = []


def check_command(words: list[str], page: Path, here: Path) -> None:
    """Raise Wrong where a command would not run here."""
    name, *rest = words
    if Path(name).name in {"python", "python3"}:
        return check_python(rest, page, here)
    if name == "sh":
        return check_script(rest, here)
    check = {"art": check_art, "make": check_make, "pip": check_pip}.get(Path(name).name)
    if check:
        check(rest)
    elif name not in ORDINARY:
        raise Wrong(f"{name} is no command that tests/doc_shell.py knows")


@cache
def art() -> typer.core.TyperGroup:
    return typer.main.get_command(main.command())


def check_art(words: list[str]) -> None:
    if not words or "--help" in words:
        return
    command, name, parent = art(), "art", None
    try:
        while isinstance(command, typer.core.TyperGroup):
            parent = command.make_context(name, words, parent=parent)
            name, command, words = command.resolve_command(parent, [*parent._protected_args, *parent.args])
        if "..." in words:  # something is left out, so only the options can be looked up
            known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            if unknown := [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]:
                raise Wrong(f"there is no {unknown[0]}")
        else:
            command.make_context(name, words, parent=parent)
    except USAGE as error:
        raise Wrong(error.format_message()) from error


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, _, value = word.partition("=")
        there = rf"\$[({{]?(if )?\$?\(?{name}\b|^{name}\b" if value or "=" in word else rf"^{name}:"
        if not re.search(there, makefile, flags=re.M):
            raise Wrong(f"{name} is not in the Makefile")


def check_python(words: list[str], page: Path, here: Path) -> None:
    match words:
        case ["-m", "art_cli", *rest]:
            check_art(rest)
        case ["-m", "pip", *rest]:
            check_pip(rest)
        case ["-m", module, *rest] if module.partition(".")[0] not in INSTALLED_BY_OTHERS:
            check_module(module, rest)
        case [file, *_] if not file.startswith("-"):
            there = any((folder / file).is_file() for folder in (here, page.parent))
            if not there and f"# {file}\n" not in page.read_text():
                raise Wrong(f"there is no {file}")


def check_script(words: list[str], here: Path) -> None:
    if not (here / words[0]).is_file():
        raise Wrong(f"no such file: {words[0]}")
    if words[0].endswith("deploy/rented.sh"):  # HOST, options of art serve, --, a command
        check_art(["serve", *words[2 : words.index("--")]])


def check_module(module: str, words: list[str]) -> None:
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise Wrong(f"there is no module {module}")
    if Path(spec.origin).is_relative_to(ROOT):
        # Some take their options by name from a dataclass.
        text = "".join(path.read_text() for path in Path(spec.origin).parent.rglob("*.py"))
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if f'"{option}"' not in text and f"{option[2:].replace('-', '_')}:" not in text:
                raise Wrong(f"there is no {option} in {module}")


def check_pip(words: list[str], have: Collection[str] = ()) -> None:
    """Raise Wrong where pip would fail in the checkout; our distributions are on no index. ``have`` are installed already."""
    if words[:1] != ["install"]:
        return
    after, installed, needed = "", set(have), {}
    for word in words[1:]:
        name, _, extras = word.partition("[")
        file = ROOT / name / "pyproject.toml"
        if (after in {"-r", "-c"} and not (ROOT / word).is_file()) or (after == "-e" and not file.is_file()):
            raise Wrong(f"there is no {name}")
        if name.startswith("art-") and after != "-e":
            raise Wrong(f"{name} is on no package index; install its folder with -e")
        if after == "-e":
            project = distribution(file)
            offered, wanted = project.get("optional-dependencies", {}), set(filter(None, re.split(r"[\s,\]]+", extras)))
            if missing := wanted - offered.keys():
                raise Wrong(f"{name} has no extra {missing.pop()}")
            installed.add(project["name"])
            for need in [*project["dependencies"], *(it for extra in wanted for it in offered[extra])]:
                needed[re.match(r"[\w-]+", need)[0]] = name
        after = word
    for need, name in needed.items():
        if need.startswith("art-") and need not in installed:
            raise Wrong(f"{name} needs {need}, which is on no package index; install its folder with -e as well")


@cache
def distribution(pyproject: Path) -> dict:
    return tomllib.loads(pyproject.read_text())["project"]
