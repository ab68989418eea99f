"""The classic surface: what an agent acts in, a reward for each action. Knows nothing about models, rollouts or learning.

A subclass writes ``reset`` and ``step``. ``Environment(env_config)`` itself is for configs that come from elsewhere, a server's
message for example: it never imports what a config names, it only looks up what this process has registered.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from art_core.errors import ConfigError

State = dict[str, Any]
Step = tuple[State, float, bool, dict[str, Any]]
"""The state after the action, the action's reward, whether the episode is over, and anything else."""

WAYS = (
    "give {'environment': NAME, 'arguments': {...}} for one that this process has registered with register_environment(NAME, "
    "...), or any other dict, such as {'prompt': '...'}, which is shown as the state of an episode of one action"
)
_registered: dict[str, Callable[..., Environment]] = {}


def register_environment(name: str, environment: Callable[..., Environment]) -> None:
    """Let configs name ``environment``, a subclass or a function that returns one. The same name again replaces it.

    What is not registered cannot be had by a config, so this is the list of what a message from elsewhere may start here,
    with arguments of the message's choice.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_environment({name!r}, ...): give a name, which is what configs say")
    if not callable(environment) or (inspect.isclass(environment) and not issubclass(environment, Environment)):
        raise ConfigError(
            f"register_environment({name!r}, {environment!r:.80}): give a subclass of Environment, or a function that returns "
            "an object of one"
        )
    _registered[name] = environment


class Environment:
    """One episode at a time: ``reset`` begins it, ``step`` takes an action.

    What ``reset`` and ``step`` return is kept, and ``get_state`` returns a copy of it, in subclasses too: these need neither
    keep a state themselves nor take arguments (``super().__init__()``).

    ``Environment(env_config)``, without a subclass, is what its config says: the environment registered as
    ``env_config["environment"]``, made with ``env_config["arguments"]``; else an episode of one action, whose state is the config
    and whose reward is 0, because what the action is worth is for the run's reward to say. Raises ConfigError for a config
    that can be neither.
    """

    env_config: Mapping[str, Any] | str | None = None
    _named: Environment | None = None
    """The one that the config names: it does all that is asked here."""
    _kept: State | None = None
    """What ``reset`` or ``step`` returned last."""
    _done = True

    def __init__(self, env_config: Mapping[str, Any] | str | None = None) -> None:
        self.env_config = env_config
        if type(self) is Environment:
            self._named = _made(env_config)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, state_of in (("reset", lambda state: state), ("step", _state_of_step)):
            if inspect.iscoroutinefunction(own := cls.__dict__.get(name)):
                setattr(cls, name, _keeping(own, state_of))

    async def reset(self) -> State:
        """Begin an episode and return its first state."""
        if self._named is not None:
            return await self._named.reset()
        self._done = False
        self._kept = dict(self.env_config) if isinstance(self.env_config, Mapping) else {}
        return await Environment.get_state(self)

    async def step(self, action: dict[str, Any]) -> Step:
        """Take an action. Subclasses write this one; see ``Step`` for what it returns."""
        if self._named is not None:
            return await self._named.step(action)
        if type(self) is not Environment:
            raise NotImplementedError(
                f"{type(self).__name__} has no step of its own: write async def step(self, action)"
            )
        if self._done:
            raise ConfigError("this episode is over, or has not begun: await reset() before step(action)")
        self._done = True
        return await Environment.get_state(self), 0.0, True, {}

    async def get_state(self) -> State:
        """Return the state of the moment, a copy: changing it changes no earlier state. Empty before ``reset``."""
        if self._named is not None:
            return await self._named.get_state()
        return copy.deepcopy(self._kept) if self._kept is not None else {}


def _keeping(method: Callable[..., Awaitable[Any]], state_of: Callable[[Any], State]) -> Callable[..., Awaitable[Any]]:
    """Wrap ``reset`` or ``step`` of a subclass, so that the state in what it returns is kept."""

    @functools.wraps(method)
    async def kept(self: Environment, *args: Any, **kwargs: Any) -> Any:
        result = await method(self, *args, **kwargs)
        # Not a copy: whoever puts his own query into the state that reset gave him finds it in the states that follow.
        self._kept = state_of(result)
        return result

    return kept


def _state_of_step(result: Any) -> State:
    if not isinstance(result, tuple) or len(result) != 4:
        raise ConfigError(f"step returned {result!r:.80}, and must return (state, reward, done, info)")
    return result[0]


def _made(config: object) -> Environment | None:
    """Return the environment that a config names; None where it names none and is a state itself."""
    if isinstance(config, str):
        config = {"environment": config}
    if config is None or (isinstance(config, Mapping) and "environment" not in config):
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"env_config={config!r:.80} cannot be used; {WAYS}")
    name, arguments = config["environment"], config.get("arguments") or {}
    make = _registered.get(name) if isinstance(name, str) else None
    if make is None:
        known = ", ".join(map(repr, sorted(_registered))) or "none"
        near = difflib.get_close_matches(str(name), _registered, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"no environment is registered here as {name!r:.80}{hint}; there are: {known}; {WAYS}")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ConfigError(f"the arguments of environment {name!r} are {arguments!r:.80}, and must be a dict by name")
    if unknown := set(config) - {"environment", "arguments"}:
        raise ConfigError(
            f"env_config has {sorted(map(str, unknown))} beside environment {name!r}; put them into 'arguments'"
        )
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment {name!r} cannot be made with the arguments {sorted(arguments)}: {error}"
        ) from error
    environment = make(**arguments)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{name!r} made a {type(environment).__name__}, which is no Environment; subclass it")
    return environment
