"""2048 in the way of OpenPipe ART's example, captured: a script as its users write it, and one import line that is ours."""

import asyncio
import json
import math
import os
import random

import art_openpipe as art
from art_openpipe.local import LocalBackend

STEPS, GAMES, TARGET = int(os.environ.get("STEPS", "3")), int(os.environ.get("GAMES", "12")), 32
MOVES = ["left", "right", "up", "down"]
MOVE = {"type": "object", "properties": {"move": {"enum": MOVES}}, "required": ["move"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "move", "schema": MOVE, "strict": True}}


def slid(row):
    """Return a row whose tiles went to its beginning, each merged once with its like."""
    tiles, merged = [tile for tile in row if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        merged.append(tile)
    return merged + [0] * (len(row) - len(merged))


def moved(board, move):
    rows = [list(column) for column in zip(*board, strict=True)] if move in ("up", "down") else board
    back = -1 if move in ("right", "down") else 1
    rows = [slid(row[::back])[::back] for row in rows]
    return [list(column) for column in zip(*rows, strict=True)] if move in ("up", "down") else rows


def with_a_tile(board):
    free = [(row, column) for row in range(4) for column in range(4) if not board[row][column]]
    row, column = random.choice(free)
    board[row][column] = 2 if random.random() < 0.9 else 4
    return board


def shown(board):
    return "\n".join(" | ".join(str(tile or "_") for tile in row) for row in board)


async def play(model: art.Model) -> None:
    """Play one game; its calls are captured, so it only says what the game was worth."""
    trajectory = art.current_trajectory(require=True)
    board, moves = with_a_tile(with_a_tile([[0] * 4 for _ in range(4)])), 0
    messages = [{"role": "system", "content": f"Play 2048: move until a tile is {TARGET}."}]
    while max(map(max, board)) < TARGET and any(moved(board, move) != board for move in MOVES) and moves < 8:
        messages.append({"role": "user", "content": shown(board)})
        async with trajectory.track_duration("llm"):
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(),
                messages=messages,
                max_completion_tokens=16,
                response_format=FORM,
                temperature=0.9,
            )
        answer = completion.choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        after = moved(board, json.loads(answer)["move"])
        if after == board:
            trajectory.metrics["invalid_move"] = 1
            break
        board, moves = with_a_tile(after), moves + 1

    largest, total = max(map(max, board)), sum(map(sum, board))
    trajectory.metrics |= {"max_value": largest, "board_value": total, "num_moves": moves}
    reach, value = math.log(largest, 2) / math.log(TARGET, 2), math.log(total, 2) / math.log(TARGET * 16, 2)
    trajectory.reward = 2.0 if largest >= TARGET else reach + 0.2 * value


async def main():
    random.seed(7)
    model = art.TrainableModel(
        name="agent-002",
        run_name="agent-002",
        project="2048",
        base_model="Qwen/Qwen2.5-3B-Instruct",
        lora_config=art.LoRAConfig(rank=8),
        _internal_config=art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=2048)),
    )
    backend = LocalBackend(path=os.environ.get("ART_PATH", ".art"))
    await model.register(backend)
    for step in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(
            (
                art.trajectory_group(
                    (art.trajectory(play(model)) for _ in range(GAMES)), metadata={"step": step}, return_exceptions=True
                )
                for _ in range(2)
            ),
            pbar_desc="gather",
        )
        result = await backend.train(model, train_groups, learning_rate=1e-4)
        metrics = {**result.metrics, "best": max(game.reward for group in train_groups for game in group)}
        await model.log(train_groups, metrics=metrics, step=result.step, split="train")
        await model.delete_checkpoints("train/best")
    # What a model writes may not come back as it was; then a game has several sequences.
    for game in await art.tokenize(train_groups[0].trajectories, multi_history=True):
        print([len(history.tokens) for history in game.histories])


if __name__ == "__main__":
    asyncio.run(main())
