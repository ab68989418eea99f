"""The example of self-play: rules, players, what moves are worth, and that its start learns in a minute."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

import art_audit

pytest.importorskip("openai")
pytest.importorskip("transformers")

import art_core as art
from art_core.testing import FakeEngine
from art_core.types import Call, Trajectory
from examples.tic_tac_toe.agent import agent, prompt
from examples.tic_tac_toe.evaluate import table
from examples.tic_tac_toe.game import (
    EMPTY,
    free_cells,
    is_over,
    opening,
    perfect_move,
    play,
    random_move,
    side_to_move,
    value,
    winner,
)
from examples.tic_tac_toe.make_start import CARELESS, START, habit
from examples.tic_tac_toe.tasks import DISCOUNT, ILLEGAL, matches, reward, self_play
from examples.tic_tac_toe.train import LEARNING_RATE


def played(moves: str) -> str:
    board = EMPTY
    for move in moves:
        board = play(board, move)
    return board


def test_three_in_a_row_wins_whichever_way_they_lie():
    for line in ("123", "456", "789", "147", "258", "369", "159", "357"):
        board = "".join("X" if cell in line else cell for cell in EMPTY)
        assert winner(board) == "X" and is_over(board)
    assert winner(EMPTY) is None and not is_over(EMPTY)
    full = played("132465798")
    assert free_cells(full) == [] and is_over(full)


def test_sides_take_turns_and_only_free_cells_can_be_taken():
    board = played("15")
    assert board == "X234O6789" and side_to_move(board) == "X" and free_cells(board) == list("2346789")
    for move in ("1", "0", "10", "", "X"):
        with pytest.raises(ValueError, match="is not a free cell"):
            play(board, move)


@pytest.mark.parametrize("perfect", ["X", "O"])
def test_the_perfect_player_loses_to_no_play_at_all(perfect: str):
    rng, left, seen = random.Random(0), [EMPTY], set()
    while left:
        board = left.pop()
        assert winner(board) in (None, perfect)
        if is_over(board) or board in seen:
            continue
        seen.add(board)
        if side_to_move(board) == perfect:
            best = [move for move in free_cells(board) if -value(play(board, move)) == value(board)]
            assert perfect_move(board, rng) in best
            left += [play(board, move) for move in best]
        else:
            left += [play(board, move) for move in free_cells(board)]
    assert len(seen) > 300


def test_perfect_play_of_both_sides_is_a_draw_and_a_missed_win_is_none():
    assert value(EMPTY) == 0
    assert value("XX3OO6789") == 1
    assert perfect_move("XX3OO6789", random.Random(0)) == "3"


def test_openings_leave_a_move_and_are_the_same_for_the_same_seed():
    boards = [task["board"] for task in self_play(200, 3)]
    assert boards == [task["board"] for task in self_play(200, 3)]
    assert not any(map(is_over, boards))
    assert {9 - len(free_cells(board)) for board in boards} == set(range(8))
    assert len(free_cells(opening(8, random.Random(1)))) == 1


def test_the_model_is_shown_the_board_and_the_lines_that_one_move_completes():
    [message] = prompt("XX3OO6X8O")
    assert message["content"].splitlines()[1:] == ["X X 3", "O O 6", "X 8 O", "X X 3", "O O 6"]


async def games(reply, tasks, tmp_path) -> list[Trajectory]:
    """Return the games of a policy that answers by ``reply(board)``."""

    def answer(request):
        rows = request["messages"][-1]["content"].splitlines()[1:4]
        return reply("".join(rows).replace(" ", ""))

    report = await art.evaluate(
        agent, tasks, model="tiny", reward=reward, engine=FakeEngine(answer), run_dir=tmp_path / "run", progress=False
    )
    return list(report.trajectories)


def first_free(board: str) -> str:
    return free_cells(board)[0]


async def test_both_sides_are_played_by_the_policy_and_each_is_credited_with_how_it_ended(tmp_path):
    (run,) = await games(first_free, [{"board": EMPTY}], tmp_path)
    assert run.output == {"board": "XOXOXOX89", "winner": "X", "moves": list("1234567"), "illegal": None}
    assert [call.agent for call in run.calls] == ["x/1", "o/2", "x/3", "o/4", "x/5", "o/6", "x/7"]
    assert run.calls[1].request["messages"] == prompt("X23456789")
    credit = [call.reward for call in run.calls]
    assert credit[-1] == 1 and credit[-2] == -1 and credit[-3] == pytest.approx(DISCOUNT)
    assert all((it > 0) == call.made_by("x") for it, call in zip(credit, run.calls, strict=True))
    assert run.reward == 0


async def test_an_illegal_answer_loses_and_alone_is_blamed(tmp_path):
    (run,) = await games(
        lambda board: "5" if len(free_cells(board)) > 7 else "the middle", [{"board": "X23456789"}], tmp_path
    )
    assert run.output["illegal"] == "X" and run.output["winner"] == "O" and run.output["moves"] == ["5"]
    assert [call.reward for call in run.calls] == [None, ILLEGAL]
    assert run.metrics["illegal"] == 1


@pytest.mark.system
async def test_a_match_is_played_from_the_empty_board_against_the_named_opponent(tmp_path):
    rng = random.Random(5)
    for opponent, never in (("perfect", "win"), ("random", None)):
        runs = await games(lambda board: random_move(board, rng), matches(40, opponent), tmp_path / opponent)
        for run in runs:
            assert run.calls and all(call.made_by(run.task["side"].lower()) for call in run.calls)
            assert run.reward == {"X": 1, "O": 0, None: 0.5}[run.output["winner"]] or run.task["side"] == "O"
            assert never is None or not run.metrics[never]
    runs = await games(lambda board: perfect_move(board, rng), matches(20, "random"), tmp_path / "best")
    assert not any(run.metrics["loss"] for run in runs)
    assert sum(run.reward for run in runs) > 15


def test_the_table_has_the_shares_of_wins_draws_and_losses_against_each_opponent():
    ended = ["win"] * 5 + ["loss"] * 2 + ["draw"] * 3
    metrics = [{"win": float(it == "win"), "loss": float(it == "loss"), "illegal": 0.0} for it in ended]
    games = [
        Trajectory({"opponent": opponent}, (), metrics=one if opponent == "random" else {"loss": 1.0})
        for opponent in ("random", "perfect")
        for one in metrics
    ]
    lines = {line.split()[0]: line for line in table(SimpleNamespace(trajectories=games)).splitlines()}
    for share in ("won 50.0% (23.7% to 76.3%)", "drawn 30.0% (", "lost 20.0% ("):
        assert share in lines["random"]
    for share in ("won 0.0% (", "drawn 0.0% (", "lost 100.0% ("):
        assert share in lines["perfect"]


def test_a_failed_game_is_worth_nothing():
    assert reward(Trajectory({"board": EMPTY}, (Call((1,), (2,), (0.0,)),), error="ValueError: no")) == 0


def test_the_careless_player_makes_legal_moves_and_sees_wins_and_threats_now_and_then():
    rng = random.Random(0)
    for board in [opening(rng.randint(0, 8), rng) for _ in range(200)]:
        shares = habit(board)
        assert set(shares) == set(free_cells(board)) and sum(shares.values()) == pytest.approx(1)
    won, blocked = CARELESS
    elsewhere = (1 - won) * (1 - blocked) / 5
    assert habit("XX3OO6789") == pytest.approx(
        {"3": won + elsewhere, "6": (1 - won) * blocked + elsewhere} | dict.fromkeys("789", elsewhere)
    )


def winnable(n: int, seed: int) -> list[str]:
    """Return boards on which the side to move can win at once, and need not."""
    rng, boards = random.Random(seed), []
    while len(boards) < n:
        board = opening(rng.randint(4, 7), rng)
        free = free_cells(board)
        if len(free) > 1 and any(winner(play(board, cell)) for cell in free):
            boards.append(board)
    return boards


@pytest.mark.engines
def test_a_minute_of_self_play_teaches_to_take_the_wins_of_the_boards_it_is_played_on(tmp_path):
    boards = winnable(8, 1)
    measured = [
        {"board": board, "opponent": "perfect", "side": side_to_move(board), "seed": i}
        for board in boards
        for i in range(25)
    ]
    result = art.train_sync(
        agent, [{"board": it} for it in boards], model=str(START), reward=reward, steps=15, learning_rate=LEARNING_RATE,
        eval_tasks=measured, eval_temperatures=(1.0,), run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    before, after = (
        sum(len(t.output["moves"]) == 1 and t.metrics["win"] for t in report.trajectories)
        for report in (result.before, result.after)
    )
    # Four standard errors of a difference between two counts of 200.
    assert after - before > 4 * (2 * 200 * 0.25) ** 0.5, (before, after)
    assert art_audit.audit(tmp_path / "run").clean
