"""The classic API: the environment that an agent acts in, with a reward for each action.

Subclasses define ``reset`` and ``step``. ``Environment(env_config)`` itself is for configs from elsewhere, such as a server's
message: it never imports anything that a config names, but only looks up what this process has registered.
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
"""(state after the action, the action's reward, whether the episode is over, further information)"""

WAYS = (
    "pass {'environment': NAME, 'arguments': {...}} for an environment that this process has registered with "
    "register_environment(NAME, ...), or any other dict, such as {'prompt': '...'}, as the state of an episode of one action"
)
_registered: dict[str, Callable[..., Environment]] = {}


def register_environment(name: str, environment: Callable[..., Environment]) -> None:
    """Let configs use ``environment``, a subclass or a function that returns an instance. The same name again replaces it.

    Configs from elsewhere can start only registered environments, but with arguments of their choice.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_environment({name!r}, ...): the name must be a non-empty string")
    if not callable(environment) or (inspect.isclass(environment) and not issubclass(environment, Environment)):
        raise ConfigError(
            f"register_environment({name!r}, {environment!r:.80}): pass a subclass of Environment, or a function that returns "
            "an instance of one"
        )
    _registered[name] = environment


class Environment:
    """One episode at a time: ``reset`` begins it, ``step`` performs an action.

    The state that ``reset`` or ``step`` returned last is stored, and ``get_state`` returns a copy of it; so subclasses need
    neither store it themselves nor call ``super().__init__`` with arguments.

    ``Environment(env_config)``, without a subclass, delegates to the environment registered as ``env_config["environment"]``,
    created with ``env_config["arguments"]``. For any other dict it is an episode of one action, with the config as its state and
    reward 0, because the run's reward scores the action. Raises ConfigError for an invalid config.
    """

    env_config: Mapping[str, Any] | str | None = None
    _delegate: Environment | None = None
    """The environment that the config names; it handles all calls."""
    _last_state: State | None = None
    """The state that ``reset`` or ``step`` returned last."""
    _done = True

    def __init__(self, env_config: Mapping[str, Any] | str | None = None) -> None:
        self.env_config = env_config
        if type(self) is Environment:
            self._delegate = _from_config(env_config)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, state_of in (("reset", lambda state: state), ("step", _state_of_step)):
            if inspect.iscoroutinefunction(own := cls.__dict__.get(name)):
                setattr(cls, name, _storing_state(own, state_of))

    async def reset(self) -> State:
        """Begin an episode and return its first state."""
        if self._delegate is not None:
            return await self._delegate.reset()
        self._done = False
        self._last_state = dict(self.env_config) if isinstance(self.env_config, Mapping) else {}
        return await Environment.get_state(self)

    async def step(self, action: dict[str, Any]) -> Step:
        """Perform an action and return a ``Step``. Subclasses must define this method."""
        if self._delegate is not None:
            return await self._delegate.step(action)
        if type(self) is not Environment:
            raise NotImplementedError(f"{type(self).__name__} has no step method; define async def step(self, action)")
        if self._done:
            raise ConfigError("this episode is over or has not begun; await reset() before step(action)")
        self._done = True
        return await Environment.get_state(self), 0.0, True, {}

    async def get_state(self) -> State:
        """Return a copy of the current state; empty before ``reset``."""
        if self._delegate is not None:
            return await self._delegate.get_state()
        return copy.deepcopy(self._last_state) if self._last_state is not None else {}


def _storing_state(
    method: Callable[..., Awaitable[Any]], state_of: Callable[[Any], State]
) -> Callable[..., Awaitable[Any]]:
    """Wrap ``reset`` or ``step`` of a subclass, so that the state it returns is stored."""

    @functools.wraps(method)
    async def storing(self: Environment, *args: Any, **kwargs: Any) -> Any:
        result = await method(self, *args, **kwargs)
        # Not a copy: what the caller adds to the state that reset returned, such as a query, must show up in get_state.
        self._last_state = state_of(result)
        return result

    return storing


def _state_of_step(result: Any) -> State:
    if not isinstance(result, tuple) or len(result) != 4:
        raise ConfigError(f"step must return (state, reward, done, info), got {result!r:.80}")
    return result[0]


def _from_config(config: object) -> Environment | None:
    """Return the environment that a config names; None if it names none and is itself the state."""
    if isinstance(config, str):
        config = {"environment": config}
    if config is None or (isinstance(config, Mapping) and "environment" not in config):
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"env_config={config!r:.80} is invalid; {WAYS}")
    name, arguments = config["environment"], config.get("arguments") or {}
    make = _registered.get(name) if isinstance(name, str) else None
    if make is None:
        registered = ", ".join(map(repr, sorted(_registered))) or "none"
        matches = difflib.get_close_matches(str(name), _registered, n=1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        raise ConfigError(f"no environment is registered as {name!r:.80}{hint}; registered: {registered}; {WAYS}")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ConfigError(
            f"the arguments of environment {name!r} must be a dict with string keys, got {arguments!r:.80}"
        )
    if unknown := set(config) - {"environment", "arguments"}:
        raise ConfigError(
            f"env_config has {sorted(map(str, unknown))} besides environment {name!r}; put them into 'arguments'"
        )
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment {name!r} cannot be created with the arguments {sorted(arguments)}: {error}"
        ) from error
    environment = make(**arguments)
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"{name!r} must return an Environment, got {type(environment).__name__}; subclass Environment"
        )
    return environment
