"""One episode on a worker: the agent run once, its model calls sent to the server. Knows nothing about connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from art_core.attribution import in_child_processes, rollouts_have_threads, running
from art_core.errors import CaptureError, ConfigError
from art_core.loop.rollout import API_KEY
from art_core.plugins import Plugins, redirect_clients
from art_core.redaction import describe_error
from art_core.store.values import from_json, to_json
from art_core.types import RolloutAddress
from art_server.loops import in_loop
from art_server.messages import MAX_MESSAGE, Episode, Result

MOST_OUTPUT = MAX_MESSAGE // 4
"""Bytes of what an agent may return, as JSON: several go into one message."""
MOST_ERROR = 2**16
"""Characters of what is said about an agent's failure."""


class RecordedAgent:
    """Runs an agent at rollouts' addresses under ``base_url``, ``http://HOST:PORT``.

    ``loop`` is where: not that of the connection, so that an agent that blocks its loop is not taken for a dead worker.
    """

    def __init__(self, agent: object, base_url: str, token: str | None, loop: asyncio.AbstractEventLoop | None) -> None:
        plugins = Plugins()
        self._run = plugins.adapt(agent)
        self._base_url, self._token, self._loop = base_url, token, loop
        plugins.call("redirect_clients")
        in_child_processes(redirect_clients)

    async def __call__(self, episode: Episode) -> Result:
        """Run the agent once. Its failure is the result's ``error``."""
        return await in_loop(self._loop, self._once(episode))

    async def _once(self, episode: Episode) -> Result:
        rollouts_have_threads()
        address = self._address(episode.rollout or {})
        result = Result(episode_id=episode.episode_id, lease=episode.lease)
        try:
            with running(address):
                output = await self._run(episode.input, address)
        except CaptureError as error:
            return result.model_copy(update={"error": describe_error(error), "capture_error": True})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            lost = unanswered(error, address.base_url)
            return result.model_copy(update={"error": describe_error(error)[:MOST_ERROR], "lost": lost})
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


def unanswered(error: BaseException, base_url: str) -> bool:
    """Whether it comes of a request to ``base_url`` that broke off, or that something on the way answered: no fault of the agent.

    Known of errors that name their request, as those of httpx, requests and the clients built on them. Not of a request that
    took too long: that may be the agent's impatience.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(it, TimeoutError) or "Timeout" in type(it).__name__ for it in chain):
        return False
    for it in chain:
        with suppress(RuntimeError):  # httpx's, where it knows no request
            if str(getattr(getattr(it, "request", None), "url", "")).startswith(base_url):
                answer = getattr(it, "response", None)
                return answer is None or answer.status_code in (502, 503, 504)
    return False


class ClassicEpisodes:
    """Runs classic episodes: ``Agent(model_name)`` in ``Environment(env_config)``, an environment for each.

    ``models`` are the names that an episode may ask for: a message must not make this machine load whatever it names.
    """

    def __init__(self, models: Collection[str]) -> None:
        self._models = models
        self._agents: dict[str, Any] = {}

    async def __call__(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Run an episode and return ``episode_id``, ``total_reward``, ``steps`` and ``data``."""
        from art_classic.environment import Environment
        from art_classic.episodes import Episode as Played
        from art_classic.episodes import play

        agent, environment = self._agent(episode.get("model_name")), Environment(episode.get("env_config"))
        played = Played()
        await play(agent, environment, await environment.reset(), played, episode.get("max_steps", 50))
        data = {name: played[name] for name in ("states", "actions", "rewards", "done")}
        return {
            "episode_id": episode["episode_id"], "total_reward": played["total_reward"], "steps": played["steps"], "data": data
        }  # fmt: skip

    def _agent(self, model: Any) -> Any:
        from art_classic.agent import Agent

        if model not in self._models and "ART_MODEL" not in os.environ:
            raise ConfigError(
                f"the episode asks for the model {model!r:.100}, and this worker loads only {', '.join(self._models)}; start it "
                "with --model NAME, or with ART_MODEL=NAME in place of whatever is asked for"
            )
        if model not in self._agents:
            self._agents[model] = Agent(model)
        return self._agents[model]
