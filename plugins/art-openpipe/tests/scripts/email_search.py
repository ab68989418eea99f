"""A search through mails in the way of OpenPipe ART's ART.E: a loop with tools, scored by RULER, with a validation set.

Tool calls are forced, because a model of a million parameters does not make them by itself, and the judge is a function.
"""

import asyncio
import json
import os
import re
from dataclasses import dataclass

import art_openpipe as art
from art_openpipe.local import LocalBackend
from art_openpipe.rewards import ruler_score_group
from art_openpipe.utils import limit_concurrency
from art_openpipe.utils.iterate_dataset import iterate_dataset

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6"))
MAILS = {
    1: "The invoice of March is 40 euros.",
    2: "Lunch is at noon on Friday.",
    3: "Your flight to Oslo leaves at 7.",
}


@dataclass
class Scenario:
    id: int
    question: str
    mail: int


SCENARIOS = [
    Scenario(0, "How much is the invoice?", 1),
    Scenario(1, "When is lunch?", 2),
    Scenario(2, "Which flight?", 3),
]


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("read_mail", id={"enum": [*MAILS]}), tool("return_answer", id={"enum": [*MAILS]})]


@limit_concurrency(12)
async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    messages = [{"role": "system", "content": "Find the mail."}, {"role": "user", "content": scenario.question}]
    trajectory = art.Trajectory(messages_and_choices=messages, tools=TOOLS, metadata={"scenario_id": scenario.id})
    for _ in range(3):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            tools=trajectory.tools,
            tool_choice="required",
            max_completion_tokens=64,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        if not choice.message.tool_calls or choice.finish_reason == "length":
            break
        call = choice.message.tool_calls[0]
        mail = int(json.loads(call.function.arguments)["id"])
        if call.function.name == "return_answer":
            trajectory.metrics["correct"] = float(mail == scenario.mail)
            break
        result = {"role": "tool", "tool_call_id": call.id, "content": MAILS[mail]}
        trajectory.messages_and_choices.append(result)
    return trajectory.finish()


async def judge(messages):
    """Prefer short runs; a script of its users names a model here."""
    fence = re.search(r"=====[0-9a-f]{16}=====", messages[0]["content"])[0]
    shown = re.findall(rf'<trajectory id="(\w+)">\n{fence}\n(.*?)\n{fence}', messages[1]["content"], re.DOTALL)
    scores = [{"trajectory_id": label, "explanation": "", "score": 1 / (1 + len(text) / 400)} for label, text in shown]
    return json.dumps({"scores": scores})


async def gathered(model, scenarios):
    return await art.gather_trajectory_groups(
        [
            art.TrajectoryGroup((rollout(model, scenario) for _ in range(GAMES)), metadata={"scenario_id": scenario.id})
            for scenario in scenarios
        ],
        after_each=lambda group: ruler_score_group(group, judge, swallow_exceptions=True),
        max_exceptions=GAMES * len(scenarios),
    )


async def main():
    model = art.TrainableModel(
        name="email-agent", run_name="email-001", project="email", base_model="Qwen/Qwen3-14B", base_path=".art"
    )
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    batches = iterate_dataset(
        SCENARIOS[:2], groups_per_step=2, num_epochs=STEPS, initial_step=await model.get_step(), use_tqdm=False
    )
    for batch in batches:
        train_groups = await gathered(model, batch.items)
        result = await backend.train(model, train_groups, learning_rate=1e-4)
        await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
        await model.log(await gathered(model, SCENARIOS[2:]), step=result.step, split="val")
        await model.delete_checkpoints()
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
