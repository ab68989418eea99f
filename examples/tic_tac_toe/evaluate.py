"""Wins, draws and losses of a model or a run against both opponents: python -m examples.tic_tac_toe.evaluate runs/my-run"""

from __future__ import annotations

from typing import Annotated

import typer

import art_core as art
from art_core.loop.metrics import wilson_interval

from .agent import OPPONENTS, agent
from .make_start import START
from .tasks import matches, reward


def table(report: art.Report) -> str:
    """Return the shares of wins, draws and losses against each opponent, with 95 % intervals."""
    lines = []
    for opponent in OPPONENTS:
        games = [t.metrics for t in report.trajectories if t.task["opponent"] == opponent]
        mean = {name: sum(it.get(name, 0.0) for it in games) / len(games) for name in ("win", "loss", "illegal")}
        shares = {"won": mean["win"], "drawn": 1 - mean["win"] - mean["loss"], "lost": mean["loss"]}
        shown = [_with_interval(name, share, len(games)) for name, share in shares.items()]
        lines.append(
            f"  {opponent} player: {', '.join(shown)}; {mean['illegal']:.1%} of the games ended by an illegal answer"
        )
    return "\n".join(lines)


def _with_interval(name: str, share: float, n: int) -> str:
    low, high = wilson_interval(share, n)
    return f"{name} {share:.1%} ({low:.1%} to {high:.1%})"


def main(
    model: Annotated[str, typer.Argument(help="tiny, a model folder or a run folder.")] = str(START),
    games: Annotated[int, typer.Option(help="Games against each opponent.")] = 200,
    temperature: Annotated[float | None, typer.Option(help="Default: the agent's own, 0.")] = None,
) -> None:
    """Play against a random and a perfect player."""
    tasks = [match for opponent in OPPONENTS for match in matches(games, opponent)]
    print(table(art.evaluate_sync(agent, tasks, model=model, reward=reward, temperature=temperature)))


if __name__ == "__main__":
    typer.run(main)
