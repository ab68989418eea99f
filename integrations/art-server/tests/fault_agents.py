"""Agents for the tests of faults: three calls that build on each other, under a name that no other run of theirs has."""

import asyncio
import os
import random
import time
import uuid

import openai

CALLS = 3
PAUSE = float(os.environ.get("FAULT_PAUSE", "0.2"))
"""Seconds before a call, at most."""


def _begin(task: str) -> tuple[str, list[dict]]:
    name = uuid.uuid4().hex
    return name, [{"role": "user", "content": f"{task} {name}"}]


def patient(task: str) -> dict:
    """Ask in a thread."""
    client, (name, messages), answers = openai.OpenAI(api_key="x"), _begin(task), []
    for turn in range(CALLS):
        time.sleep(random.uniform(0, PAUSE))
        asked = client.chat.completions.create(model="m", messages=messages, max_tokens=8)
        answers.append(asked.choices[0].message.content)
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"turn {turn}"}]
    return {"task": task, "name": name, "answers": answers}


async def lively(task: str) -> dict:
    """Ask in the loop."""
    client, (name, messages), answers = openai.AsyncOpenAI(api_key="x"), _begin(task), []
    for turn in range(CALLS):
        await asyncio.sleep(random.uniform(0, PAUSE))
        asked = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
        answers.append(asked.choices[0].message.content)
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"turn {turn}"}]
    return {"task": task, "name": name, "answers": answers}
