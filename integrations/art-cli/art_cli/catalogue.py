"""What this repository's other distributions provide and how to install them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from art_cli.variables import NO_OPENPIPE

TO_DO = "what to do (pip install -e: in the checkout of art)"
"""The head of a column of a table."""
FRAMEWORKS = {
    "agent_framework": "art-agent-framework",
    "agno": "art-agno",
    "autogen_agentchat": "art-autogen",
    "claude_agent_sdk": "art-claude-agent",
    "crewai": "art-crewai",
    "dspy": "art-dspy",
    "google.adk": "art-google-adk",
    "haystack": "art-haystack",
    "llama_index": "art-llama-index",
    "smolagents": "art-smolagents",
    "strands": "art-strands",
}
"""Package of an agent's class -> the distribution that adapts it, on top of art-http."""
ADAPTERS = {
    "langgraph": "art-langgraph",
    "langchain": "art-langchain",
    "langchain_core": "art-langchain",
    "openai": "art-openai",
    "agents": "art-openai",
    "pydantic_ai": "art-pydantic-ai",
    **dict.fromkeys(("anthropic", "google.genai", "ollama", "litellm", "mistralai"), "art-http"),
    **FRAMEWORKS,
}
"""Package of an agent's class, or of a model's client -> the distribution that adapts it."""
WITHOUT_PLUGIN = {
    "instructor": "instructor.from_openai(...)",
    "semantic_kernel": "OpenAIChatCompletion(ai_model_id=...)",
}
"""Package of a known framework that needs no plugin -> its model that calls the OpenAI client."""
PROVIDERS = {
    "ruler": "art-ruler",
    "embedded": "art-embedded",
    "vllm": "art-vllm",
    "http": "art-vllm",
    "ray": "art-ray",
    "tinker": "art-tinker",
    "wandb": "art-wandb",
    "langfuse": "art-langfuse",
    "otel": "art-langfuse",
    "live": "art-http",  # which needs art-gateway, where the engine is
}
"""Name of a reward, engine, executor, learner or tracker -> the distribution that provides it."""
COMMANDS = {
    "audit": "art-audit",
    "compare": "art-compare",
    "export": "art-vllm",
    "gateway": "art-gateway",
    "import": "art-langfuse",
    "improve": "art-improve",
    "judge": "art-ruler",
    "optimize": "art-gepa",
    "plan": "art-vllm",
    "retrain": "art-improve",
    "route": "art-gateway",
    "serve": "art-server",
    "tasks": "art-tasks",
    "view": "art-server",
    "watch": "art-gateway",
    "worker": "art-server",
}
"""Command of ``art`` -> the distribution that provides it."""
NEEDS = {
    ADAPTERS["langgraph"]: [ADAPTERS["langchain"]],
    ADAPTERS["langchain"]: [ADAPTERS["openai"]],
    ADAPTERS["pydantic_ai"]: [ADAPTERS["openai"]],
    "art-http": ["art-gateway"],
    **{plugin: ["art-http"] for plugin in FRAMEWORKS.values()},
    "art-improve": ["art-compare", "art-gateway", "art-gepa", "art-tasks"],
    "art-langfuse": ["art-embedded", "art-tasks"],
    "art-tinker": ["art-embedded"],
    "art-vllm": ["art-embedded"],
    "art-server": ["art-classic", "art-compare"],
    "art-classic": ["art-embedded"],
}
"""A distribution -> those of this repository that it needs besides art-core and art-cli."""
PLUGINS = {*ADAPTERS.values(), "art-classic", "art-openpipe"}
"""Distributions under ``plugins/``."""
INTEGRATIONS = {
    "art-audit", "art-cli", "art-compare", "art-embedded", "art-gateway", "art-gepa", "art-gguf", "art-hybrid", "art-improve",
    "art-langfuse", "art-ray", "art-ruler", "art-server", "art-tasks", "art-tinker", "art-vllm", "art-wandb",
}  # fmt: skip
"""Distributions under ``integrations/``."""


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution from a checkout; they are not on a package index."""
    return f"pip install {' '.join(_folders(distribution))}"


def _folders(distribution: str) -> Iterator[str]:
    for needed in NEEDS.get(distribution, []):
        yield from _folders(needed)
    yield f"-e {'plugins' if distribution in PLUGINS else 'integrations'}/{distribution}"


def as_function(model: str) -> str:
    """Return how to train an agent of a framework without a plugin, whose ``model`` calls the OpenAI client."""
    return f"with {model} and art-openai, or with any client and address.base_url, def agent(task, address)"


def for_agent(agent: object) -> str | None:
    """Return what to do about an agent that no installed plugin adapts; None if its framework is unknown."""
    module = f"{type(agent).__module__}."
    for package, adapter in ADAPTERS.items():
        if module.startswith(f"{package}.") and not _is_installed(adapter):
            return f"in the checkout of art, run: {how_to_install(adapter)}"
    for package, model in WITHOUT_PLUGIN.items():
        if module.startswith(f"{package}."):
            return f"wrap it in a function of one task, def agent(task), {as_function(model)}"
    return None


def for_name(name: str) -> str | None:
    """Return how to install the reward, engine or other part ``name``, or why it is refused; None if it is unknown."""
    if name == "openpipe":
        return f"refused: {NO_OPENPIPE}"
    return f"in the checkout of art, run: {how_to_install(PROVIDERS[name])}" if name in PROVIDERS else None


def for_command(name: str) -> str | None:
    """Return how to install the command ``name`` of ``art``; None if it is unknown."""
    distribution = COMMANDS.get(name)
    return distribution and (
        f"`art {name}` is a command of {distribution}, which is not installed or disabled; in the checkout of art, run: "
        f"{how_to_install(distribution)}"
    )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
