"""Measures the sides that no folder holds an evaluation of: the agent's own provider, a model, a model at an address."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_cli.arguments import load_agent, load_object, load_reward, load_tasks
from art_cli.resuming import resume_hint
from art_cli.variables import warn_refused
from art_compare.sides import has_evaluation, named
from art_core.errors import ConfigError
from art_core.plugin_api import without_keys
from art_core.store.run_folder import new_run_dir

LIVE = "live"
KEY = "ART_UPSTREAM_API_KEY"
"""The key that every address gets."""


@dataclass(frozen=True)
class Missing:
    """A side to be measured."""

    name: str
    model: str
    address: str | None = None


@dataclass(frozen=True)
class Experiment:
    """What runs on every side, each as the command line names it."""

    agent: str
    tasks: str
    reward: str
    temperature: float | None = None
    """None: the agent's own."""

    def measured(self, specs: Sequence[str], missing: Mapping[str, Missing], say: Callable[[str], None]) -> list[str]:
        """Return ``specs`` with a folder for each that is in ``missing``: its evaluation, which is made here.

        The agent's own provider comes first: a stand-in for its key, which the others need, would hide that the key is missing.
        """
        tasks, reward = load_tasks(self.tasks), load_reward(self.reward)
        folders = {spec: spec for spec in specs}
        for spec, side in sorted(missing.items(), key=lambda item: item[1].model != LIVE):
            folder = new_run_dir(f"eval-{side.name}")
            say(without_keys(f"evaluating {spec}: {folder}"))
            self._evaluate(side, tasks, reward, folder)
            folders[spec] = f"{side.name}={folder}"
        return [folders[spec] for spec in specs]

    def _evaluate(self, side: Missing, tasks: list[Any], reward: Any, folder: Path) -> None:
        import art_core as art

        if side.model == LIVE:
            agent = load_object(self.agent)
        else:
            agent = load_agent(self.agent)
            warn_refused()
        settings = {"engine": side.address} if side.address else {}
        with resume_hint(folder, self._command(side, folder), "resumes it"):
            art.evaluate_sync(
                agent, tasks, reward=reward, model=side.model, temperature=self.temperature, run_dir=folder, **settings
            )

    def _command(self, side: Missing, folder: Path) -> str:
        kind = ["--live"] if side.model == LIVE else ["--model", side.model]
        kind += ["--set", f"engine={side.address}"] if side.address else []
        kind += [] if self.temperature is None else ["--temperature", f"{self.temperature:g}"]
        named = ["art", "eval", self.agent, self.tasks, "--reward", self.reward]
        return without_keys(shlex.join([*named, *kind, "--run-dir", str(folder)]))


def find_missing(specs: Sequence[str], temperature: float | None) -> dict[str, Missing]:
    """Return those of ``specs`` that have no evaluation. Raises ConfigError if one of them can't be measured."""
    missing = {spec: _missing(spec) for spec in specs if not has_evaluation(spec)}
    if len(specs) == 1 and missing:
        raise ConfigError(f"nothing to compare {specs[0]} with; pass two sides")
    if temperature is not None and any(side.model == LIVE for side in missing.values()):
        raise ConfigError("live is the agent as it is, at its own temperature; drop --temperature")
    addresses = {side.address for side in missing.values() if side.address}
    if len(addresses) > 1 and os.environ.get(KEY):
        raise ConfigError(f"{KEY} would be sent to {len(addresses)} addresses; evaluate one of them at a time")
    return missing


def _missing(spec: str) -> Missing:
    """Read ``[NAME=]live``, ``[NAME=]MODEL`` or ``[NAME=]MODEL@ADDRESS``."""
    name, model = named(spec)
    if model.startswith(("http://", "https://")):
        raise ConfigError(f"{without_keys(model)} may serve several models; name one: MODEL@ADDRESS")
    model, at, rest = model.partition("@http")
    if model != LIVE and not Path(model).exists() and (Path(model).is_absolute() or Path(model).parts[0] == "runs"):
        raise ConfigError(f"{model} does not exist")
    return Missing(name or Path(model).name, model, f"http{rest}" if at else None)
