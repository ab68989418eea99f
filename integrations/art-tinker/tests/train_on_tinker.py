"""A short training on the server that the environment names: python train_on_tinker.py RUN_DIR.

The prompts are short and the answers of one length, because the server compiles for each new length.
"""

import sys
from pathlib import Path

from openai import OpenAI

import art_core as art

TASKS = ["one", "two", "three", "four"]


def agent(word):
    messages = [{"role": "user", "content": f"Which city is {word}?"}]
    with OpenAI(api_key="unused") as client:
        for _ in range(2):
            reply = client.chat.completions.create(model="policy", messages=messages, max_completion_tokens=8)
            messages += [reply.choices[0].message, {"role": "user", "content": "And then?"}]
    return messages[-2].content


def reward(trajectory):
    return len(set(trajectory.output or ""))


if __name__ == "__main__":
    art.train_sync(
        agent, TASKS, model="tiny", reward=reward, steps=2, run_dir=Path(sys.argv[1]), tasks_per_step=2, group_size=4,
        engine="tinker", learner="tinker", learner_args={"averages": True}, keep_checkpoints=None,
    )  # fmt: skip
