"""Tic-tac-toe in the way of OpenPipe ART's example: a script as its users write it, and one import line that is ours.

The move is asked for as JSON, by OpenAI's response_format: a model of a million parameters does not know the form by itself.
"""

import asyncio
import json
import math
import os
import random

import openai
from pydantic import BaseModel

import art_openpipe as art
from art_openpipe.local import LocalBackend

STEPS, GAMES = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "16"))
SQUARES = [f"{row}{column}" for row in "ABC" for column in "123"]
LINES = (
    [SQUARES[i : i + 3] for i in (0, 3, 6)]
    + [SQUARES[i::3] for i in range(3)]
    + [["A1", "B2", "C3"], ["A3", "B2", "C1"]]
)
MOVE = {
    "type": "object",
    "properties": {"move": {"enum": SQUARES}},
    "required": ["move"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "move", "schema": MOVE, "strict": True}}


class Scenario(BaseModel):
    step: int


def winner_of(board):
    for line in LINES:
        marks = {board[square] for square in line}
        if len(marks) == 1 and marks != {" "}:
            return marks.pop()
    return None if " " in board.values() else "draw"


def shown(board):
    rows = [" ".join(board[f"{row}{column}"].replace(" ", "_") for column in "123") for row in "ABC"]
    return "\n".join(rows)


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    board = dict.fromkeys(SQUARES, " ")
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "Play tic-tac-toe as x. Answer with a free square."}],
        metadata={"step": scenario.step},
        reward=0,
    )
    moves = 0
    while winner_of(board) is None:
        trajectory.messages_and_choices.append({"role": "user", "content": shown(board)})
        client = model.openai_client()
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_completion_tokens=32,
            response_format=FORM,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        try:
            square = json.loads(choice.message.content)["move"]
            if board[square] != " ":
                raise ValueError(f"{square} is taken")
        except (ValueError, KeyError):
            trajectory.reward = -1 + math.log(moves + 1) / math.log(100)
            break
        board[square] = "x"
        moves += 1
        if winner_of(board) is None:
            board[random.choice([square for square in SQUARES if board[square] == " "])] = "o"

    winner = winner_of(board)
    if winner is not None:
        trajectory.reward = {"x": 1.0, "draw": 0.5, "o": 0.0}[winner]
        trajectory.metrics["win"] = trajectory.reward
    trajectory.metrics["num_moves"] = moves
    return trajectory


async def main():
    random.seed(42)
    model = art.TrainableModel(
        name="agent", run_name="001-script", project="tic-tac-toe", base_model="Qwen/Qwen2.5-3B-Instruct"
    )
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    for step in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, Scenario(step=step)) for _ in range(GAMES)) for _ in range(2)),
            pbar_desc="gather",
        )
        result = await backend.train(model, train_groups, learning_rate=1e-4)
        await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
        await model.delete_checkpoints("train/reward")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
