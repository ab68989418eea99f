"""Measures the sides that no folder holds an evaluation of: the agent's own provider, a model, a model at an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_cli.arguments import load_agent, load_object, load_reward, load_tasks
from art_cli.main import resume_hint
from art_compare.sides import has_evaluation, named
from art_core.errors import ConfigError
from art_core.store.run_folder import new_run_dir

LIVE = "live"


@dataclass(frozen=True)
class Experiment:
    """What runs on every side, each as the command line names it."""

    agent: str
    tasks: str
    reward: str

    def measured(self, specs: Sequence[str], say: Callable[[str], None]) -> list[str]:
        """Return ``specs``, each with a folder that holds its evaluation; those that have none are evaluated here.

        Besides folders a spec may be ``live``, a model, or ``MODEL@ADDRESS``, each with ``NAME=`` before it. The agent's own
        provider comes first: a stand-in for its key, which the others need, would hide that the key is missing.
        """
        folders = {spec: spec for spec in specs if has_evaluation(spec)}
        missing = {spec: _model(spec) for spec in specs if spec not in folders}
        for spec, (name, model, address) in sorted(missing.items(), key=lambda item: item[1][1] != LIVE):
            folder = new_run_dir(f"eval-{Path(model).name}")
            say(f"measuring {spec}: {folder}")
            self._evaluate(model, address, folder)
            folders[spec] = f"{name or Path(model).name}={folder}"
        return [folders[spec] for spec in specs]

    def _evaluate(self, model: str, address: str | None, folder: Path) -> None:
        import art_core as art

        live = model == LIVE
        settings = {"engine": address} if address else {}
        agent = (load_object if live else load_agent)(self.agent)
        kind = "--live" if live else f"--model {model}"
        again = f"art eval {self.agent} {self.tasks} --reward {self.reward} {kind} --run-dir {folder}"
        with resume_hint(folder, again):
            art.evaluate_sync(
                agent, load_tasks(self.tasks), reward=load_reward(self.reward), model=model, run_dir=folder, **settings
            )


def _model(spec: str) -> tuple[str | None, str, str | None]:
    """Return the name, the model and the address of ``[NAME=]MODEL[@ADDRESS]``. Raises ConfigError for an address alone."""
    name, model = named(spec)
    if model.startswith(("http://", "https://")):
        raise ConfigError(f"{model} may serve several models; name one: MODEL@{model}")
    model, at, rest = model.partition("@http")
    return name, model, f"http{rest}" if at else None
