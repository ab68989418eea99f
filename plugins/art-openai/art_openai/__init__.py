"""The plugin for agents that use the OpenAI client or the OpenAI Agents SDK. Imports neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl, name_agents
from art_openai import agents_sdk, client

if TYPE_CHECKING:
    from art_core.types import RunAgent

__all__ = ["adapt_agent", "redirect_clients"]


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run an ``agents.Agent`` to its final output; None for anything else."""
    return agents_sdk.adapt(agent)


@hookimpl
def redirect_clients() -> None:
    """Wrap the OpenAI library's clients and watch the Agents SDK's models, when they are imported."""
    client.wrap()
    agents_sdk.watch()
    name_agents(agents_sdk.calling_agent)
