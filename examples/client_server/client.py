"""A client of ``server.py``: runs the episodes that it receives, an agent in an environment, and sends back the results.

python examples/client_server/client.py client_1 [ws://127.0.0.1:8000]
"""

import asyncio
import logging
import sys

from art_classic.environment import Environment, register_environment
from art_server import TrainingClient


class Guess(Environment):
    """Name a number in at most three attempts; the nearer, the better."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.attempts = int(number), 0

    async def reset(self) -> dict:
        self.attempts = 0
        return {"task": f"Name the number {self.number}, as JSON: {{'type': 'guess', 'number': ...}}"}

    async def step(self, action: dict) -> tuple:
        self.attempts += 1
        guess = action.get("number")
        near = 1 / (1 + abs(guess - self.number)) if isinstance(guess, int | float) else 0.0
        done = near == 1 or self.attempts == 3
        return await self.reset() if done else {"task": "again", "number": self.number}, near, done, {}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Episodes can only name what is registered here, and pass its arguments.
    register_environment("guess", Guess)
    client_id, url = (sys.argv[1:] + ["client_1", "ws://127.0.0.1:8000"][len(sys.argv) - 1 :])[:2]
    asyncio.run(TrainingClient(client_id, url).run())
