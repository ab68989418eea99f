"""Which well-known models a GPU and a budget can train: ``art plan`` without ``--model``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from art_cli.dry_run import duration
from art_core.errors import ConfigError
from art_vllm.cost import ASSUMED, Cost, cost
from art_vllm.known_shapes import find_shape
from art_vllm.plan import Plan, Setup, plan
from art_vllm.workload import Workload

APACHE, MIT = "Apache-2.0", "MIT"
CANDIDATES = {
    "Qwen/Qwen3-0.6B": APACHE,
    "openbmb/MiniCPM5-1B": APACHE,
    "openbmb/MiniCPM5-2B": APACHE,
    "ibm-granite/granite-4.2-3b": APACHE,
    "Nanbeige/Nanbeige4.1-3B": APACHE,
    "Qwen/Qwen3-4B-Instruct-2507": APACHE,
    "Qwen/Qwen3-8B": APACHE,
    "ibm-granite/granite-4.2-8b": APACHE,
    "Qwen/Qwen3-14B": APACHE,
    "moonshotai/Moonlight-16B-A3B-Instruct": MIT,
    "ibm-granite/granite-4.2-30b": APACHE,
    "zai-org/GLM-4.7-Flash": MIT,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": APACHE,
    "Qwen/Qwen3-32B": APACHE,
    "meta-llama/Llama-3.3-70B-Instruct": "Llama 3.3 Community",
}
"""Models for agents, with their licences as their publishers name them, smallest first.

An older model stays if no newer one has its size and licence, or if Unsloth trains it in 4 bits and the newer one not: it
then fits a smaller GPU. Hybrids such as Qwen3.5 are missing, because vLLM can't use adapters of their language model.
"""


@dataclass(frozen=True)
class Candidate:
    """A model, and what training it takes."""

    licence: str
    planned: Plan
    step: Cost
    steps: int

    @property
    def name(self) -> str:
        return self.planned.setup.shape.name

    @property
    def seconds(self) -> float | None:
        """Of all steps; None if the GPU's speed is unknown or the model doesn't fit."""
        return None if self.step.seconds is None else self.steps * self.step.seconds

    @property
    def dollars(self) -> float | None:
        """Of all steps; None without seconds or a price per hour."""
        return None if self.step.dollars is None else self.steps * self.step.dollars

    def within(self, budget: float | None) -> bool:
        """Whether it fits the GPU and costs at most ``budget`` dollars."""
        return self.planned.fits and (budget is None or (self.dollars is not None and self.dollars <= budget))

    def as_json(self, budget: float | None) -> dict[str, Any]:
        """Return its row for ``--json``."""
        shape = self.planned.setup.shape
        sizes = {"parameters": shape.parameters, "active_parameters": shape.active}
        fit = {"fits": self.planned.fits, "within_budget": self.within(budget), "sequences": self.planned.sequences}
        return {
            "model": self.name,
            "licence": self.licence,
            **sizes,
            **fit,
            "seconds": self.seconds,
            "dollars": self.dollars,
        }


@dataclass(frozen=True)
class Candidates:
    """The models that were planned, and why others can't be."""

    planned: Sequence[Candidate]
    refused: Mapping[str, str]
    """Name -> reason."""


def candidates(
    settings: Mapping[str, Any],
    workload: Workload,
    *,
    context: int | None = None,
    licence: str | None = None,
    dollars_per_hour: float | None = None,
    steps: int = 20,
) -> Candidates:
    """Plan every candidate. ``settings``: the fields of ``Setup`` besides shape and context.

    ``context``: default: up to ``Setup.context``. ``licence``: a part of the licence's name, in any case. Raises ConfigError if
    no candidate has such a licence.
    """
    chosen = {name: its for name, its in CANDIDATES.items() if licence is None or licence.lower() in its.lower()}
    if not chosen:
        names = ", ".join(sorted(set(CANDIDATES.values())))
        raise ConfigError(f"no candidate has the licence {licence!r}; they have {names}")
    planned, refused = [], {}
    for name, its in chosen.items():
        try:
            own = plan_of(name, settings, context)
        except ConfigError as error:
            refused[name] = str(error)
        else:
            planned.append(Candidate(its, own, cost(own, workload, dollars_per_hour), steps))
    return Candidates(planned, refused)


def plan_of(model: str, settings: Mapping[str, Any], context: int | None) -> Plan:
    """Plan a model with the context asked for, by default up to ``Setup.context``. Raises ConfigError for what it can't have."""
    shape = find_shape(model)
    return plan(Setup(shape=shape, context=context or min(Setup.context, shape.positions), **settings))


def lines(found: Iterable[Candidate]) -> Iterator[str]:
    """Yield a table, in the order of ``found``."""
    yield f"{'model':40}{'licence':22}{'parameters':20}{'weights':9}{'at once':>8}{'time':>8}{'dollars':>9}"
    for it in found:
        shape, setup = it.planned.setup.shape, it.planned.setup
        size = f"{shape.parameters / 1e9:.1f}B" + (f", {shape.active / 1e9:.1f}B active" if shape.experts else "")
        weights = "4 bits" if setup.in_4bit else "16 bits"
        time = "-" if it.seconds is None else duration(it.seconds)
        dollars = "-" if it.dollars is None else f"{it.dollars:.2f}"
        yield f"{it.name:40}{it.licence:22}{size:20}{weights:9}{it.planned.sequences:>8}{time:>8}{dollars:>9}"


def print_candidates(found: Candidates, setting: str, budget: float | None, *, as_json: bool) -> bool:
    """Print the models that fit GPU and budget, largest first, and name the others. Return whether there is one.

    ``setting``: what they are planned for.
    """
    fitting = sorted(
        (it for it in found.planned if it.within(budget)), key=lambda it: -it.planned.setup.shape.parameters
    )
    if as_json:
        typer.echo(json.dumps([it.as_json(budget) for it in found.planned]))
        return bool(fitting)
    typer.echo(setting)
    if fitting:
        typer.echo("\n".join(lines(fitting)))
        typer.echo(f"estimates: {ASSUMED}")
    if large := [it.name for it in found.planned if not it.planned.fits]:
        typer.echo(f"too large: {', '.join(large)}")
    if dear := [it.name for it in found.planned if it.planned.fits and not it.within(budget)]:
        typer.echo(f"over the budget of ${budget:g}: {', '.join(dear)}")
    for name, reason in found.refused.items():
        typer.echo(f"not {name}: {reason}")
    if fitting:
        typer.echo(
            "next: the same command with --model NAME, without --budget and --licence, shows its memory and settings"
        )
    return bool(fitting)
