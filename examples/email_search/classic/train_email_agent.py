"""Train the email search agent in the classic form: ART_MODEL=tiny ART_EPOCHS=10 python train_email_agent.py"""

import argparse
import asyncio
import json
import os

from email_agent import EmailSearchAgent, EmailSearchEnvironment

from art_classic.trainer import GRPOTrainer

EPOCHS = int(os.environ.get("ART_EPOCHS", 100))
LEARNING_RATE = float(os.environ.get("ART_LEARNING_RATE", 1e-5))
"""The default suits a 7B model; the tiny model learns with 5e-4."""
SEED = int(os.environ.get("ART_SEED", 0))
"""Of the queries and of sampling."""


async def train_email_agent():
    with open("email_database.json") as f:
        email_db = json.load(f)
    with open("test_queries.json") as f:
        held_out = {query["email_id"] for query in json.load(f)}

    env = EmailSearchEnvironment(email_db, seed=SEED, held_out=held_out)
    agent = EmailSearchAgent("Qwen/Qwen2.5-7B-Instruct")
    trainer = GRPOTrainer(
        agent=agent,
        environment=env,
        learning_rate=LEARNING_RATE,
        batch_size=8,
        episodes_per_batch=32,
        max_episode_length=10,
        kl_penalty=0.1,
        seed=SEED,
    )

    for epoch in range(EPOCHS):
        print(f"Epoch {epoch + 1}/{EPOCHS}")
        episodes = await trainer.collect_episodes()
        loss_info = await trainer.update_policy(episodes)
        if epoch % 10 == 0 or epoch == EPOCHS - 1:
            print(f"Policy Loss: {loss_info['policy_loss']:.4f}")
            print(f"KL Divergence: {loss_info['kl_loss']:.4f}")
            print(f"Average Reward: {loss_info['avg_reward']:.4f}")
            await trainer.save_checkpoint(f"checkpoint_epoch_{epoch}.pt")

    await trainer.save_checkpoint("best_checkpoint.pt")
    print("Training completed!")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(train_email_agent())
