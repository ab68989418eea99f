"""A short training on the server that the environment names: python train_email_on_tinker.py RUN_DIR."""

import sys
from pathlib import Path

from bench.tinker import train_email

if __name__ == "__main__":
    train_email(Path(sys.argv[1]), 2, eval_tasks=2, tasks_per_step=2, group_size=4)
