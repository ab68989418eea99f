"""The search through mails as a LangGraph agent, in the way of OpenPipe ART's example: the graph's calls are captured."""

import asyncio
import os

from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

import art_openpipe as art
from art_openpipe.langgraph import init_chat_model, wrap_rollout
from art_openpipe.local import LocalBackend

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
MAILS = {"invoice": "The invoice of March is 40 euros.", "lunch": "Lunch is at noon on Friday."}


async def rollout(scenario: str) -> art.Trajectory:
    read = []

    @tool
    def search(word: str) -> str:
        """Search the mails."""
        read.append(word)
        return MAILS.get(word, "nothing found")

    chat_model = init_chat_model(max_tokens=32, temperature=1.0)
    agent = create_react_agent(chat_model, [search])
    answer = await agent.ainvoke({"messages": [("user", f"Find: {scenario}")]}, {"recursion_limit": 6})
    text = str(answer["messages"][-1].content)
    return art.Trajectory(reward=len(set(text.split())) / 32, metrics={"searches": len(read)})


async def main():
    model = art.TrainableModel(
        name="graph", run_name="email-graph", project="email", base_model="Qwen/Qwen2.5-7B-Instruct"
    )
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    for _ in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(wrap_rollout(model, rollout)(word) for _ in range(GAMES)) for word in MAILS),
            max_exceptions=0.9,
        )
        result = await backend.train(model, train_groups, learning_rate=1e-4)
        await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
