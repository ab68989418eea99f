"""OpenPipe ART's smallest example: one call returns a group's answers, and batches run ahead of training."""

import asyncio
import os
from itertools import permutations

import art_openpipe as art
from art_openpipe.local import LocalBackend

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
PROMPTS = [f"respond with {', '.join(words)}" for words in permutations(["yes", "no", "maybe"])]


async def rollout(model: art.TrainableModel, prompt: str) -> art.TrajectoryGroup:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    response = await model.openai_client().chat.completions.create(
        messages=messages, model=model.get_inference_name(), max_tokens=5, n=GAMES
    )
    return art.TrajectoryGroup(
        art.Trajectory(messages_and_choices=[*messages, choice], reward=float(len(choice.message.content or "")))
        for choice in response.choices
    )


async def main():
    model = art.TrainableModel(
        name="words", run_name="yes-no-maybe", project="words", base_model="Qwen/Qwen3-4B-Instruct-2507"
    )
    async with LocalBackend(path=os.environ.get("ART_PATH", ".art")) as backend:
        await model.register(backend)
        prompts = PROMPTS[: 2 * STEPS]
        groups = (rollout(model, prompt) for prompt in prompts)
        async for batch in art.trajectory_group_batches(groups, batch_size=2, max_concurrent_batches=2):
            result = await backend.train(model, batch, learning_rate=5e-5, loss_fn="cispo")
            await model.log(batch, metrics=result.metrics, step=result.step, split="train")


if __name__ == "__main__":
    asyncio.run(main())
