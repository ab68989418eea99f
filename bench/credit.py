"""Credit by branch beside credit by rollout: held-out results of the examples after equally many rollouts.

    python -m bench.credit --seeds 0 1 2                    every example, seed after seed
    python -m bench.credit email_search --steps 10          one of them

Every rollout has one reward. ``advantage="branch"`` compares a call with the rollouts that shared its context, "mean_std" with
all of its group. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import art_core as art
from art_core.types import Trajectory
from bench.tables import table
from examples.email_search import train as email_search
from examples.game_2048 import train as game_2048
from examples.game_2048.evaluate import mean_and_margin, measure, player
from examples.game_2048.rules import as_board
from examples.game_2048.tasks import move_reward
from examples.multi_agent import train as multi_agent

WAYS = ("mean_std", "branch")
GAMES, MOVES = 128, 40
"""Held-out games of 2048, and the moves that are looked at."""


def worth_of_moves(game: dict[str, Any]) -> float:
    """Return the mean reward of a game's moves."""
    return fmean(move_reward(as_board(move["board"]), move["said"]) for move in game["moves"])


def one_for_all_moves(trajectory: Trajectory) -> float:
    """The reward of 2048 for credit by rollout."""
    return worth_of_moves(trajectory.output) if trajectory.output else -1.0


def successes(result: art.TrainResult) -> list[float]:
    """Return the success of each held-out rollout after training."""
    return [float(t.metrics["success"]) for t in result.after.trajectories]


def emails(options: argparse.Namespace, **settings: Any) -> list[float]:
    """Train the email agent, whose rollouts have up to eight calls."""
    return successes(email_search.run(eval_tasks=options.tasks, **settings))


def team(options: argparse.Namespace, **settings: Any) -> list[float]:
    """Train the team of searcher, reader and writer on what they achieve together."""
    return successes(multi_agent.run("run", eval_tasks=options.tasks, learning_rate=1e-3, **settings))


def games(options: argparse.Namespace, **settings: Any) -> list[float]:
    """Train the player of 2048 on the mean worth of a rollout's 16 moves."""
    result = game_2048.run(reward=one_for_all_moves, **settings)
    return [worth_of_moves(it) for it in asyncio.run(measure(player(str(result.run_dir)), GAMES, most_moves=MOVES))]


EXAMPLES: dict[str, Callable[..., list[float]]] = {"email_search": emails, "multi_agent": team, "game_2048": games}


def measured(example: str, way: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Train, or read what was measured before; return the held-out results."""
    folder = options.out / f"{example}-{way}-{seed}-{options.steps}-steps-{options.tasks}-tasks"
    kept = folder / "held_out.json"
    if not kept.is_file():
        found = EXAMPLES[example](
            options, advantage=way, seed=seed, steps=options.steps, run_dir=folder, progress=False, keep_checkpoints=1
        )
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def with_interval(found: Sequence[float]) -> str:
    """Return the mean and half its 95 % interval."""
    mean, margin = mean_and_margin(found)
    return f"{mean:.3f} ± {margin:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=[*EXAMPLES], metavar="EXAMPLE", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--out", type=Path, default=Path("runs/credit"))
    options = parser.parse_args(arguments)
    if unknown := set(options.examples) - EXAMPLES.keys():
        parser.error(f"unknown examples: {', '.join(sorted(unknown))}")
    rows = []
    for example in options.examples:
        found = {(way, seed): measured(example, way, seed, options) for seed in options.seeds for way in WAYS}
        for way in WAYS:
            values = [found[way, seed] for seed in options.seeds]
            rows.append(
                [example, way, *map(with_interval, values), with_interval([it for each in values for it in each])]
            )
    print(table(["example", "advantage", *(f"seed {seed}" for seed in options.seeds), "all"], rows))


if __name__ == "__main__":
    main()
