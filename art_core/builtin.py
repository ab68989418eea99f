"""What works with no plugin installed, as a plugin like any other: functions as agents, the learners, GRPO and its variants.

Heavy modules are imported when they are first needed.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

from art_core import losses
from art_core.errors import AgentError
from art_core.hookspecs import Register, hookimpl
from art_core.learner import unsloth
from art_core.runtime.memory import no_garbage_collection
from art_core.runtime.threads import thread_future
from art_core.types import RolloutAddress, RunAgent

if TYPE_CHECKING:
    from art_core.config import TrainConfig
    from art_core.types import Learner, Loss

log = logging.getLogger("art_core.learner")


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """A function of a task's input, or of the input and the ``RolloutAddress``, is an agent, sync or async."""
    if inspect.isclass(agent):
        return None
    yields = (inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.isgenerator, inspect.isasyncgen)
    if any(is_kind(it) for is_kind in yields for it in ([agent, agent.__call__] if callable(agent) else [agent])):
        raise AgentError(
            f"the agent {agent!r:.100} is a generator, which art doesn't run: return the output instead of yielding it"
        )
    if not callable(agent):
        return None
    if isinstance(agent, functools.partial) or inspect.isroutine(agent) or not shared:
        return _run_agent(agent)
    return _with_hint(_run_agent(agent), type(agent).__name__)


def _run_agent(agent: Any) -> RunAgent:
    takes_address = _required(agent) == 2
    if inspect.iscoroutinefunction(agent if inspect.isroutine(agent) else agent.__call__):

        async def run_async(task_input: Any, address: RolloutAddress) -> Any:
            return await (agent(task_input, address) if takes_address else agent(task_input))

        return run_async

    async def run_in_thread(task_input: Any, address: RolloutAddress) -> Any:
        arguments = (task_input, address) if takes_address else (task_input,)
        call = functools.partial(contextvars.copy_context().run, agent, *arguments)
        # A pool would make it wait for others. After a timeout the thread runs on until the agent returns.
        output = await asyncio.wrap_future(thread_future(f"rollout {address.rollout_id}", call))
        return await output if inspect.isawaitable(output) else output

    return run_in_thread


def _with_hint(run: RunAgent, kind: str) -> RunAgent:
    """Note in what an object raises while several rollouts run it that they may not be able to share it."""
    running = 0

    async def run_object(task_input: Any, address: RolloutAddress) -> Any:
        nonlocal running
        running += 1
        try:
            return await run(task_input, address)
        except Exception as error:
            if running > 1:
                error.add_note(
                    f"(If rollouts can't share a {kind}, pass a function without parameters that makes one: def agent(): "
                    f"return {kind}(...))"
                )
            raise
        finally:
            running -= 1

    return run_object


def _required(agent: Any) -> int:
    """Return how many arguments the agent requires. Raises AgentError if it can't be called with a task."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(agent).parameters.values()
    possible = [p for p in parameters if p.kind in kinds]
    required = sum(p.default is inspect.Parameter.empty for p in possible)
    anything = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if required > 2 or not (possible or anything):
        raise AgentError(
            f"an agent is a function of a task, def agent(task), or of a task and its rollout's address; {agent!r:.100} takes "
            f"{required} arguments"
        )
    return required


@hookimpl
def register_losses(register: Register) -> None:
    for loss in (losses.grpo, losses.dr_grpo, losses.dapo, losses.cispo, losses.gspo, losses.distill):
        register(loss.__name__, loss)


@hookimpl
def register_learners(register: Register) -> None:
    register("torch", torch_learner, prepare=_import_learner)
    register("unsloth", unsloth_learner, check=unsloth.check)
    register("auto", auto_learner, prepare=_prepare_auto)


def torch_learner(model_folder: str, config: TrainConfig, loss: Loss) -> Learner:
    """Load the torch learner."""
    with no_garbage_collection():
        from art_core.learner import TorchLearner

    return TorchLearner(model_folder, config, loss)


def _import_learner() -> None:
    with no_garbage_collection():
        importlib.import_module("art_core.learner.torch_learner")


def unsloth_learner(model_folder: str, config: TrainConfig, loss: Loss) -> Learner:
    """Load the Unsloth learner. Raises ConfigError that names what is missing."""
    unsloth.load()  # first: it must be imported before the libraries that it patches
    from art_core.learner.unsloth_learner import UnslothLearner

    return UnslothLearner(model_folder, config, loss)


def auto_learner(model_folder: str, config: TrainConfig, loss: Loss) -> Learner:
    """Load the Unsloth learner if it works here and suits the model, else the torch learner; log which."""
    reason = unsloth.why_not(model_folder, config)
    choice = f"learner='auto' takes torch: {reason}" if reason else "learner='auto' takes unsloth"
    log.info(choice)
    learner = (torch_learner if reason else unsloth_learner)(model_folder, config, loss)
    if unsloth.installed():  # no need to mention it at every run otherwise
        learner.choice = choice
    return learner


def _prepare_auto() -> None:
    if not unsloth.installed():  # it must be imported before the libraries that it patches
        _import_learner()
