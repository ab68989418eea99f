"""What is installed, what is missing and for what, and whether a GPU is usable. Only the GPU check imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sqlite3
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from art_cli.catalogue import ADAPTERS, PROVIDERS, TO_DO, WITHOUT_PLUGIN, as_function, how_to_install
from art_cli.variables import CHECKED, NOT_SET, SET
from art_core.errors import ConfigError
from art_core.learner import unsloth
from art_core.plugin_api import Plugins

TRAIN = "pip install -e '.[train]' -e integrations/art-cli -e integrations/art-embedded"
NEEDED_BY = {
    "torch": f"training and the embedded engine: {TRAIN}",
    "transformers": f"training and the embedded engine: {TRAIN}",
    "safetensors": f"training and the embedded engine: {TRAIN}",
    "peft": f"LoRA: {TRAIN}",
    "matplotlib": "the chart: pip install matplotlib",
    "openai": f"agents that use the OpenAI client: {how_to_install(ADAPTERS['openai'])}",
    "langchain_core": f"LangChain agents: {how_to_install(ADAPTERS['langchain'])}",
    "langgraph": f"LangGraph agents: {how_to_install(ADAPTERS['langgraph'])}",
    "pydantic_ai": f"PydanticAI agents: {how_to_install(ADAPTERS['pydantic_ai'])}",
    "litellm": f"RULER, the LLM judge: {how_to_install(PROVIDERS['ruler'])}",
}
"""Importable package -> what it is for and how to get it."""
MISSING, AS_FUNCTION, PLUGIN = "missing", "works as a function", "plugin "
"""The state of a package that isn't installed, that of a framework that needs no plugin; how the part of a plugin begins."""
MODEL_INSTALLERS = "art.model_installers"
"""Entry points of this group, ``install(say)``, install a model that no distribution ships."""


@dataclass(frozen=True)
class Finding:
    part: str
    state: str
    advice: str = ""
    broken: bool = False
    """Whether art_core cannot work at all because of it."""


