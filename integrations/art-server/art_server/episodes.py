"""Runs episodes on a worker: an agent once per episode, with its model calls going to the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from art_core.errors import CaptureError, ConfigError, failure_of
from art_core.plugin_api import (
    API_KEY,
    Plugins,
    describe_error,
    inside_rollout,
    redirect_clients,
    run_in_child_processes,
    use_rollout_executor,
)
from art_core.store.values import from_json, to_json
from art_core.types import RolloutAddress
from art_server.loops import in_loop
from art_server.messages import MAX_MESSAGE, Episode, Result

MAX_OUTPUT = MAX_MESSAGE // 4
"""Bytes of an agent's output as JSON; several outputs fit into one message."""
MAX_ERROR = 2**16
"""Characters of an agent's error."""


class RecordedAgent:
    """Runs an agent at rollouts' addresses under ``base_url``, ``http://HOST:PORT``.

    The agent runs in ``loop``, which isn't the connection's: an agent that blocks its loop must not stop the heartbeats.
    """

    def __init__(self, agent: object, base_url: str, token: str | None, loop: asyncio.AbstractEventLoop | None) -> None:
        plugins = Plugins()
        self._run = plugins.adapt(agent)
        self._base_url, self._token, self._loop = base_url, token, loop
        plugins.call("redirect_clients")
        run_in_child_processes(redirect_clients)

    async def __call__(self, episode: Episode) -> Result:
        """Run the agent once. If it fails, the result's ``error`` is set."""
        return await in_loop(self._loop, self._once(episode))

    async def _once(self, episode: Episode) -> Result:
        use_rollout_executor()
        address = self._address(episode.rollout or {})
        result = Result(episode_id=episode.episode_id, lease=episode.lease)
        try:
            with inside_rollout(address):
                output = await self._run(episode.input, address)
        except CaptureError as error:
            return result.model_copy(update={"error": describe_error(error), "capture_error": True})
        except BaseException as raised:  # noqa: BLE001 - the boundary to the agent: its failures are data
            error = failure_of(raised)
            lost = unanswered(error, address.base_url)
            return result.model_copy(update={"error": describe_error(error)[:MAX_ERROR], "lost": lost})
        encoded = to_json(output)
        if len(encoded) > MAX_OUTPUT:
            error = f"ValueError: the agent returned {len(encoded)} bytes of JSON; the maximum is {MAX_OUTPUT}"
            return result.model_copy(update={"error": error})
        return result.model_copy(update={"output": from_json(encoded)})

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
    """Whether the error comes from a request to ``base_url`` that failed on the way or was answered by something in between.

    Then it isn't the agent's fault. This works for errors that name their request, as in httpx, requests and clients built on
    them. Timeouts don't count, because the agent may have set a short one.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in chain):
        return False
    for each in chain:
        with suppress(RuntimeError):  # raised by httpx for an error without a request
            if str(getattr(getattr(each, "request", None), "url", "")).startswith(base_url):
                answer = getattr(each, "response", None)
                return answer is None or answer.status_code in (502, 503, 504)
    return False


class ClassicEpisodes:
    """Runs classic episodes: ``Agent(model_name)`` in ``Environment(env_config)``, with a new environment for each.

    ``models`` are the models that an episode may use, so that a message can't make this machine load any model.
    """

    def __init__(self, models: Collection[str]) -> None:
        self._models = models
        self._agents: dict[str, Any] = {}

    async def __call__(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Run an episode; return a dict with ``episode_id``, ``total_reward``, ``steps`` and ``data``."""
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
                f"the rollout requests the model {model!r:.100}, but this worker only loads {', '.join(self._models)}; start it "
                "with --model NAME, or set ART_MODEL=NAME to use that model for every rollout"
            )
        if model not in self._agents:
            self._agents[model] = Agent(model)
        return self._agents[model]
