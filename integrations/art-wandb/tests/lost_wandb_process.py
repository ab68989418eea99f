"""Trains three steps in the run folder that is given and loses wandb's process after the first; prints what is said."""

import asyncio
import sys
from pathlib import Path

import psutil
from short_training import train

from art_core.config import TrainConfig
from art_core.loop.display import Display
from art_wandb import WandbTracker


class Robbed(WandbTracker):
    def log(self, step, metrics):
        super().log(step, metrics)
        for process in psutil.Process().children(recursive=True):
            if step == 1 and process.name().startswith("wandb"):
                process.kill()
                process.wait()


class Printed(Display):
    def say(self, text):
        print(text)


folder = Path(sys.argv[1])
trackers = [Robbed(folder, TrainConfig(model="tiny"))]
result = asyncio.run(train(folder, steps=3, trackers=trackers, progress=Printed(quiet=True)))
print(result.report["steps"], "steps")
