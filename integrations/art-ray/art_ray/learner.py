"""``learner="ray"``: a learner on several processes or GPUs of a Ray cluster.

It uses actors in a placement group, set up as Ray Train sets up its workers (one process per GPU, connected by
torch.distributed with NCCL or gloo), but not Ray Train itself. A run makes a step, then a swap, then a checkpoint, and must know
whether each one succeeded. ``TorchTrainer.fit`` runs a whole loop, and if a worker dies, it restarts the loop by itself from its
own checkpoint. Here, a dead process ends the step with an error, and the run resumes from the run folder's checkpoint, whose
version the store and the engine know. ``sharding.py`` divides the computation and sums the gradients.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art_core import TrainConfig
from art_core.errors import ArtError, ConfigError
from art_core.types import LearnerBase, Loss, TokenTree, Weights
from art_ray.cluster import Cluster
from art_ray.files import blocks, listed, marker, read_block, replace_folder, write_block
from art_ray.learner_process import LearnerProcess
from art_ray.options import LearnerOptions, parsed

logger = logging.getLogger("art_ray")

GRACE = 10.0
"""Seconds after one process's error for the others to fail with the same; if all do, the learner is unchanged."""
GONE = -1
"""The version of a learner whose processes are gone; no weights have it."""


class RayLearner(LearnerBase):
    """A learner in several processes, on all of which every method is called.

    ``publish`` and ``save`` write to this machine's disk, wherever the processes run.
    """

    def __init__(self, model_folder: str | Path, config: TrainConfig, loss: Loss) -> None:
        self.config, self.loss = config, loss
        self.options = parsed(LearnerOptions, "learner_args", config.learner_args)
        self.version = 0
        self._broken = ""
        self._processes: list[Any] = []
        self._group: Any = None
        self._cluster = Cluster()
        try:
            self._start(str(model_folder))
        except BaseException:
            self.close()
            raise

    def _start(self, folder: str) -> None:
        gpus = self._cluster.total("GPU")
        size = self.options.processes or max(1, gpus)
        bundle = {"CPU": self.options.cpus, **({"GPU": 1.0} if gpus else {})}
        self._place(size, bundle)
        kind = ray.remote(LearnerProcess)
        common = {
            "num_cpus": self.options.cpus,
            "num_gpus": bundle.get("GPU", 0),
            "runtime_env": dict(self.options.runtime_env) or None,
        }
        strategies = [PlacementGroupSchedulingStrategy(self._group, rank) for rank in range(size)]
        self._processes = [kind.options(scheduling_strategy=strategy, **common).remote() for strategy in strategies]
        first = ray.get(self._processes[0].address.remote())
        job = ray.put((folder, self.config, self.loss))
        joining = [
            process.join.remote(first, rank, size, self.options.sharding, job)
            for rank, process in enumerate(self._processes)
        ]
        self._wait_for(joining, "starting")
        device = "GPU" if gpus else "CPU"
        self.choice = f"learner='ray': {size} {device} process{'es' * (size > 1)} ({self.options.sharding})"

    def _place(self, size: int, bundle: dict[str, float]) -> None:
        self._group = placement_group([bundle] * size, strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=self.options.start_seconds)
        if not ready:
            needed = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            total = ", ".join(f"{self._cluster.total(name)} {name}" for name in bundle)
            raise ConfigError(
                f"Ray could not place {size} learner processes of {needed} each within {self.options.start_seconds:g} seconds; "
                f"the cluster has {total}, which other jobs may use ('ray status' lists them). Ask for fewer with "
                "learner_args={'processes': N, 'cpus': N}, or for fewer executor_args={'workers': N}"
            )

    def begin_step(self, run_step: int) -> None:
        """Tell all processes which step of the run follows."""
        self._all("begin_step", run_step)

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Make one optimizer step on all ``trees``; return the metrics of the whole step. See ``TorchLearner.step``.

        If all processes fail with the same error, it is raised and the weights are unchanged. If only some fail, or one dies,
        ArtError is raised, ``version`` is ``GONE``, and this learner can't be used any more.
        """
        shared_trees = ray.put(list(trees))
        return self._all("step", shared_trees, **({} if loss is None else {"loss": loss}))[0]

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Return the seconds that the slowest process takes for its part of a step; weights don't change."""
        return max(self._all("measure", ray.put(list(trees))))

    def weights(self) -> Weights:
        """Return only the version: engines share no memory with these processes, so they get weights through ``publish``."""
        self._check()
        return Weights(self.version, path=None, live=None)

    def publish(self, folder: Path) -> Weights:
        """Write the weights to ``folder``: a model folder, or with LoRA an adapter in it."""
        folder = Path(folder).absolute()
        published, written_to = self._write("publish", folder)
        return Weights(self.version, folder / Path(published.path).relative_to(written_to))

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob of every token except the first."""
        return self._all("score", list(ids))[0]

    def save(self, folder: Path) -> None:
        """Write a checkpoint; it doesn't depend on the number of processes and the sharding."""
        self._write("save", Path(folder).absolute())

    def restore(self, folder: Path) -> None:
        """Load a checkpoint, which may have been written by any number of processes."""
        folder = Path(folder).absolute()
        self._check()
        if all(same_disk(process, folder.parent) for process in self._processes):
            self._all("restore", folder)
            return
        copies = [self._send(folder, process) for process in self._processes]
        calls = [
            process.call.remote("restore", Path(copy)) for process, copy in zip(self._processes, copies, strict=True)
        ]
        self._results(self._wait_for(calls, "restore"))
        for process, copy in zip(self._processes, copies, strict=True):
            ray.get(process.remove.remote(copy))

    def process_ids(self) -> list[int]:
        """Return the process ids on their machines, in the order of ranks."""
        return ray.get([process.process_id.remote() for process in self._processes])

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            ray.kill(process)
        self._processes = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._broken = self._broken or "this learner is closed"
        self._cluster.leave()

    def _write(self, method: str, folder: Path) -> tuple[Any, Path]:
        """Let the first process write ``folder``; return the method's result and the path that the process wrote to."""
        self._check()
        first = self._processes[0]
        if same_disk(first, folder.parent):
            return self._all(method, folder)[0], folder
        remote_folder = Path(ray.get(first.free_path.remote(folder.name)))
        result = self._all(method, remote_folder)[0]
        received = folder.with_name(f".{folder.name}.arriving")
        if received.exists():  # this machine's process was killed while the files arrived
            shutil.rmtree(received)
        for name, start in blocks(ray.get(first.files.remote(str(remote_folder)))):
            write_block(received, name, ray.get(first.read.remote(str(remote_folder), name, start)))
        replace_folder(folder, received)
        ray.get(first.remove.remote(str(remote_folder)))
        return result, remote_folder

    def _send(self, folder: Path, process: Any) -> str:
        """Copy ``folder`` to the process's machine; return the copy's path there."""
        copy = ray.get(process.free_path.remote(folder.name))
        for name, start in blocks(listed(folder)):
            ray.get(process.write.remote(copy, name, read_block(folder, name, start)))
        return copy

    def _all(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method on all processes at the same time; return their results."""
        self._check()
        calls = [process.call.remote(method, *arguments, **keywords) for process in self._processes]
        return self._results(self._wait_for(calls, method))

    def _results(self, results_and_versions: list[tuple[Any, int]]) -> list[Any]:
        results, versions = zip(*results_and_versions, strict=True)
        if len(set(versions)) > 1:
            self._break(f"its processes are at different versions {sorted(set(versions))}")
        self.version = versions[0]
        return list(results)

    def _wait_for(self, calls: list[ray.ObjectRef], what: str) -> list[Any]:
        """Return the calls' results. If all fail with the same error, raise it; if only some fail, end all processes."""
        waiting, errors, timeout = list(calls), {}, None
        while waiting:
            done, waiting = ray.wait(waiting, timeout=timeout)
            if not done:
                break
            for call in done:
                try:
                    ray.get(call)
                except RayError as error:
                    errors[call], timeout = error, GRACE
        if not errors:
            return ray.get(calls)
        error = errors[min(errors, key=calls.index)]
        alike = len(errors) == len(calls) and all(isinstance(each, RayTaskError) for each in errors.values())
        if alike and self.version == self._version_of_all():
            raise error.cause if isinstance(error.cause, Exception) else error
        # A dead process is the cause, even if errors of the others, such as a lost connection to it, arrive first.
        cause = min(errors, key=lambda call: isinstance(errors[call], RayTaskError))
        self._break(f"process {calls.index(cause)} of {len(calls)} failed ({what})", errors[cause])

    def _version_of_all(self) -> int:
        """Return the version of all processes; ``GONE`` if they differ or a process is gone."""
        try:
            versions = set(ray.get([process.version.remote() for process in self._processes]))
        except RayError:
            return GONE if self.version else 0  # they failed during creation
        return versions.pop() if len(versions) == 1 else GONE

    def _break(self, reason: str, error: RayError | None = None) -> None:
        details = "" if error is None else f": {_first_line(error)}"
        self._broken = f"the learner on Ray is gone: {reason}{details}"
        self.version = GONE
        for process in self._processes:
            ray.kill(process)
        self._check(error)

    def _check(self, cause: BaseException | None = None) -> None:
        if self._broken:
            raise ArtError(
                f"{self._broken}. Steps since the last checkpoint are lost: train again with the same run_dir to resume from "
                "that checkpoint"
            ) from cause


def same_disk(process: Any, folder: Path) -> bool:
    """Whether the process sees this machine's ``folder``."""
    with marker(folder) as mark:
        return ray.get(process.sees.remote(str(mark)))


def _first_line(error: RayError) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    return " ".join(str(error).split())[:500]
