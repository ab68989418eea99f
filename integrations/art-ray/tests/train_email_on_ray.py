"""What test_ray_training.py runs in a process of its own, because a Ray cluster is the whole process's:

    train_email_on_ray.py FOLDER SEED

Trains the email example on a Ray cluster of two nodes on this machine, kills one process that runs agents in the middle of
step 5's rollouts, and prints a line of JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 is this machine's address, and nobody else's

from process_marks import marked
from ray.cluster_utils import Cluster

import art_core as art
from examples.email_search.reward import reward
from examples.email_search.tasks import training_tasks

KILLED_AFTER = 4


class Killer:
    """A tracker that kills a process with agents a moment after a step, when the next step's rollouts run."""

    def __init__(self):
        self.killed = []

    def log(self, step, metrics):
        if step == KILLED_AFTER:
            threading.Thread(target=self.kill).start()

    def kill(self):
        time.sleep(1.5)
        for process, command in sorted(marked(os.environ["ART_TEST_MARK"]).items()):
            if b"AgentWorker" in command:
                os.kill(process, signal.SIGKILL)
                self.killed.append(process)
                return

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
    killer = Killer()
    try:
        result = art.train_sync(
            "examples.email_search.agent:build_agent", training_tasks(500, seed), model="tiny", reward=reward, steps=8,
            learning_rate=1e-3, seed=seed, run_dir=folder, trackers=[killer], executor="ray", learner="ray",
            executor_args={"workers": 2}, learner_args={"processes": 2},
        )  # fmt: skip
        print(json.dumps({"killed": killer.killed, "steps": result.report["steps"]}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
