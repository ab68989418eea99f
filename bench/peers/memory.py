"""Peak memory of a step above weights, gradients and AdamW's moments. Each figure comes from its own process.

The child first takes a small step, so that all of these exist, returns free memory to the system, resets the kernel's high-water
mark (on Linux), and takes the step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from art_core.token_tree import build_tree
from art_core.types import TokenTree, Trajectory
from bench import tree as ours
from bench.peers.batch import history_rows
from bench.plain import dense_tree_logprobs, rows_backward
from bench.shapes import random_model
from bench.synthetic import TokenCall, random_trajectories
from bench.tables import table, wanted

SIDES = ("ours", "naive tree, dense mask", "histories, padded", "histories, one by one")
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""By default glibc keeps freed memory, which would distort the peak."""


def run(options: Namespace) -> None:
    """Print MB by the tree's tokens and by vocabulary."""
    sizes = [int(size) for size in options.tokens.split(",")]
    print(
        f"\n## Peak memory of a step above weights, gradients and optimizer (MB)\n\n{options.size}, a group of "
        f"{options.group_size} rollouts of 4 turns; each figure from a fresh process\n"
    )
    sides = [side for side in SIDES if wanted(side, options.skip)]
    rows = []
    for side in sides:
        for vocabulary in (int(size) for size in options.vocabularies.split(",")):
            peaks = [peak_of_child(side, tokens, vocabulary, options) for tokens in sizes]
            growth = [later / before for before, later in pairwise(peaks) if before and later]
            rows.append([side, vocabulary, *peaks, max(growth, default=None)])
            print(f"  {side}, vocabulary {vocabulary}: {peaks}", file=sys.stderr, flush=True)
    print(
        table(["side", "vocabulary", *(f"{size} tokens" for size in sizes), "most growth per step"], rows), flush=True
    )


def peak_of_child(side: str, tokens: int, vocabulary: int, options: Namespace) -> float | None:
    """Return the peak in MB; None if the child exceeded ``--most-gb`` (on Linux) and failed at that limit."""
    job = {
        "side": side, "tokens": tokens, "vocabulary": vocabulary, "size": options.size, "runs": options.group_size,
        "most": options.most_gb, "micro_batch": options.micro_batch,
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-m", "bench.peers.memory", json.dumps(job)],
        env={**os.environ, **RETURN_FREED, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    if any(word in child.stderr for word in ("not enough memory", "MemoryError", "can't allocate")):
        return None
    raise RuntimeError(f"the measurement {job} failed:\n{child.stderr}")


def measure(job: dict) -> float:
    """Take one side's step in this process and return its peak in MB."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(job["most"] * 2**30), resource.RLIM_INFINITY))
    model = random_model(job["size"], job["vocabulary"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step(tokens: int) -> None:
        backward = work(job, random_trajectories(tokens, job["vocabulary"], runs=job["runs"]))
        if tokens == job["tokens"]:
            settle()
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(max(64, 8 * job["runs"]))
    step(job["tokens"])
    return (peak() - BEFORE[0]) / 2**20


BEFORE: list[int] = []
"""Resident bytes when the step began."""


def settle() -> None:
    """Return free memory to the system and note what remains."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    BEFORE[:] = [peak()]


def peak() -> int:
    """Return the peak of resident bytes, on Linux since ``settle``, else since the process began."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def work(job: dict, trajectories: list[Trajectory]) -> Callable[[torch.nn.Module], None]:
    """Return the side's forward and backward pass; all preparation is done before."""
    tree = build_tree(trajectories, [1.0] * len(trajectories))
    rows = [row for trajectory in trajectories for row in history_rows(_token_calls(trajectory))]
    return {
        "ours": lambda model: ours.backward(model, [tree]),
        "naive tree, dense mask": lambda model: ours.backward(model, [tree], dense_tree_logprobs),
        "histories, padded": lambda model: rows_backward(model, rows, job["micro_batch"], _trained(tree)),
        "histories, one by one": lambda model: rows_backward(model, rows, 1, _trained(tree)),
    }[job["side"]]


def _trained(tree: TokenTree) -> int:
    return int((tree.weights != 0).sum())


def _token_calls(trajectory: Trajectory) -> list[TokenCall]:
    return [TokenCall(call.prompt_ids, call.sampled_ids) for call in trajectory.calls]


if __name__ == "__main__":
    parser = ArgumentParser(description="One measurement, started by python -m bench.peers --only memory")
    parser.add_argument("job", type=json.loads)
    print(json.dumps(measure(parser.parse_args().job)))
