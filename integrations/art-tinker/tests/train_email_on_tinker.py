"""Train the email agent through Tinker's API: python train_email_on_tinker.py RUN_DIR STEPS; TINKER_BASE_URL has the address."""

import sys
from pathlib import Path

from examples.email_search.train import run

LEARNING_RATE = 5e-3


def main(run_dir: str, steps: str) -> None:
    run(
        int(steps), eval_tasks=8, eval_temperatures=(1.0,), run_dir=Path(run_dir), learning_rate=LEARNING_RATE, decay_steps=0,
        engine="tinker", learner="tinker", lora_rank=16, tasks_per_step=4, keep_checkpoints=None,
        learner_args={"averages": True},
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