def report(findings: Sequence[Finding], variables: Sequence[Finding], console: Console) -> bool:
    """Print whether art can train here, then what is missing or wrong, then the rest; return whether art can work at all."""
    console.print(verdict(findings), highlight=False, soft_wrap=True)
    wrong = [each for each in variables if each.state not in (SET, NOT_SET)]
    to_do = [each for each in findings if each.advice and each.state != AS_FUNCTION] + wrong
    if to_do:
        table = Table("missing or wrong", Column("state", overflow="fold"), Column(TO_DO, overflow="fold"))
        for each in to_do:
            table.add_row(each.part, each.state, each.advice)
        console.print(table)  # without markup: rich parses .[train] as a style
    plugins = [each for each in findings if each.part.startswith(PLUGIN) and not each.advice]
    parts = [each for each in findings if each not in (*to_do, *plugins)]
    for what, names in {
        "in order": [f"{each.part} {each.state}" for each in parts],
        "plugins": sorted(each.part.removeprefix(PLUGIN) for each in plugins),
        "variables that are set": [each.part for each in variables if each.state == SET],
        "not set (docs/environment.md says what they do)": [each.part for each in variables if each.state == NOT_SET],
    }.items():
        if names:
            console.print(f"{what}: {', '.join(names)}", highlight=False, soft_wrap=True)
    return not any(finding.broken for finding in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """Return in a line what can be done here."""
    if broken := [finding for finding in findings if finding.broken]:
        return f"art can't work here: {broken[0].advice}, and this is {broken[0].state}"
    gone = [each.part for each in findings if each.state == MISSING]
    if missing := [part for part in ("torch", "transformers", "safetensors", "peft") if part in gone]:
        return f"art can record, evaluate and compare here, but not train: {', '.join(missing)} missing"
    gpus = [each.state for each in findings if each.part == "GPU" and not each.advice]
    return (
        f"art can train here, on {gpus[0]}" if gpus else "art can train small models here, on the CPU; no GPU is usable"
    )


def examine() -> list[Finding]:
    """Return all findings, most important first."""
    findings = [_python(), _sqlite()]
    findings += [_package(package, purpose) for package, purpose in NEEDED_BY.items()]
    findings += [_gpu(), _unsloth(), *_engines()]
    plugins = Plugins().installed()
    findings += [Finding(f"{PLUGIN}{plugin.name}", f"{plugin.distribution} {plugin.version}") for plugin in plugins]
    distributions = {plugin.distribution for plugin in plugins}
    needy = [framework for framework in frameworks(distributions) if framework.advice]
    findings += [Finding(f"plugin for {framework.name}", framework.state, framework.advice) for framework in needy]
    return findings


def variables() -> list[Finding]:
    """Return the state of each of the ``CHECKED`` environment variables, never its value, and what it is for."""
    distributions = {plugin.distribution for plugin in Plugins().installed()}
    findings = []
    for variable in CHECKED:
        state, advice = variable.state(), variable.does
        if state == SET and variable.needs not in {"", *distributions}:
            state, advice = f"{SET}, but {variable.needs} is missing", f"{advice}: {how_to_install(variable.needs)}"
        elif state not in (SET, NOT_SET) and not variable.refused:
            advice = f"correct it or unset it: {advice}"
        findings.append(Finding(variable.name, state, advice))
    return findings


@dataclass(frozen=True)
class Framework:
    """An agent framework that is installed."""

    name: str
    """Name of its package."""
    state: str
    advice: str = ""
    """What to do; empty if its plugin is installed."""


def frameworks(distributions: Collection[str]) -> list[Framework]:
    """Return the known frameworks that are installed, with what each still needs beside the installed ``distributions``."""
    known = []
    for package, distribution in ADAPTERS.items():
        if _importable(package):
            advice = "" if distribution in distributions else how_to_install(distribution)
            known.append(Framework(package, "missing" if advice else distribution, advice))
    for package, model in WITHOUT_PLUGIN.items():
        if _importable(package):
            known.append(Framework(package, AS_FUNCTION, f"def agent(task), {as_function(model)}"))
    return known


def _importable(package: str) -> bool:
    if package == "agents":  # a user's own folder may be called agents too, like the OpenAI Agents SDK
        return "openai-agents" in importlib.metadata.packages_distributions().get(package, ())
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _python() -> Finding:
    version = platform.python_version()
    too_old = sys.version_info < (3, 11)
    return Finding("python", version, "art_core needs Python 3.11 or newer" if too_old else "", broken=too_old)


def _sqlite() -> Finding:
    with sqlite3.connect(":memory:") as connection:
        try:
            connection.execute("create virtual table t using fts5(x)")
        except sqlite3.OperationalError:
            return Finding("sqlite", f"{sqlite3.sqlite_version} without FTS5", "the email example's search needs FTS5")
    return Finding("sqlite", f"{sqlite3.sqlite_version} with FTS5")


def _package(package: str, purpose: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(package, MISSING, f"needed for {purpose}")
    distributions = importlib.metadata.packages_distributions().get(package, [package])
    # Several distributions may share a package (langgraph-prebuilt installs into langgraph too).
    eponymous = min(distributions, key=lambda name: name.replace("-", "_") != package)
    return Finding(package, importlib.metadata.version(eponymous))


def _unsloth() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("unsloth", "unknown", "torch is missing")
    if reason := unsloth.missing():
        return Finding("unsloth", "not usable", f"optional, LoRA with its kernels: {reason}")
    return Finding(
        "unsloth", f"{importlib.metadata.version('unsloth')}, {'' if unsloth.has_gpu() else 'no '}GPU kernels"
    )


def _engines() -> list[Finding]:
    """Return a finding for each engine that registered ``describe() -> (state, what to do)``."""
    offers = Plugins().offers("register_engines")
    return [Finding(name, *offer.describe()) for name, offer in offers.items() if offer.describe]


def install(name: str, say: Callable[[str], None]) -> None:
    """Install a model, or what an engine or a task suite needs. Raises ConfigError for a name that can't be installed."""
    plugins = Plugins()
    offers = plugins.offers("register_engines") | plugins.offers("register_tasks")
    installers = {offered: offer.install for offered, offer in offers.items() if offer.install}
    models = {entry.name: entry for entry in importlib.metadata.entry_points(group=MODEL_INSTALLERS)}
    if name in models:
        return models[name].load()(say)
    if name not in installers:
        names = ", ".join(sorted([*installers, *models])) or "nothing"
        raise ConfigError(
            f"art doctor can't install {name!r}; it can install: {names} (art-vllm adds vllm, art-gguf smollm2, art-tasks bfcl)"
        )
    installers[name](say)


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "unknown", "torch is missing")
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Finding("GPU", f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if torch.version.cuda is None:
        return Finding(
            "GPU",
            "not usable",
            "torch is a CPU build, on which models of up to about 150 million parameters can be trained",
        )
    return Finding("GPU", "not usable", "torch finds no CUDA device; check the driver with nvidia-smi")
