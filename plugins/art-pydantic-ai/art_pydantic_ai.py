"""Runs PydanticAI agents, and has the policy answer for every provider's models.

OpenAI's models use the OpenAI client, which art-openai redirects. All other models implement ``Model.request`` and
``Model.request_stream``: inside a rollout an OpenAI chat model answers there instead, with the same messages, settings, tools and
output, and its client is redirected like any other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from art_core import destination, hookimpl, name_agents, when_imported
from art_core.errors import CaptureError

if TYPE_CHECKING:
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    from art_core.types import RolloutAddress, RunAgent


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run an agent with ``run`` and return its output; None for anything else."""
    # If PydanticAI has not been imported, this can't be one of its agents.
    agents = sys.modules.get("pydantic_ai.agent")
    if agents is None or not isinstance(agent, agents.AbstractAgent):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        arguments = input if isinstance(input, dict) else {"user_prompt": input}
        # Otherwise the agent would be named after our variable.
        return (await agent.run(**{"infer_name": False, **arguments})).output

    return run


@hookimpl
def redirect_clients() -> None:
    """Have the policy answer for models that art-openai does not redirect, and name the agent that is calling."""
    name_agents(_agent)
    _wrap()


def _agent() -> str | None:
    """Return the name of the agent that is calling; None outside an agent, and if it has no name."""
    contexts = sys.modules.get("pydantic_ai._run_context")  # imported if an agent is running
    context = contexts and contexts.get_current_run_context()  # there is no public function for this
    return context.agent.name if context is not None and context.agent is not None else None


@functools.cache
def _wrap() -> None:
    when_imported("pydantic_ai.models", lambda module: _redirect_all(module.Model))


def _redirect_all(models: type[Model]) -> None:
    for kind in _derived(models):
        _redirect(kind)
    later = models.__init_subclass__.__func__

    @classmethod
    @functools.wraps(later)
    def redirected(cls: type[Model], **kwargs: Any) -> None:
        later(cls, **kwargs)
        _redirect(cls)

    models.__init_subclass__ = redirected


def _derived(kind: type) -> Iterator[type]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)


def _redirect(kind: type[Model]) -> None:
    """Wrap the methods that a model class itself defines; inherited ones are wrapped in the base class."""
    for name, wrap in (("request", _answered), ("request_stream", _streamed), ("batch_create", _refused)):
        if name in vars(kind):
            setattr(kind, name, wrap(vars(kind)[name]))


def _answered(request: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(request)
    async def answered(
        self: Model, messages: Any, model_settings: Any, model_request_parameters: ModelRequestParameters, **kwargs: Any
    ) -> Any:
        parameters, policy = _redirected(self, model_request_parameters)
        send = policy.request if policy else functools.partial(request, self)
        return await send(messages, model_settings, parameters, **kwargs)

    return answered


def _streamed(request_stream: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    @functools.wraps(request_stream)
    async def streamed(
        self: Model,
        messages: Any,
        model_settings: Any,
        model_request_parameters: ModelRequestParameters,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[StreamedResponse]:
        parameters, policy = _redirected(self, model_request_parameters)
        send = policy.request_stream if policy else functools.partial(request_stream, self)
        async with send(messages, model_settings, parameters, *args, **kwargs) as stream:
            yield stream

    return streamed


def _refused(batch_create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(batch_create)
    async def refused(self: Model, *args: Any, **kwargs: Any) -> Any:
        if destination(self.model_name) is not None:
            raise CaptureError(
                f"{type(self).__name__} ({self.model_name!r}) was asked for a batch inside a rollout, which cannot be "
                f"recorded: use single requests, or exempt the model with passthrough=[{self.model_name!r}]"
            )
        return await batch_create(self, *args, **kwargs)

    return refused


def _redirected(
    model: Model, parameters: ModelRequestParameters
) -> tuple[ModelRequestParameters, OpenAIChatModel | None]:
    """Return the parameters of a request and the model that answers it instead of ``model``; None if it answers itself.

    Raises CaptureError if its provider would have to run a tool.
    """
    from pydantic_ai.models.fallback import FallbackModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.models.wrapper import WrapperModel

    # These delegate to other models.
    if isinstance(model, WrapperModel | FallbackModel) or destination(model.model_name) is None:
        return parameters, None
    parameters = _without_native_tools(model, parameters)
    # These use the OpenAI client.
    if isinstance(model, OpenAIChatModel | OpenAIResponsesModel):
        return parameters, None
    # The messages were prepared with this model's profile, so the answer must be read with the same setting.
    tokens = "may_tokenize_special_tokens_in_content"
    profile = {tokens: model.profile.get(tokens, False)}
    return parameters, OpenAIChatModel(model.model_name, provider=_provider(), settings=model.settings, profile=profile)


def _without_native_tools(model: Model, parameters: ModelRequestParameters) -> ModelRequestParameters:
    """Drop the tools that a provider runs and the agent can do without; raises CaptureError for any other."""
    local = {tool.unless_native for tool in parameters.function_tools}
    for tool in parameters.native_tools:
        if not tool.optional and tool.unique_id not in local:
            raise CaptureError(
                f"{type(model).__name__} was called inside a rollout with {type(tool).__name__}, which its provider runs; the "
                "policy has no such provider. Use a tool that the agent runs itself (local= of the capability), or exempt the "
                f"model with passthrough=[{model.model_name!r}]"
            )
    return replace(parameters, native_tools=[])


@functools.cache
def _provider() -> OpenAIProvider:
    from openai import AsyncOpenAI
    from pydantic_ai.providers.openai import OpenAIProvider

    # art-openai redirects its requests to the rollout's address, with a client of its own.
    return OpenAIProvider(openai_client=AsyncOpenAI(api_key="set-per-call", base_url="http://set-per-call"))
