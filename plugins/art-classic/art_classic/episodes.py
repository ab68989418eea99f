"""The classic surface: an agent acts in an environment until it is over. Knows nothing about models, rollouts or learning."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Protocol

import numpy as np

from art_classic.environment import Environment, State
from art_core.errors import ConfigError
from art_core.types import Trajectory


class Actor(Protocol):
    """Whoever chooses actions: an ``Agent``, or anything with this method."""

    async def select_action(self, state: State) -> dict[str, Any]: ...


class Episode(dict[str, Any]):
    """What happened: ``states`` (each before its action), ``actions``, ``rewards``, ``infos``, ``steps``, ``total_reward``,
    ``done`` (the environment said so; else the episode was cut off) and ``error`` (why it failed; None where it did not)."""

    trajectory: Trajectory | None = None
    """The model calls behind it, where it was recorded."""

    def __init__(self) -> None:
        super().__init__(states=[], actions=[], rewards=[], infos=[], steps=0, total_reward=0.0, done=False, error=None)
        self.asked: list[list[str]] = []
        """Of each action, the ``Call.request_id`` of what the agent asked for it, where it was noted."""

    def add(self, state: State, action: dict[str, Any], reward: float, info: Any) -> None:
        """Take one action and what came of it."""
        for name, value in (("states", state), ("actions", action), ("rewards", reward), ("infos", info)):
            self[name].append(value)
        self["steps"] += 1
        self["total_reward"] += reward


async def play(agent: Actor, environment: Environment, state: State, episode: Episode, max_steps: int) -> None:
    """Act from ``state``, which ``reset`` returned, until the episode is over or has ``max_steps`` actions.

    ``episode`` is filled as it goes, so that what was done before an error is in it. Raises what agent and environment raise,
    and ConfigError for a reward that is not a finite number.
    """
    while not episode["done"] and episode["steps"] < max_steps:
        action = await agent.select_action(state)
        after, reward, done, info = await environment.step(action)
        if not isinstance(reward, Real | np.bool_) or not math.isfinite(reward):
            raise ConfigError(
                f"{type(environment).__name__}.step returned the reward {reward!r:.80} for the action {action!r:.80}; "
                "return a finite number"
            )
        episode.add(state, action, float(reward), info)
        episode["done"], state = bool(done), after
