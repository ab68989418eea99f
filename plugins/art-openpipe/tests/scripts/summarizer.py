"""A model that summarizes: it imitates a file and a teacher, and then RULER scores it, in the way of OpenPipe ART's examples.

The teacher, which also writes the texts and is the judge, may be any provider's model. LiteLLM calls the student.
"""

import asyncio
import json
import os
import tempfile

from litellm import acompletion
from pydantic import BaseModel

import art_openpipe as art
from art_openpipe.local import LocalBackend
from art_openpipe.rewards import ruler_score_group
from art_openpipe.utils import iterate_dataset
from art_openpipe.utils.litellm import convert_litellm_choice_to_openai
from art_openpipe.utils.sft import create_sft_dataset_iterator, train_sft_from_file

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
TEACHER = "openai/gpt-5.4"
EXAMPLES = {"The cat sat on the mat all day.": "A cat sat.", "It rained in Oslo until noon.": "Oslo was wet."}


class Texts(BaseModel):
    texts: list[str]


def asked(text):
    return [{"role": "user", "content": f"Summarize: {text}"}]


async def taught(text: str) -> art.Trajectory:
    response = await acompletion(model=TEACHER, messages=asked(text))
    answer = {"role": "assistant", "content": response.choices[0].message.content}
    return art.Trajectory(messages_and_choices=[*asked(text), answer])


async def rollout(model: art.TrainableModel, text: str) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=asked(text), metadata={"text": text})
    response = await acompletion(
        model=f"hosted_vllm/{model.name}",
        base_url=model.inference_base_url,
        api_key=model.inference_api_key,
        messages=trajectory.messages(),
        max_tokens=24,
    )
    trajectory.messages_and_choices.append(convert_litellm_choice_to_openai(response.choices[0]))
    return trajectory


async def main():
    request = {"role": "user", "content": "Write 2 short texts to summarize, as JSON."}
    written = await acompletion(model=TEACHER, messages=[request], response_format=Texts)
    texts = Texts.model_validate_json(written.choices[0].message.content).texts

    model = art.TrainableModel(name="summarizer", run_name="sft-rl", project="summaries", base_model="Qwen/Qwen3.6-27B")
    model._internal_config = art.dev.InternalModelConfig(engine_args=art.dev.EngineArgs(gpu_memory_utilization=0.7))
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for text, short in EXAMPLES.items():
            file.write(json.dumps({"messages": [*asked(text), {"role": "assistant", "content": short}]}) + "\n")
        file.flush()
        await train_sft_from_file(
            model, file.name, epochs=1, batch_size=2, peak_lr=2e-4, assistant_turns="last", verbose=True
        )
    lessons = await asyncio.gather(*map(taught, texts))
    for chunk in create_sft_dataset_iterator(lessons, epochs=1, batch_size=1, peak_lr=2e-4, show_progress=False):
        await model.train_sft(chunk.trajectories, chunk.config)

    for batch in iterate_dataset(texts, groups_per_step=2, num_epochs=STEPS):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, text) for _ in range(GAMES)) for text in batch.items),
            pbar_desc=f"step {batch.step}",
            max_exceptions=GAMES,
        )
        judged = [await ruler_score_group(group, TEACHER) for group in groups]
        result = await backend.train(model, judged, learning_rate=1e-5, logprob_calculation_chunk_size=8)
        await model.log(judged, metrics=result.metrics, step=result.step, split="train")


if __name__ == "__main__":
    asyncio.run(main())
