"""An MCP server's tools, in the way of OpenPipe ART's MCP.RL: the rollout lists and calls them, ``with`` captures it.

The server runs in this process; the scenarios are written by hand.
"""

import asyncio
import json
import os
from typing import Literal

from mcp import Client
from mcp.server import MCPServer

import art_openpipe as art
from art_openpipe.local import LocalBackend

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
SCENARIOS = ["Will it rain in Oslo?", "Is it sunny in Rome?"]
server = MCPServer("weather")


@server.tool()
def forecast(city: Literal["Oslo", "Rome", "Bergen"]) -> str:
    """The weather tomorrow."""
    return {"Oslo": "rain", "Rome": "sun"}.get(city, "fog")


async def rollout(model: art.Model, scenario: str) -> art.Trajectory:
    messages = [{"role": "user", "content": scenario}]
    with art.Trajectory(metadata={"scenario": scenario}) as trajectory:
        async with Client(server) as session:
            listed = (await session.list_tools()).tools
            tools = [
                {
                    "type": "function",
                    "function": {"name": it.name, "parameters": {**it.input_schema, "additionalProperties": False}},
                }
                for it in listed
            ]
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=messages, tools=tools, tool_choice="required", max_tokens=64
            )
            message = completion.choices[0].message
            call = message.tool_calls[0]
            result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
            found = result.content[0].text
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": found},
        ]
        await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, tools=tools, tool_choice="none", max_tokens=16
        )
    trajectory.reward = float(found in ("rain", "sun"))
    trajectory.metrics["turns"] = len(trajectory.exchanges.chat_completions)
    return trajectory


async def main():
    model = art.TrainableModel(name="mcp", run_name="mcp-001", project="mcp-rl", base_model="Qwen/Qwen2.5-3B-Instruct")
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    groups = (
        art.trajectory_group((rollout(model, scenario) for _ in range(GAMES)), return_exceptions=True)
        for _ in range(STEPS)
        for scenario in SCENARIOS
    )
    async for batch in art.trajectory_group_batches(groups, batch_size=2, max_concurrent_batches=1):
        result = await backend.train(model, batch, learning_rate=1e-4)
        await model.log(batch, metrics=result.metrics, step=result.step, split="train")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
