"""What test_training.py runs in a process of its own, because Unsloth changes transformers for the whole process:

    train_email.py FOLDER

Trains the email example with vLLM and Unsloth, ends the server in the middle of step 5's rollouts, and prints a line of JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from process_marks import marked

import art_core as art
from examples.email_search.agent import build_agent
from examples.email_search.reward import reward
from examples.email_search.tasks import training_tasks

KILLED_AFTER = 4


class Killer:
    """A tracker that kills the server a moment after a step, when the next step's rollouts run."""

    def __init__(self):
        self.killed = []

    def log(self, step, metrics):
        if step == KILLED_AFTER:
            threading.Thread(target=self.kill).start()

    def kill(self):
        time.sleep(1.0)
        for process, command in marked(os.environ["ART_TEST_MARK"]).items():
            if b"api_server" in command and b"guard.py" not in command:
                os.kill(process, signal.SIGKILL)
                self.killed.append(process)

    def close(self):
        pass


def main(folder):
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    killer = Killer()
    # The same tasks in every step, because their difficulty moves a step's mean reward by 0.1 and more. By groups of 16 the last
    # four steps' rewards add up to 0.64 more than the first four's (5 seeds, standard deviation 0.11), by groups of 8 to 0.72
    # (0.32). At 5e-3 one of two runs collapsed after step 7, entropy first.
    result = art.train_sync(
        build_agent(), training_tasks(4, 1), model="tiny", reward=reward, steps=8, engine="vllm", learner="unsloth",
        tasks_per_step=4, group_size=16, lora_rank=16, learning_rate=2e-3, seed=1, run_dir=folder, trackers=[killer],
    )  # fmt: skip
    print(json.dumps({"killed": killer.killed, "steps": result.report["steps"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
