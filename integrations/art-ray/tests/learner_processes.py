"""What the processes of test_learner_processes.py run: a learner that shares its work takes some steps.

    learner_processes.py FOLDER SHARDING RANK SIZE

``FOLDER/jobs.json`` says which; the first process writes checkpoints and metrics there, a folder for every job.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tree_cases import FORKED

from art_core.config import TrainConfig
from art_core.errors import NotFiniteError
from art_core.learner import TorchLearner
from art_core.losses import grpo
from art_core.token_tree import build_tree
from art_ray.sharding import processes


def trees_of_step(step):
    """Uneven trees: of all runs, of one, of two; the second step has a single tree, the third more than processes."""
    whole = build_tree(FORKED, [1.0, -1.0, 0.5])
    pairs = build_tree(FORKED[:2], [0.5 + 0.1 * step, -0.5])
    single = build_tree(FORKED[2:], [-1.0])
    chosen = {0: [whole, pairs], 1: [pairs], 2: [single, whole, pairs, pairs, single]}[step % 3]
    return [replace(tree, old_logprobs=tree.old_logprobs - 1.5) for tree in chosen]


def check_refused(learner):
    """A step of which one process's share has no finite gradient is taken by none."""
    whole, pairs = trees_of_step(0)
    try:
        learner.step([replace(whole, advantages=whole.advantages * np.float32("inf")), pairs])
    except NotFiniteError as error:
        assert error.details["gradients"], error.details
    else:
        raise AssertionError("the step was taken")


def run(folder, job, group):
    """Take a job's steps, and write what they led to."""
    folder = Path(folder) / job["name"]
    config = TrainConfig(**{"warmup_steps": 2, "seed": 3, "learning_rate": 1e-3, **job["settings"]})
    learner = TorchLearner(job["model"], config, grpo, group)
    if job["restore"]:
        learner.restore(Path(job["restore"]))
    metrics = []
    for step in job["steps"]:
        if group.size > 1 and step == 1:
            check_refused(learner)
        metrics.append(learner.step(trees_of_step(step)))
    learner.save(folder / "checkpoint")
    learner.publish(folder / "published")
    scores = learner.score([3, 1, 4, 1, 5])
    if not group.rank:
        (folder / "metrics.json").write_text(json.dumps({"steps": metrics, "score": scores}))


def main(folder, sharding, rank, size):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "meeting"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        for job in json.loads((Path(folder) / "jobs.json").read_text()):
            run(folder, job, processes(sharding))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
