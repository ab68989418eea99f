"""What test_ray_training.py runs in a process of its own, because a Ray cluster is the whole process's:

    train_email_on_ray.py FOLDER SEED

Trains the email example on a Ray cluster of two nodes on this machine, kills one process that runs agents in the middle of
step 4's rollouts, and prints a line of JSON.
"""

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 is this machine's address, and nobody else's

from process_marks import marked
from ray.cluster_utils import Cluster

import art_core as art
from examples.email_search.reward import reward
from examples.email_search.tasks import training_tasks

KILLED_AFTER = 3


class Killer:
    """A tracker that kills a process with agents after a step, when each has some of the next step's 32 rollouts."""

    def __init__(self, folder):
        self.store = Path(folder) / "run.sqlite"
        self.killed = []

    def log(self, step, metrics):
        if step == KILLED_AFTER:
            threading.Thread(target=self.kill, daemon=True).start()  # it must not outlive a training that fails

    def kill(self):
        while self.unfinished() < 20:
            time.sleep(0.01)
        for process, command in sorted(marked(os.environ["ART_TEST_MARK"]).items()):
            if b"AgentWorker" in command:
                os.kill(process, signal.SIGKILL)
                self.killed.append(process)
                return

    def unfinished(self):
        with closing(sqlite3.connect(self.store)) as db:
            return db.execute("SELECT count(*) FROM rollouts WHERE finished IS NULL").fetchone()[0]

    def close(self):
        pass


def main(folder, seed):
    node = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 2,
        "object_store_memory": 100_000_000,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address
    killer = Killer(folder)
    try:
        # The same tasks in every step, because their difficulty moves a step's mean reward by 0.1 and more.
        result = art.train_sync(
            "examples.email_search.agent:build_agent", training_tasks(4, 1), model="tiny", reward=reward, steps=8,
            tasks_per_step=4, learning_rate=1e-3, seed=seed, run_dir=folder, trackers=[killer], executor="ray",
            executor_args={"workers": 2}, learner="ray", learner_args={"processes": 2},
        )  # fmt: skip
        print(json.dumps({"killed": killer.killed, "steps": result.report["steps"]}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
