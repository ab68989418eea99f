"""Writes a plugin to begin with: a distribution that works and whose tests pass. Knows nothing about installing it.

The files are in ``templates/``: those of ``common/`` and those of the plugin's kind, with ``$placeholders``.
"""

from __future__ import annotations

import enum
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from art_cli.catalogue import ADAPTERS, how_to_install
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
    Kind.agent: "Agents of $name, trained by art as they are.",
    Kind.reward: "The reward $name for art.",
    Kind.loss: "The loss $name for art.",
    Kind.engine: "The engine $name for art.",
    Kind.tracker: "The tracker $name for art.",
    Kind.command: "The command art $name.",
}
FIRST = {
    Kind.agent: "{module}.py says how agents of {package} run and where their client sends; tests/{package}.py stands in for the "
    "framework until you delete it and install the real one",
    Kind.reward: "the reward is in {module}.py, for train(reward={name!r})",
    Kind.loss: "the loss is in {module}.py, for train(loss={name!r})",
    Kind.engine: "the engine is in {module}.py, for train(engine={name!r})",
    Kind.tracker: "the tracker is in {module}.py, for train(trackers=[{name!r}])",
    Kind.command: "the command is in {module}.py: art {name} --help",
}


@dataclass(frozen=True)
class NewPlugin:
    """A plugin that was written."""

    folder: Path
    name: str
    kind: Kind

    @property
    def package(self) -> str:
        """The name as Python writes it; for ``Kind.agent`` that of the framework's package."""
        return self.name.replace("-", "_")

    @property
    def module(self) -> str:
        return f"art_{self.package}"

    def next_steps(self) -> str:
        """Return what was made and what to do with it, for a person to read."""
        first = FIRST[self.kind].format(module=self.module, package=self.package, name=self.name)
        return "\n".join(
            [
                f"{self.folder} is a plugin that works:",
                f"  pip install -e '{self.folder}[test]'",
                f"  python -m pytest {self.folder}",
                "  art plugins",
                f"Next: {first}. docs/extending.md has a heading for every hook.",
            ]
        )


def write_plugin(name: str, folder: Path, kind: Kind = Kind.agent) -> NewPlugin:
    """Write the plugin for ``name`` into ``folder/art-{name}``; ConfigError where the name is none, or the folder exists."""
    name = _checked(name)
    plugin = NewPlugin(folder / f"art-{name}", name, kind)
    try:
        plugin.folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{plugin.folder} exists, and nothing there was changed: give another name, or another folder with --dir"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot make {plugin.folder}: {error.strerror or error}; give another folder with --dir"
        ) from error
    about = Template(ABOUT[kind]).substitute(name=name)
    words = {"name": name, "package": plugin.package, "module": plugin.module, "about": about}
    for template in sorted([*(TEMPLATES / "common").rglob("*.txt"), *(TEMPLATES / kind).rglob("*.txt")]):
        inside = template.relative_to(TEMPLATES).parts[1:]
        path = plugin.folder.joinpath(*(Template(part).substitute(words) for part in inside)).with_suffix("")
        path.parent.mkdir(exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    return plugin


def _checked(name: str) -> str:
    """Return the name in its normal form, without ``art-``."""
    plain = name.lower().replace("_", "-").removeprefix("art-")
    package = plain.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", plain) or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} is no name for a plugin: use letters, digits and single hyphens, a letter first, as in 'my-framework'"
        )
    if plain == "core" or f"art-{plain}" in ADAPTERS.values():
        command = "pip install -e ." if plain == "core" else how_to_install(f"art-{plain}")
        raise ConfigError(
            f"art-{plain} exists already; in the checkout of art, run: {command}, or choose another name for yours"
        )
    return plain
