"""Families end to end: serve, call with tools, capture, tree, step, swap: ``python -m bench.family_loop [names]``.

With tiny models with random weights, and the embedded engine or, with ``--vllm``, vLLM's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import art_audit
import art_core as art
from art_core.types import Call, JsonDict, Sampling, Trajectory
from bench.family_models import FAMILIES, save
from bench.tables import table

ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": ARGUMENTS}}]
"""A call to it is short whatever the weights. vLLM enforces the schema only if the tool is strict."""
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
KEPT = ("role", "content", "tool_calls")
"""The parts of an answer that OpenAI's client sends back; thinking isn't among them."""
MOST_TOKENS = 400
RUNS = 4


@dataclass
class Seen:
    """The results of one family."""

    trajectories: list[Trajectory] = field(default_factory=list)
    answers: list[list[JsonDict]] = field(default_factory=list)
    """The answers of each rollout, as the agent kept them."""
    tree_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the step."""
    before: Call | None = None
    """A greedy call with the start weights."""
    after: Call | None = None
    """The same call after the swap."""
    problems: list[Any] = field(default_factory=list)
    """Problems that the audit found."""
    recomputed: int = 0
    """Calls that it recomputed."""

    @property
    def call_tokens(self) -> int:
        calls = [call for trajectory in self.trajectories for call in trajectory.calls]
        return sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls)

    @property
    def extends(self) -> bool:
        """Whether every second turn extends exactly the ids of the first."""
        turns = [trajectory.calls for trajectory in self.trajectories]
        return all(b.prompt_ids[: len(whole)] == whole for a, b in turns if (whole := a.prompt_ids + a.sampled_ids))


class Agent:
    """Calls the model over plain HTTP, like any client: a forced tool call, its result, and an answer."""

    def __init__(self, client: httpx.AsyncClient, **request: Any) -> None:
        self._client, self._request = client, request

    async def run(self, address: str) -> list[JsonDict]:
        """Return the answers."""
        first = await self.ask(address, [QUESTION], tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        [call] = first["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": '{"sun": true}'}
        return [first, await self.ask(address, [QUESTION, first, result], tools=TOOLS)]

    async def ask(self, address: str, messages: list[JsonDict], **more: Any) -> JsonDict:
        body = {"model": "policy", "messages": messages, "max_tokens": MOST_TOKENS, **self._request, **more}
        response = await self._client.post(f"{address}/chat/completions", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        message = response.json()["choices"][0]["message"]
        return {key: message[key] for key in KEPT if message.get(key) is not None or key == "content"}


def vllm_settings(name: str, folder: str) -> JsonDict:
    """Return further arguments of ``take_through`` if vLLM's CPU build serves the family."""
    settings: JsonDict = {}
    if FAMILIES[name].config == "DeepseekV3Config":
        settings["engine_args"] = {
            "dtype": "bfloat16"
        }  # its kernels for experts and latent attention don't support float32
    if FAMILIES[name].thinks:
        settings["request"] = {"chat_template_kwargs": {"enable_thinking": False}}
    return settings


async def take_through(
    name: str, folder: str, run_dir: Path, engine: Any = "embedded", *, request: JsonDict | None = None, **settings: Any
) -> Seen:
    """Take one optimizer step on four rollouts of an agent and serve its weights; return the results.

    ``request`` is sent with every call of the agent; ``settings`` are the run's. The run is audited at the end.
    """
    seen = Seen()
    settings = {"lora_rank": 4, "learning_rate": 1e-2, "max_grad_norm": 10.0, "keep_checkpoints": None, **settings}
    run_of = art.open_run(run_dir, model=folder, engine=engine, learner="torch", **settings)
    async with run_of as run, httpx.AsyncClient(timeout=120) as client:
        agent = Agent(client, **request or {})
        for _ in range(RUNS):
            async with run.rollout("weather", group_id="one") as rollout:
                seen.answers.append(await agent.run(rollout.base_url))
            seen.trajectories.append(rollout.trajectory)
        seen.before = await _probe(run, agent)
        good = {each.rollout_id for each in seen.trajectories[::2]}
        groups = await run.score(
            [art.Group("weather", tuple(seen.trajectories))], lambda it: float(it.rollout_id in good)
        )
        seen.tree_tokens = run.tree(groups[0]).num_tokens
        seen.metrics = await run.learn(groups)
        seen.after = await _probe(run, agent)
    audit = art_audit.audit(run_dir, progress=False)
    seen.problems, seen.recomputed = list(audit.problems), audit.checked
    return seen


async def _probe(run: Any, agent: Agent) -> Call:
    """Return a greedy call, recorded as part of an evaluation."""
    async with run.rollout("probe", split="eval", sampling=Sampling()) as rollout:
        await agent.ask(rollout.base_url, [QUESTION], temperature=0, max_tokens=4)
    return rollout.trajectory.calls[0]


def _row(name: str, seen: Seen) -> list[object]:
    call = next((message["tool_calls"][0] for message, _ in seen.answers if message.get("tool_calls")), None)
    shown = json.dumps(call["function"]["arguments"]) if call else None
    return [
        name, shown, "yes" if seen.extends else "no", seen.call_tokens, seen.tree_tokens, seen.metrics.get("logprob_gap"),
        seen.metrics.get("mismatch"), seen.after.policy_version if seen.after else None, seen.recomputed, len(seen.problems),
    ]  # fmt: skip


HEAD = (
    "family", "call", "second turn extends", "tokens of calls", "of the tree", "logprob gap", "mismatch", "version", "audited",
    "problems",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"families, of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--vllm", action="store_true", help="serve with vLLM instead of the embedded engine")
    parser.add_argument("--lora-rank", type=int, help="rank of LoRA; 0 trains all weights; default: 4")
    chosen = parser.parse_args()
    rows, failed = [], []
    for name in chosen.names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = save(name, Path(folder) / "model")
            engine, settings = ("vllm", vllm_settings(name, model)) if chosen.vllm else ("embedded", {})
            if chosen.lora_rank is not None:
                settings["lora_rank"] = chosen.lora_rank
            try:
                seen = asyncio.run(take_through(name, model, Path(folder) / "run", engine, **settings))
            except (art.ArtError, RuntimeError, KeyError) as error:
                failed.append(f"{name}: {error}")
                continue
            rows.append(_row(name, seen))
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(HEAD, rows))
    print("\n".join(failed))


if __name__ == "__main__":
    main()
