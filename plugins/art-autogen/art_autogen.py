"""The plugin for AutoGen: a function that makes an agent or a team is an agent, and model calls have the agent's name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from art_core import destination, hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while, refuse_shared


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run a chat agent or a team with a task; the output is the content of its last message."""
    if not is_a(agent, "autogen_agentchat.agents.BaseChatAgent", "autogen_agentchat.teams.BaseGroupChat"):
        return None
    if shared:
        refuse_shared(agent)

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        from autogen_core import CancellationToken

        # A team that is cancelled as a task would first come to its end.
        token = CancellationToken()
        running = asyncio.ensure_future(agent.run(task=task_input, cancellation_token=token))
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            token.cancel()
            await asyncio.wait({running})
            raise
        return running.result().messages[-1].content

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling, or the manager of a team, and let no cache answer in a rollout."""
    when_imported("autogen_agentchat.agents", _name_agents)
    when_imported("autogen_agentchat.teams._group_chat._sequential_routed_agent", _name_members)
    _wrap_cache()


def _name_agents(module: Any) -> None:
    agent, assistant = module.BaseChatAgent, module.AssistantAgent
    for owner, method in ((agent, "run"), (agent, "run_stream"), (assistant, "on_messages_stream")):
        name_while(owner, method, lambda running: running.name)


def _name_members(module: Any) -> None:
    # What handles a message is a team's manager, which may ask a model who is next, or the container of a member.
    name_while(
        module.SequentialRoutedAgent,
        "on_message_impl",
        lambda handler: handler._agent.name if hasattr(handler, "_agent") else handler._name,
    )


@functools.cache
def _wrap_cache() -> None:
    when_imported("autogen_ext.models.cache", _keep_cache_out)


def _keep_cache_out(module: Any) -> None:
    cache = module.ChatCompletionCache
    cache.create = _outside_rollouts(cache.create)
    cache.create_stream = _outside_rollouts(cache.create_stream)


def _outside_rollouts(ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The model has no public name.
        model = getattr(self.client, "_raw_config", {}).get("model")
        if destination(model):
            return getattr(self.client, ask.__name__)(*args, **kwargs)
        return ask(self, *args, **kwargs)

    return asked
