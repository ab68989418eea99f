"""Writes a starter plugin: a distribution that works and whose tests pass.

Its files come from ``templates/common/`` and ``templates/KIND/``, with ``$placeholders``.
"""

from __future__ import annotations

import enum
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from art_cli.catalogue import INTEGRATIONS, PLUGINS, how_to_install
from art_core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


class Kind(enum.StrEnum):
    """What a plugin adds."""

    agent = "agent"
    reward = "reward"
    loss = "loss"
    engine = "engine"
    tracker = "tracker"
    command = "command"


ABOUT = {
    Kind.agent: "Trains $name agents with art, unchanged.",
    Kind.reward: "The reward $name for art.",
    Kind.loss: "The loss $name for art.",
    Kind.engine: "The engine $name for art.",
    Kind.tracker: "The tracker $name for art.",
    Kind.command: "The command art $name.",
}
FIRST = {
    Kind.agent: "{module}.py runs {package} agents and redirects their client; tests/{package}.py stands in for the framework "
    "until you delete it and install the real one",
    Kind.reward: "the reward is in {module}.py, for train(reward={name!r})",
    Kind.loss: "the loss is in {module}.py, for train(loss={name!r})",
    Kind.engine: "the engine is in {module}.py, for train(engine={name!r})",
    Kind.tracker: "the tracker is in {module}.py, for train(trackers=[{name!r}])",
    Kind.command: "the command is in {module}.py: art {name} --help",
}


@dataclass(frozen=True)
class NewPlugin:
    folder: Path
    name: str
    kind: Kind

    @property
    def package(self) -> str:
        """The name as a Python identifier; for ``Kind.agent`` the framework's package."""
        return self.name.replace("-", "_")

    @property
    def module(self) -> str:
        return f"art_{self.package}"

    def next_steps(self) -> str:
        """Return a message that says what was written and what to do next."""
        first = FIRST[self.kind].format(module=self.module, package=self.package, name=self.name)
        return "\n".join(
            [
                f"{self.folder} is a working plugin:",
                f"  pip install -e '{self.folder}[test]'",
                f"  python -m pytest {self.folder}",
                "  art plugins",
                f"Next: {first}. docs/extending.md documents every hook.",
            ]
        )


def write_plugin(name: str, folder: Path, kind: Kind = Kind.agent) -> NewPlugin:
    """Write the plugin into ``folder/art-{name}``; ConfigError if the name is invalid or taken, or that folder exists."""
    name = _normalized(name)
    plugin = NewPlugin(folder / f"art-{name}", name, kind)
    try:
        plugin.folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{plugin.folder} already exists, and nothing in it was changed; pass another name, or another folder with --dir"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot create {plugin.folder}: {error.strerror or error}; pass another folder with --dir"
        ) from error
    about = Template(ABOUT[kind]).substitute(name=name)
    words = {"name": name, "package": plugin.package, "module": plugin.module, "about": about}
    for template in sorted([*(TEMPLATES / "common").rglob("*.txt"), *(TEMPLATES / kind).rglob("*.txt")]):
        parts = template.relative_to(TEMPLATES).parts[1:]
        path = plugin.folder.joinpath(*(Template(part).substitute(words) for part in parts)).with_suffix("")
        path.parent.mkdir(exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    return plugin


def _normalized(name: str) -> str:
    """Return the name in lower case with hyphens, without ``art-``; ConfigError if it is invalid or taken."""
    plain = name.lower().replace("_", "-").removeprefix("art-")
    package = plain.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", plain) or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} is not a valid plugin name: use letters, digits and single hyphens, starting with a letter, as in "
            "'my-framework'"
        )
    if plain == "core" or f"art-{plain}" in PLUGINS | INTEGRATIONS:
        command = "pip install -e ." if plain == "core" else how_to_install(f"art-{plain}")
        raise ConfigError(
            f"art-{plain} already exists; in the checkout of art, run: {command}, or choose another name for yours"
        )
    return plain
