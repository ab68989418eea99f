"""Nim in the way of OpenPipe ART's Codenames: one model plays both sides, and each side's games are a group.

Meanwhile it plays against a model that is only prompted, for validation.
"""

import asyncio
import json
import os

from openai import AsyncOpenAI

import art_openpipe as art
from art_openpipe.local import LocalBackend

STEPS, GAMES, STICKS = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "6")), 7
TAKE = {
    "type": "object",
    "properties": {"take": {"enum": [1, 2, 3]}},
    "required": ["take"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "take", "schema": TAKE, "strict": True}}
RULES = {"role": "system", "content": "Take 1 to 3 sticks. Who takes the last one wins, who takes too many loses."}


async def taken(player: art.Model, game: art.Trajectory, sticks: int) -> int:
    game.messages_and_choices.append({"role": "user", "content": f"{sticks} sticks are left."})
    client = AsyncOpenAI(base_url=player.inference_base_url, api_key=player.inference_api_key)
    completion = await client.chat.completions.create(
        model=player.get_inference_name(), messages=game.messages(), max_tokens=16, response_format=FORM, logprobs=True
    )
    game.messages_and_choices.append(completion.choices[0])
    return int(json.loads(completion.choices[0].message.content)["take"])


async def play(*players: art.Model) -> list[art.Trajectory]:
    """Return the game as each of the two players saw it."""
    games = [art.Trajectory(messages_and_choices=[RULES]) for _ in players]
    sticks, turn = STICKS, 1
    while sticks > 0:
        turn = 1 - turn
        sticks -= await taken(players[turn], games[turn], sticks)
    winner = turn if sticks == 0 else 1 - turn
    for side, game in enumerate(games):
        game.reward = 1.0 if side == winner else -1.0
        game.metrics["win"] = side == winner
    return games


async def main():
    model = art.TrainableModel(name="nim", run_name="nim-001", project="nim", base_model="Qwen/Qwen2.5-3B-Instruct")
    rival = art.Model(
        name="rival",
        project="nim",
        inference_model_name="gpt-5.6-luna",
        inference_base_url=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        inference_api_key=os.environ["OPENAI_API_KEY"],
    )
    backend = LocalBackend(in_process=True, path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    await rival.register(backend)
    for _ in range(await model.get_step(), STEPS):
        games, as_first, as_second = await asyncio.gather(
            asyncio.gather(*(play(model, model) for _ in range(GAMES))), play(model, rival), play(rival, model)
        )
        await model.log([as_first[0], as_second[1]], split="val")
        sides = [art.TrajectoryGroup(side) for side in zip(*games, strict=True)]
        result = await backend.train(model, sides, learning_rate=1e-4, kl_penalty_coef=0.0)
        await model.log(sides, metrics=result.metrics, step=result.step, split="train")
        await model.delete_checkpoints("val/win")


if __name__ == "__main__":
    asyncio.run(main())
