"""Trains until it is ended, in the run folder that is given; says every step that W&B was told."""

import asyncio
import sys
from pathlib import Path

from short_training import train

from art_core.config import TrainConfig
from art_wandb import WandbTracker


class Loud(WandbTracker):
    def log(self, step, metrics):
        super().log(step, metrics)
        print(f"told {step}", flush=True)


folder = Path(sys.argv[1])
asyncio.run(train(folder, steps=10**6, tasks_per_step=1, trackers=[Loud(folder, TrainConfig(model="tiny"))]))
