"""The classic training program, with one reward per whole episode: ``python -m examples.game_2048.classic``

``ART_EPOCHS`` sets the number of epochs (500), ``ART_MODEL`` the model. The README's figures are those of ``train.py``.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from art_classic.trainer import GRPOTrainer

from .agent import Game2048Agent
from .environment import Game2048Environment


async def train_2048_agent(**settings: Any) -> list[dict[str, float]]:
    """Train the player and return the metrics of every epoch; ``settings`` are keywords of ``GRPOTrainer``."""
    # The search calls no model, so there would be nothing to train.
    agent = Game2048Agent(strategy="deep_learning")
    settings = {
        "learning_rate": 5e-6, "batch_size": 16, "episodes_per_batch": 64, "max_episode_length": 200, **settings,
    }  # fmt: skip
    trainer = GRPOTrainer(agent=agent, environment=Game2048Environment(), **settings)
    epochs, best_score, history = int(os.environ.get("ART_EPOCHS", "500")), 0.0, []
    for epoch in range(epochs):
        print(f"Epoch {epoch + 1}/{epochs}")
        episodes = await trainer.collect_episodes()
        epoch_best = max(ep["total_reward"] for ep in episodes)
        if epoch_best > best_score:
            best_score = epoch_best
            await trainer.save_checkpoint("2048_best_model.pt")
        history.append(await trainer.update_policy(episodes))
        if epoch % 50 == 0:
            print(f"Best Score: {best_score}")
            print(f"Average Reward: {history[-1]['avg_reward']:.3f}")
            print(f"Policy Loss: {history[-1]['policy_loss']:.6f}")
    return history


if __name__ == "__main__":
    asyncio.run(train_2048_agent())
