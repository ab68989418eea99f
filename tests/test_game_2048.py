"""2048: its rules and rewards by the numbers, the players, and a short real training."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from art_core.testing import FakeEngine
from art_core.types import Call, Trajectory
from examples.game_2048 import evaluate, train
from examples.game_2048.agent import Game2048Agent, invalid_share, messages, play, read_direction
from examples.game_2048.classic import train_2048_agent
from examples.game_2048.environment import Game2048Environment
from examples.game_2048.evaluate import MODEL, Scripted, describe, mean_and_margin, measure, player
from examples.game_2048.rules import DIRECTIONS, as_board
from examples.game_2048.tasks import (
    HELD_OUT_SEEDS,
    TRAINING_SEEDS,
    held_out_games,
    move_reward,
    reward,
    training_positions,
)
from examples.game_2048.train import run

FULL = [[2, 4, 2, 4], [4, 2, 4, 2], [2, 4, 2, 4], [4, 2, 4, 2]]
STATE_KEYS = {"board", "score", "moves_count", "max_tile", "empty_cells", "available_moves"}


def board_of(*rows: list[int]) -> np.ndarray:
    return np.array([*rows, *[[0, 0, 0, 0]] * (4 - len(rows))])


@pytest.mark.parametrize(
    ("line", "merged", "gained"),
    [
        ([2, 2, 0, 0], [4, 0, 0, 0], 4),
        ([2, 0, 0, 2], [4, 0, 0, 0], 4),
        ([2, 2, 2, 0], [4, 2, 0, 0], 4),
        ([2, 2, 2, 2], [4, 4, 0, 0], 8),
        ([4, 2, 2, 0], [4, 4, 0, 0], 4),
        ([0, 8, 0, 8], [16, 0, 0, 0], 16),
        ([2, 4, 8, 16], [2, 4, 8, 16], 0),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
    ],
)
def test_equal_neighbours_merge_once_towards_the_beginning(line: list[int], merged: list[int], gained: int):
    environment = Game2048Environment()
    result, moved = environment.merge_line(np.array(line))
    assert result.tolist() == merged
    assert environment.score == gained
    assert moved == (line != merged)


@pytest.mark.parametrize(
    ("direction", "after"),
    [
        ("left", [[4, 4, 0, 0], [8, 0, 0, 0]]),
        ("right", [[0, 0, 4, 4], [0, 0, 0, 8]]),
        ("up", [[2, 2, 8, 0], [8, 0, 0, 0]]),
    ],
)
def test_a_move_pushes_every_line_and_scores_what_it_merges(direction: str, after: list[list[int]]):
    environment = Game2048Environment()
    environment.board = board_of([2, 2, 4, 0], [8, 0, 4, 0])
    if direction != "up":
        environment.board[1] = [4, 0, 4, 0]
    assert environment.move(direction)
    assert environment.board.tolist() == board_of(*after).tolist()
    assert environment.score == (8 if direction == "up" else 12)


def test_the_reward_of_a_move_is_the_sum_of_its_four_parts():
    environment = Game2048Environment()
    environment.board = board_of([8, 4, 0, 0], [2, 0, 0, 0])
    # 20 scored; 13 cells empty; the largest tile is 2^3; |3 - 2| + |3 - 1| between neighbours.
    assert environment.calculate_smoothness() == -3
    assert environment.calculate_reward(environment.board, -20, True) == pytest.approx(0.20 + 0.13 + 0.3 - 0.15)
    assert environment.calculate_reward(environment.board, 0, False) == -0.1


async def test_a_step_moves_adds_a_tile_and_returns_the_state_the_reward_and_what_happened():
    environment = Game2048Environment(seed=1)
    await environment.reset([[2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    state, value, done, info = await environment.step({"direction": "left"})
    assert state.keys() == STATE_KEYS and state == await environment.get_state()
    assert info == {"moved": True, "score_increase": 4, "max_tile": 4} and not done
    assert (state["score"], state["moves_count"], state["empty_cells"]) == (4, 1, 14)
    assert value == environment.calculate_reward(environment.board, 0, True)


@pytest.mark.parametrize("action", [{"direction": "left"}, {"direction": "sideways"}, {"direction": None}, {}])
async def test_a_move_that_changes_nothing_costs_and_adds_no_tile(action: dict[str, Any]):
    environment = Game2048Environment()
    before = await environment.reset([[2, 4, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    state, value, done, info = await environment.step(action)
    assert state == before and value == -0.1 and not done
    assert info == {"moved": False, "score_increase": 0, "max_tile": 4}


async def test_a_game_begins_with_two_tiles_most_of_them_twos():
    tiles: Counter[int] = Counter()
    for seed in range(500):
        state = await Game2048Environment(seed=seed).reset()
        assert state["empty_cells"] == 14 and state["score"] == state["moves_count"] == 0
        tiles.update(tile for row in state["board"] for tile in row if tile)
    assert tiles.keys() == {2, 4}
    assert 0.86 < tiles[2] / tiles.total() < 0.94


async def test_a_game_is_over_where_no_cell_is_empty_and_no_neighbours_are_equal():
    environment = Game2048Environment()
    assert not (await environment.reset(FULL))["available_moves"] and environment.is_game_over()
    assert (await environment.reset([*FULL[:3], [4, 2, 4, 4]]))["available_moves"] == ["up", "down", "left", "right"]
    assert not environment.is_game_over()


def test_the_search_values_empty_cells_large_tiles_and_smooth_monotonous_lines():
    agent = Game2048Agent("tiny")
    board = board_of([8, 4, 2, 0])
    # 13 empty cells, the largest tile 2^3, neighbours 1 + 1 apart; the row falls by 3, the columns by 3, 2 and 1.
    assert agent.calculate_smoothness(board) == -2
    assert agent.calculate_monotonicity(board) == 0
    assert agent.evaluate_board(board) == 130 + 300 - 100
    uneven = board_of([2, 8, 2, 0])
    # The row rises by 2 and falls by 2 + 1; the columns only fall.
    assert agent.calculate_monotonicity(uneven) == -2


def test_the_value_of_a_move_is_the_mean_over_the_tiles_that_may_appear():
    agent = Game2048Agent("tiny")
    board = [[2, 4, 8, 16], [4, 8, 16, 32], [8, 16, 32, 64], [16, 32, 64, 0]]
    assert agent.evaluate_move(board, "up", 1) == agent.evaluate_move(board, "left", 1) == -1000
    moved = [[2, 4, 8, 0], [4, 8, 16, 16], [8, 16, 32, 32], [16, 32, 64, 64]]
    found = [agent.evaluate_board([[2, 4, 8, tile], *moved[1:]]) for tile in (2, 4)]
    assert agent.evaluate_move(board, "down", 1) == pytest.approx(0.9 * found[0] + 0.1 * found[1])


def test_a_deeper_search_takes_the_best_direction_after_every_tile():
    agent = Game2048Agent("tiny")
    board = [[2, 4, 8, 16], [4, 8, 16, 32], [8, 16, 32, 64], [16, 32, 64, 0]]
    following = [[[2, 4, 8, tile], [4, 8, 16, 16], [8, 16, 32, 32], [16, 32, 64, 64]] for tile in (2, 4)]
    best = [max(agent.evaluate_move(it, direction, 1) for direction in DIRECTIONS) for it in following]
    assert [agent.evaluate_move(it, "up", 1) for it in following] == [-1000, -1000] < best
    assert agent.evaluate_move(board, "down", 2) == pytest.approx(0.9 * best[0] + 0.1 * best[1])


async def test_the_search_player_takes_the_move_that_it_values_most():
    agent = Game2048Agent("tiny", search_depth=1)
    state = await Game2048Environment().reset([[2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    action = await agent.select_action(state)
    values = {it: agent.evaluate_move(state["board"], it, 1) for it in state["available_moves"]}
    assert action["expected_score"] == max(values.values()) == values[action["direction"]]
    assert action["reasoning"] == f"Minimax evaluation: {action['direction']} scored {action['expected_score']:.2f}"
    assert (await agent.select_action({**state, "available_moves": []}))["direction"] == "up"


class Saying:
    """An agent that says the same word always, or one from a list in turn."""

    def __init__(self, *words: str | None) -> None:
        self.words, self.asked = words, 0

    async def select_action(self, state: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        return {"direction": self.words[self.asked % len(self.words)]}


async def test_an_invalid_answer_counts_and_a_random_legal_move_is_played_instead():
    scores = [(await play(Saying(None), seed))["score"] for seed in range(40)]
    random_scores = [game["score"] for game in await measure(Scripted("random"), 40)]
    (mean, margin), (expected, other) = mean_and_margin(scores), mean_and_margin(random_scores)
    assert abs(mean - expected) < 1.5 * (margin + other)
    game = await play(Saying(None, "left", "right"), 7)
    assert game["over"] and 1 / 3 < invalid_share(game) < 1


def test_the_margin_is_half_of_the_95_percent_interval():
    # The deviation is the root of 3.
    assert mean_and_margin([1.0, 1.0, 4.0, 4.0]) == (2.5, pytest.approx(1.96 * 3**0.5 / 2))


async def test_a_single_game_is_described():
    assert "1 games: score" in describe(await measure(Scripted("random"), 1, most_moves=9))


@pytest.mark.parametrize("main", [evaluate.main, train.main])
def test_no_games_at_all_are_refused_before_anything_is_played(main):
    app = typer.Typer()
    app.command()(main)
    refused = CliRunner().invoke(app, ["--games", "0"])
    assert refused.exit_code == 2 and "--games" in refused.output


async def test_held_out_games_say_that_they_are_being_played(capsys):
    await measure(Scripted("random"), 4, most_moves=2)
    assert "playing 4 held-out games" in capsys.readouterr().err


async def test_the_same_seed_and_moves_are_the_same_game_and_a_limit_of_moves_ends_it():
    first, again, other = [await play(Saying("left", "down"), seed, most_moves=9) for seed in (3, 3, 4)]
    assert first == again != other
    assert len(first["moves"]) == 9 and not first["over"]


async def test_the_model_is_shown_the_board_of_the_moment_and_nothing_else():
    engine = FakeEngine(["I go Left.", "up, no, down", "gauche"])
    agent = Game2048Agent("tiny", strategy="deep_learning")
    agent.engine = engine
    board = [[2, 4, 0, 0], [0, 0, 0, 0], [0, 0, 2048, 0], [0, 0, 0, 0]]
    state = {"board": board}
    said = [(await agent.select_action(state))["direction"] for _ in range(3)]
    assert said == ["left", None, None]
    assert all(request["messages"] == messages(board) for request in engine.requests)
    assert messages(board)[1]["content"].splitlines()[::2] == ["    2    4    0    0", "    0    0 2048    0"]


@pytest.mark.parametrize(("answer", "direction"), [("up", "up"), (" Down.\n", "down"), ("upwards", None), ("", None)])
def test_an_answer_must_name_one_direction(answer: str, direction: str | None):
    assert read_direction(answer) == direction


def test_what_a_move_is_worth_is_its_place_among_the_legal_moves_whatever_the_position():
    board = ((2, 2, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    worth = {it: move_reward(board, it) for it in ("down", "left", "right")}
    assert sum(worth.values()) == pytest.approx(0)
    assert max(worth.values()) - min(worth.values()) == pytest.approx(1)
    assert worth["down"] == min(worth.values())
    assert move_reward(board, "up") == move_reward(board, None) == -1
    forced = ((0, 0, 0, 2), (0, 0, 0, 4), (0, 0, 0, 2), (0, 0, 0, 4))
    assert move_reward(forced, "left") == 0


def test_the_reward_is_the_score_and_every_call_has_one_of_its_own():
    game = asyncio.run(play(Saying("left", None, "down"), 5, most_moves=6))
    calls = tuple(Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(0.0,)) for _ in game["moves"])
    trajectory = Trajectory(task={"seed": 5}, calls=calls, output=game)
    assert reward(trajectory) == game["score"]
    assert len(trajectory.call_rewards) == 6
    assert {trajectory.call_rewards[i] for i, move in enumerate(game["moves"]) if not move["legal"]} == {-1.0}
    assert trajectory.metrics["invalid"] == invalid_share(game)
    failed = Trajectory(task={"seed": 5}, calls=calls, output=None, error="ValueError: no")
    assert reward(failed) == 0 and not failed.call_rewards


def test_training_positions_are_early_and_late_and_no_held_out_game_is_trained_on():
    tasks, games = training_positions(200, 1), held_out_games(200, 1)
    assert tasks == training_positions(200, 1) != training_positions(200, 2)
    assert {task["seed"] for task in tasks} <= set(TRAINING_SEEDS) and {game["seed"] for game in games} <= set(
        HELD_OUT_SEEDS
    )
    largest = Counter(max(map(max, task["board"])) for task in tasks)
    assert largest.keys() >= {4, 16, 64, 128}
    assert all("board" not in game for game in games)


SHORT = {"batch_size": 2, "episodes_per_batch": 4, "max_episode_length": 6, "progress": False}


@pytest.mark.engines
@pytest.mark.parametrize("model", ["tiny", str(MODEL)])
async def test_the_classic_program_trains_any_model_that_the_environment_variable_names(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_MODEL", model)
    monkeypatch.setenv("ART_EPOCHS", "2")
    history = await train_2048_agent(run_dir=tmp_path / "run", learning_rate=5e-4, **SHORT)
    said = capsys.readouterr().out
    assert "Epoch 2/2" in said and f"Average Reward: {history[0]['avg_reward']:.3f}" in said
    assert len(history) == 2 and all(epoch.keys() >= {"policy_loss", "kl_loss", "avg_reward"} for epoch in history)
    if model == "tiny":  # it knows no boards, and says nothing that is a direction
        assert all(epoch["avg_reward"] == pytest.approx(-0.6, abs=0.6) for epoch in history)


@pytest.mark.engines
def test_six_steps_teach_moves_that_are_worth_more_in_held_out_games(tmp_path: Path):
    def worth(name: str) -> float:
        games = asyncio.run(measure(player(name), 64, most_moves=40))
        moves = [move for game in games for move in game["moves"]]
        return fmean(move_reward(as_board(move["board"]), move["said"]) for move in moves)

    run(steps=6, run_dir=tmp_path / "run", progress=False)
    # Measured before: -0.037, standard deviation 0.009 (eight times); after: 0.128 and 0.005 (five seeds).
    assert worth(str(tmp_path / "run")) > worth(str(MODEL)) + 0.07


def test_every_tile_and_every_direction_is_one_token_of_the_start_model_which_is_small():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tiles = [0, *(2**power for power in range(1, 13))]
    assert {len(tokenizer(f"{tile:>5}")["input_ids"]) for tile in tiles} == {1}
    assert {len(tokenizer(direction)["input_ids"]) for direction in DIRECTIONS} == {1}
    boards = [[tiles[:4], tiles[4:8], tiles[8:12], tiles[9:13]], [[0] * 4] * 4]
    prompts = [tokenizer.apply_chat_template(messages(it), tokenize=False) for it in boards]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert len(ids[0]) == len(ids[1]) and [tokenizer.decode(it) for it in ids] == prompts
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 2_000_000
