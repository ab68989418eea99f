"""``learner="ray"``: a learner on several processes or GPUs of a Ray cluster. Knows nothing about rewards or rollouts.

Actors in a placement group, set up as Ray Train sets up its workers (a process for each GPU, torch.distributed between them,
NCCL or gloo), and not Ray Train itself: a run asks for a step, then a swap, then a checkpoint, and must know of each whether
it was done. ``TorchTrainer.fit`` runs a whole loop and starts it anew by itself when a worker dies, from a checkpoint of its
own. Here a death ends the step with an error that says so, and the run goes on from the run folder's checkpoint, whose version
the store and the engine know. What is computed, how gradients are summed and what FSDP2 shards is the core's
(sharding.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art_core.config import TrainConfig
from art_core.errors import ArtError, ConfigError
from art_core.types import LearnerBase, Loss, TokenTree, Weights
from art_ray.cluster import Cluster
from art_ray.files import blocks, listed, marker, put_in_place, read_block, write_block
from art_ray.learner_process import LearnerProcess
from art_ray.options import LearnerOptions, parsed

logger = logging.getLogger("art_ray")

GRACE = 10.0
"""Seconds for the other processes to fail by the same error, once one has: then the learner is as it was."""
GONE = -1
"""The version of a learner whose processes are gone: that of no weights."""


class RayLearner(LearnerBase):
    """Calls every method on all its processes. ``publish`` and ``save`` write to this machine's disk, wherever they run."""

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
        places = [PlacementGroupSchedulingStrategy(self._group, rank) for rank in range(size)]
        self._processes = [kind.options(scheduling_strategy=place, **common).remote() for place in places]
        first = ray.get(self._processes[0].address.remote())
        given = ray.put((folder, self.config, self.loss))
        joining = [
            process.join.remote(first, rank, size, self.options.sharding, given)
            for rank, process in enumerate(self._processes)
        ]
        self._finished(joining, "starting")
        device = "GPU" if gpus else "CPU"
        self.choice = f"learner='ray': {size} {device} process{'es' * (size > 1)} ({self.options.sharding})"

    def _place(self, size: int, bundle: dict[str, float]) -> None:
        self._group = placement_group([bundle] * size, strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=self.options.start_seconds)
        if not ready:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            there = ", ".join(f"{self._cluster.total(name)} {name}" for name in bundle)
            raise ConfigError(
                f"Ray has not placed {size} learner processes of {wanted} each within {self.options.start_seconds:g} seconds; "
                f"the cluster has {there}, which others may hold ('ray status' says who). Give fewer in "
                "learner_args={'processes': N, 'cpus': N}, or fewer executor_args={'workers': N}"
            )

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step on all ``trees``; metrics are of the whole step. See ``TorchLearner.step``.

        Raises ArtError where a process died or failed alone: ``version`` is then that of no weights, and nothing more can be
        learnt by this object. Where all fail alike, the weights are those of before.
        """
        sent = ray.put(list(trees))
        return self._all("step", sent, **({} if loss is None else {"loss": loss}))[0]

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Return the seconds that the slowest process takes for its part of a step; no weight changes."""
        return max(self._all("measure", ray.put(list(trees))))

    def weights(self) -> Weights:
        """Return the version alone: engines share no memory with these processes, so weights reach them by ``publish``."""
        self._check()
        return Weights(self.version, path=None, live=None)

    def publish(self, folder: Path) -> Weights:
        """Write ``folder``, a model folder, or with LoRA an adapter in it."""
        folder = Path(folder).absolute()
        found, written = self._write("publish", folder)
        return Weights(self.version, folder / Path(found.path).relative_to(written))

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob of every token but the first."""
        return self._all("score", list(ids))[0]

    def save(self, folder: Path) -> None:
        """Write a checkpoint, the same whatever the number of processes and their sharding."""
        self._write("save", Path(folder).absolute())

    def restore(self, folder: Path) -> None:
        """Continue where a checkpoint was written, by however many processes."""
        folder = Path(folder).absolute()
        self._check()
        if all(same_disk(process, folder.parent) for process in self._processes):
            self._all("restore", folder)
            return
        places = [self._send(folder, process) for process in self._processes]
        calls = [
            process.call.remote("restore", Path(place)) for process, place in zip(self._processes, places, strict=True)
        ]
        self._results(self._finished(calls, "restore"))
        for process, place in zip(self._processes, places, strict=True):
            ray.get(process.forget.remote(place))

    def process_ids(self) -> list[int]:
        """Return the processes' ids on their machines, the first's first."""
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
        """Let the first process write ``folder``; return what it returned, and where that is to it."""
        self._check()
        first = self._processes[0]
        if same_disk(first, folder.parent):
            return self._all(method, folder)[0], folder
        there = Path(ray.get(first.room.remote(folder.name)))
        result = self._all(method, there)[0]
        arrived = folder.with_name(f".{folder.name}.arriving")
        for name, start in blocks(ray.get(first.files.remote(str(there)))):
            write_block(arrived, name, ray.get(first.read.remote(str(there), name, start)))
        put_in_place(arrived, folder)
        ray.get(first.forget.remote(str(there)))
        return result, there

    def _send(self, folder: Path, process: Any) -> str:
        """Copy ``folder`` to the process's machine; return where it is there."""
        place = ray.get(process.room.remote(folder.name))
        for name, start in blocks(listed(folder)):
            ray.get(process.write.remote(place, name, read_block(folder, name, start)))
        return place

    def _all(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method on all processes at the same time; return what each returned."""
        self._check()
        calls = [process.call.remote(method, *arguments, **keywords) for process in self._processes]
        return self._results(self._finished(calls, method))

    def _results(self, found: list[tuple[Any, int]]) -> list[Any]:
        results, versions = zip(*found, strict=True)
        if len(set(versions)) > 1:
            self._break(f"its processes are at different versions {sorted(set(versions))}")
        self.version = versions[0]
        return list(results)

    def _finished(self, calls: list[ray.ObjectRef], what: str) -> list[Any]:
        """Return what the calls return; where all fail alike, raise that, and where one is left behind, end them all."""
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
        alike = len(errors) == len(calls) and all(isinstance(it, RayTaskError) for it in errors.values())
        if alike and self.version == self._version_of_all():
            raise error.cause if isinstance(error.cause, Exception) else error
        # A process that died is the cause; what the others raise, such as a lost connection to it, may arrive first.
        cause = min(errors, key=lambda call: isinstance(errors[call], RayTaskError))
        self._break(f"process {calls.index(cause)} of {len(calls)} failed ({what})", errors[cause])

    def _version_of_all(self) -> int:
        """Return the version that all processes have; ``GONE`` where they differ, or never had one."""
        try:
            versions = set(ray.get([process.version.remote() for process in self._processes]))
        except RayError:
            return GONE if self.version else 0  # they failed when they were made
        return versions.pop() if len(versions) == 1 else GONE

    def _break(self, what: str, error: RayError | None = None) -> None:
        said = "" if error is None else f": {_first_line(error)}"
        self._broken = f"the learner on Ray is gone: {what}{said}"
        self.version = GONE
        for process in self._processes:
            ray.kill(process)
        self._check(error)

    def _check(self, cause: BaseException | None = None) -> None:
        if self._broken:
            raise ArtError(
                f"{self._broken}. What was learnt since the last checkpoint is lost with it: train again with the same run_dir, "
                "and the run goes on from there"
            ) from cause


def same_disk(process: Any, folder: Path) -> bool:
    """Whether the process has this machine's ``folder``."""
    with marker(folder) as mark:
        return ray.get(process.sees.remote(str(mark)))


def _first_line(error: RayError) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    return " ".join(str(error).split())[:500]
