"""What is installed, what is missing for what, and whether a GPU is usable. Imports nothing heavy but to ask for the GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sqlite3
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from art_cli.catalogue import ADAPTERS, PROVIDERS, WITHOUT_PLUGIN, as_function, how_to_install
from art_cli.variables import CHECKED
from art_core.errors import ConfigError
from art_core.learner import unsloth
from art_core.plugins import Installed, Plugins

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


@dataclass(frozen=True)
class Finding:
    part: str
    state: str
    advice: str = ""
    broken: bool = False
    """True where art_core cannot work at all as it is."""


def examine() -> list[Finding]:
    """Return every finding, in the order of importance."""
    found = [_python(), _sqlite()]
    for package, purpose in NEEDED_BY.items():
        found.append(_package(package, purpose))
    found += [_gpu(), _unsloth(), *_engines()]
    plugins = Plugins().installed()
    found += [Finding(f"plugin {it.name}", f"{it.distribution} {it.version}") for it in plugins]
    found += [Finding(f"plugin for {it.name}", it.state, it.advice) for it in frameworks(plugins) if it.advice]
    return found


def variables() -> list[Finding]:
    """Return which of the ``CHECKED`` environment variables are set, never their values, and what is done with each."""
    have = {it.distribution for it in Plugins().installed()}
    found = []
    for it in CHECKED:
        does = it.does if it.needs in {"", *have} else f"{it.does}: {how_to_install(it.needs)}"
        found.append(Finding(it.name, it.state(), does))
    return found


@dataclass(frozen=True)
class Framework:
    """An agent framework that can be imported here."""

    name: str
    """Of its package."""
    state: str
    advice: str = ""
    """What to do; empty where its plugin is installed."""


def frameworks(installed: Iterable[Installed]) -> list[Framework]:
    """Return the known frameworks that can be imported here, with what each still needs."""
    have = {it.distribution for it in installed}
    found = []
    for package, distribution in ADAPTERS.items():
        if _importable(package):
            advice = "" if distribution in have else how_to_install(distribution)
            found.append(Framework(package, "missing" if advice else distribution, advice))
    for package, model in WITHOUT_PLUGIN.items():
        if _importable(package):
            found.append(Framework(package, "works as a function", f"def agent(task), {as_function(model)}"))
    return found


def _importable(package: str) -> bool:
    """Say whether a framework is there; a user's own folder called agents is not the OpenAI Agents SDK."""
    if package == "agents":
        return "openai-agents" in importlib.metadata.packages_distributions().get(package, ())
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _python() -> Finding:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    return Finding("python", version, "" if fine else "art_core needs Python 3.11 or newer", broken=not fine)


def _sqlite() -> Finding:
    with sqlite3.connect(":memory:") as connection:
        try:
            connection.execute("create virtual table t using fts5(x)")
        except sqlite3.OperationalError:
            return Finding("sqlite", f"{sqlite3.sqlite_version}, without FTS5", "the email example's search needs FTS5")
    return Finding("sqlite", f"{sqlite3.sqlite_version}, with FTS5")


def _package(package: str, purpose: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(package, "missing", f"needed for {purpose}")
    names = importlib.metadata.packages_distributions().get(package, [package])
    # Several distributions may share a package (langgraph-prebuilt installs into langgraph too).
    own = min(names, key=lambda name: name.replace("-", "_") != package)
    return Finding(package, importlib.metadata.version(own))


def _unsloth() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("unsloth", "unknown", "torch is missing")
    if reason := unsloth.missing():
        return Finding("unsloth", "not usable", f"optional, LoRA with its kernels: {reason}")
    return Finding(
        "unsloth", f"{importlib.metadata.version('unsloth')}, {'' if unsloth.has_gpu() else 'no '}GPU kernels"
    )


def _engines() -> list[Finding]:
    offers = Plugins().offers("register_engines")
    return [Finding(name, *offer.describe()) for name, offer in offers.items() if offer.describe]


def install(name: str, say: Callable[[str], None]) -> None:
    """Install what the engine ``name`` needs. Raises ConfigError if it needs nothing."""
    plugins = Plugins()
    offer = plugins.offer("register_engines", name)
    if offer.install is None:
        able = [other for other, it in plugins.offers("register_engines").items() if it.install]
        raise ConfigError(
            f"the engine {name!r} has nothing to install; these have: {', '.join(sorted(able)) or 'none (art-vllm adds vllm)'}"
        )
    offer.install(say)


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "unknown", "torch is missing")
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Finding("GPU", f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if torch.version.cuda is None:
        return Finding(
            "GPU", "not usable", "this torch is a CPU build; models of up to some million parameters train on it"
        )
    return Finding("GPU", "not usable", "torch finds no CUDA device: check the driver with nvidia-smi")
