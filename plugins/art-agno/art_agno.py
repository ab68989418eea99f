"""The plugin for Agno: an ``Agent`` or a ``Team`` is an agent, and model calls have its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from art_core import destination, hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a copy of an ``Agent`` or a ``Team`` with a task as its input; the output is the content of its result."""
    if not is_a(agent, "agno.agent.Agent", "agno.team.Team"):
        return None

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        # With a database, rollouts in the same session would continue each other.
        result = await agent.deep_copy().arun(task_input, stream=False, session_id=address.rollout_id)
        if result.status == "ERROR":  # Agno returns a failure, with its message as the content
            raise RuntimeError(result.content)
        return result.content

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent or team that is calling, and let no cache answer in a rollout."""
    when_imported("agno.agent._run", _name_agents)
    when_imported("agno.team._run", _name_agents)
    _wrap_cache()


def _name_agents(module: Any) -> None:
    # ``Agent.run`` and ``arun`` return before the run begins; these functions of an agent or team are the run.
    for kind in ("run", "continue_run"):
        for name in (f"_{kind}", f"_{kind}_stream", f"_a{kind}", f"_a{kind}_stream"):
            name_while(module, name, lambda agent: agent.name or type(agent).__name__)


@functools.cache
def _wrap_cache() -> None:
    when_imported("agno.models.base", _keep_cache_out)


def _keep_cache_out(module: Any) -> None:
    models = module.Model
    for name in ("_get_cached_model_response", "_save_model_response_to_cache", "_save_streaming_responses_to_cache"):
        setattr(models, name, _outside_rollouts(getattr(models, name)))


def _outside_rollouts(use: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(use)
    def used(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if destination(self.id) else use(self, *args, **kwargs)

    return used
