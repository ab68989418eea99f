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
from art_vllm.gpus import GIB, machine
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

An older model stays if no newer one has its size and licence, or if Unsloth trains it and the newer one trains with torch in
float32: it then fits a smaller GPU. Hybrids such as Qwen3.5 are missing, because vLLM can't use adapters of their language
model.
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

    @property
    def memory(self) -> int:
        """Bytes on one GPU: what the plan takes at its peak; for a model that doesn't fit, what it needs at least."""
        return self.planned.peak if self.planned.fits else self.planned.usable + self.planned.missing

    def within(self, budget: float | None) -> bool:
        """Whether it fits the GPU and costs at most ``budget`` dollars."""
        return self.planned.fits and (budget is None or (self.dollars is not None and self.dollars <= budget))

    def as_json(self, budget: float | None) -> dict[str, Any]:
        """Return its row for ``--json``."""
        shape = self.planned.setup.shape
        sizes = {"parameters": shape.parameters, "active_parameters": shape.active}
        fit = {"fits": self.planned.fits, "within_budget": self.within(budget), "sequences": self.planned.sequences}
        run = {"memory": self.memory, "seconds": self.seconds, "dollars": self.dollars}
        return {"model": self.name, "licence": self.licence, **sizes, **fit, **run}


@dataclass(frozen=True)
class Candidates:
    """The models that were planned for a GPU, and why others can't be."""

    gpu: str
    """Its name, with the number of GPUs."""
    dollars_per_hour: float | None
    """Of one GPU."""
    planned: Sequence[Candidate]
    refused: Mapping[str, str]
    """Name -> reason."""

    @property
    def heading(self) -> str:
        price = "" if self.dollars_per_hour is None else f" at ${self.dollars_per_hour:g} per GPU and hour"
        return f"{self.gpu}{price}"

    def within(self, budget: float | None) -> list[Candidate]:
        """Return those that fit GPU and budget, largest first."""
        fitting = (it for it in self.planned if it.within(budget))
        return sorted(fitting, key=lambda it: -it.planned.setup.shape.parameters)

    def as_json(self, budget: float | None) -> list[dict[str, Any]]:
        """Return the rows for ``--json``."""
        on = {"gpu": self.gpu, "dollars_per_hour": self.dollars_per_hour}
        return [it.as_json(budget) | on for it in self.planned]


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
    return Candidates(machine(settings["gpu"], settings["gpus"]), dollars_per_hour, planned, refused)


def plan_of(model: str, settings: Mapping[str, Any], context: int | None) -> Plan:
    """Plan a model with the context asked for, by default up to ``Setup.context``. Raises ConfigError for what it can't have."""
    shape = find_shape(model)
    return plan(Setup(shape=shape, context=context or min(Setup.context, shape.positions), **settings))


def lines(found: Iterable[Candidate]) -> Iterator[str]:
    """Yield a table, in the order of ``found``."""
    yield (
        f"{'model':40}{'licence':22}{'parameters':20}{'weights':9}{'memory':>11}{'at once':>8}{'time':>8}{'dollars':>9}"
    )
    for it in found:
        shape, setup = it.planned.setup.shape, it.planned.setup
        size = f"{shape.parameters / 1e9:.1f}B" + (f", {shape.active / 1e9:.1f}B active" if shape.experts else "")
        weights = "4 bits" if setup.in_4bit else "32 bits" if setup.trainer == "torch" else "16 bits"
        time = "-" if it.seconds is None else duration(it.seconds)
        dollars = "-" if it.dollars is None else f"{it.dollars:.2f}"
        sequences = it.planned.sequences
        yield (f"{it.name:40}{it.licence:22}{size:20}{weights:9}{_gib(it):>11}{sequences:>8}{time:>8}{dollars:>9}")


def _gib(it: Candidate) -> str:
    return f"{it.memory / GIB:.1f} GiB"


def print_candidates(found: Sequence[Candidates], setting: str, budget: float | None, *, as_json: bool) -> bool:
    """Print the models that fit each GPU and the budget, largest first, and name the others. Return whether there is one.

    ``setting``: what a run does. All GPUs refuse the same models, because their limits are the models' own.
    """
    fitting = any(each.within(budget) for each in found)
    if as_json:
        typer.echo(json.dumps([row for each in found for row in each.as_json(budget)]))
        return fitting
    typer.echo(setting)
    for each in found:
        typer.echo("\n".join(_section(each, budget)))
    for name, reason in found[0].refused.items():
        typer.echo(f"not {name}: {reason}")
    if fitting:
        typer.echo(f"estimates: {ASSUMED}")
        same = "the same command with" if len(found) == 1 else "the same command with --gpu GPU,"
        typer.echo(f"next: {same} --model NAME, without --budget and --licence, shows its memory and settings")
    return fitting


def _section(found: Candidates, budget: float | None) -> Iterator[str]:
    yield f"{found.heading}:"
    if fitting := found.within(budget):
        yield from lines(fitting)
    if large := [f"{it.name} ({_gib(it)})" for it in found.planned if not it.planned.fits]:
        yield f"too large: {', '.join(large)}"
    if dear := [it.name for it in found.planned if it.planned.fits and not it.within(budget)]:
        yield f"over the budget of ${budget:g}: {', '.join(dear)}"
