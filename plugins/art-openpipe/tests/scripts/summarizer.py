"""A model that summarizes, first by imitation of a file and then by reinforcement, in the way of OpenPipe ART's example."""

import asyncio
import json
import os
import tempfile

import art_openpipe as art
from art_openpipe.local import LocalBackend
from art_openpipe.utils.sft import create_sft_dataset_iterator, train_sft_from_file

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
TEXTS = {"The cat sat on the mat all day.": "A cat sat.", "It rained in Oslo until noon.": "Oslo was wet."}


def asked(text):
    return [{"role": "user", "content": f"Summarize: {text}"}]


async def rollout(model: art.TrainableModel, text: str) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=asked(text))
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=24
    )
    choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    trajectory.reward = 1 - min(1.0, len(choice.message.content or "") / 100)
    return trajectory


async def main():
    model = art.TrainableModel(name="summarizer", run_name="sft-rl", project="summaries", base_model="Qwen/Qwen3.6-27B")
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)

    good = [{"messages": [*asked(text), {"role": "assistant", "content": short}]} for text, short in TEXTS.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(line) + "\n" for line in good)
        file.flush()
        await train_sft_from_file(
            model, file.name, epochs=1, batch_size=2, peak_lr=2e-4, assistant_turns="last", verbose=True
        )
    examples = [art.Trajectory(messages_and_choices=line["messages"]) for line in good]
    for chunk in create_sft_dataset_iterator(examples, epochs=1, batch_size=1, peak_lr=2e-4, show_progress=False):
        await model.train_sft(chunk.trajectories, chunk.config)

    for _ in range(STEPS):
        train_groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, text) for _ in range(GAMES)) for text in TEXTS
        )
        result = await backend.train(model, train_groups, learning_rate=1e-5)
        await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
