"""The classic API: an agent acts in an environment until the episode is over."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Protocol

import numpy as np

from art_classic.environment import Environment, State
from art_core.errors import ConfigError
from art_core.types import Trajectory


class Actor(Protocol):
    """Chooses actions: an ``Agent``, or any object with this method."""

    async def select_action(self, state: State) -> dict[str, Any]: ...


class Episode(dict[str, Any]):
    """One episode, with the keys ``states`` (each before its action), ``actions``, ``rewards``, ``infos``, ``steps``,
    ``total_reward``, ``done`` (False: cut off at the maximum length) and ``error`` (why it failed; None if it did not)."""

    trajectory: Trajectory | None = None
    """The recorded rollout, if the episode was part of one."""

    def __init__(self) -> None:
        super().__init__(states=[], actions=[], rewards=[], infos=[], steps=0, total_reward=0.0, done=False, error=None)
        self.request_ids: list[list[str]] = []
        """For each action, the ``Call.request_id`` of the model calls behind it, if they were recorded."""

    def add(self, state: State, action: dict[str, Any], reward: float, info: Any) -> None:
        """Append one action and its outcome."""
        for name, value in (("states", state), ("actions", action), ("rewards", reward), ("infos", info)):
            self[name].append(value)
        self["steps"] += 1
        self["total_reward"] += reward


async def play(agent: Actor, environment: Environment, state: State, episode: Episode, max_steps: int) -> None:
    """Act from ``state``, which ``reset`` returned, until the episode is over or has ``max_steps`` actions.

    Each action is added to ``episode`` at once, so after an error it has all actions up to then. Raises what agent and
    environment raise, and ConfigError for a reward that is not a finite number.
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
