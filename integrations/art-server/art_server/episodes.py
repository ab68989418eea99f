"""One episode on a worker: the agent run once, its model calls sent to the server. Knows nothing about connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from art_core.attribution import in_child_processes, running
from art_core.errors import CaptureError
from art_core.plugins import Plugins, redirect_clients
from art_core.rollout import API_KEY, describe
from art_core.store.values import from_json, to_json
from art_core.types import RolloutAddress
from art_server.messages import MAX_MESSAGE, Episode, Result

MOST_OUTPUT = MAX_MESSAGE // 4
"""Bytes of what an agent may return, as JSON: several go into one message."""

RunEpisode = Callable[[Episode], Awaitable[Result]]


class RecordedAgent:
    """Runs an agent at rollouts' addresses under ``base_url``, ``http://HOST:PORT``."""

    def __init__(self, agent: object, base_url: str, token: str | None) -> None:
        plugins = Plugins()
        self._run = plugins.adapt(agent)
        self._base_url, self._token = base_url, token
        plugins.call("redirect_clients")
        in_child_processes(redirect_clients)

    async def __call__(self, episode: Episode) -> Result:
        """Run the agent once. Its failure is the result's ``error``."""
        address = self._address(episode.rollout or {})
        result = Result(episode_id=episode.episode_id, lease=episode.lease)
        try:
            with running(address):
                output = await self._run(episode.input, address)
        except CaptureError as error:
            return result.model_copy(update={"error": describe(error), "capture_error": True})
        except Exception as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            return result.model_copy(update={"error": describe(error)})
        told = to_json(output)
        if len(told) > MOST_OUTPUT:
            error = f"ValueError: the agent returned {len(told)} bytes of JSON; give back less than {MOST_OUTPUT}"
            return result.model_copy(update={"error": error})
        return result.model_copy(update={"output": from_json(told)})

    def _address(self, rollout: dict[str, Any]) -> RolloutAddress:
        rollout_id = str(rollout["rollout_id"])
        return RolloutAddress(
            rollout_id,
            f"{self._base_url}/rollouts/{quote(rollout_id, safe='')}/v1",
            self._token or API_KEY,
            str(rollout.get("model", "policy")),
            frozenset(rollout.get("passthrough", ())),
            tuple(rollout.get("nodes", ())),
        )


class SeedEpisodes:
    """Runs episodes as the seed's client does: ``Agent`` in ``Environment``, both made at the first episode."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.environment: Any = None

    async def __call__(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Run an episode and return ``episode_id``, ``total_reward``, ``steps`` and ``data``."""
        if self.agent is None or self.environment is None:
            from art_core.agent import Agent
            from art_core.environment import Environment

            self.agent = self.agent or Agent(episode["model_name"])
            self.environment = self.environment or Environment(episode.get("env_config"))
        state, done = await self.environment.reset(), False
        data: dict[str, Any] = {"states": [], "actions": [], "rewards": [], "done": False}
        while not done and len(data["rewards"]) < episode.get("max_steps", 50):
            action = await self.agent.select_action(state)
            after, reward, done, _ = await self.environment.step(action)
            data["states"].append(state)
            data["actions"].append(action)
            data["rewards"].append(reward)
            state = after
        data["done"] = done
        total = sum(data["rewards"])
        return {"episode_id": episode["episode_id"], "total_reward": total, "steps": len(data["rewards"]), "data": data}
