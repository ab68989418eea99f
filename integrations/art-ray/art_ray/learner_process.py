"""One process of a learner on Ray: an actor that holds a TorchLearner."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from art_core import TrainConfig
from art_core.capture import is_loopback
from art_core.errors import ConfigError
from art_core.plugin_api import model_folder
from art_core.types import Loss, TokenTree
from art_ray.files import listed, read_block, write_block

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Time that processes wait for one of them: the first pass of a model may take long. ``RayLearner`` notices a dead process."""


class LearnerProcess:
    """Holds one process's learner; every method of the learner is called on all processes with the same arguments."""

    def address(self) -> tuple[str, int]:
        """Return where the other processes meet the first one: its node's address and a free port."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def join(
        self, first: tuple[str, int], rank: int, size: int, sharding: str, job: tuple[str, TrainConfig, Loss]
    ) -> int:
        """Connect to the other processes and load the learner; return its version."""
        import torch
        import torch.distributed as dist

        from art_core.learner import TorchLearner
        from art_core.learner.alone import Alone
        from art_ray.sharding import processes

        host, port = first
        if is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray makes only one visible to this process
        if size > 1 or sharding == "fsdp":
            rendezvous = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, init_method=rendezvous, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
            group = processes(sharding)
        else:
            group = Alone()
        folder, config, loss = job
        if config.teacher:
            _check_here(config.teacher, "teacher")
        self._received = Path(tempfile.mkdtemp(prefix="art-ray-"))
        self._learner = TorchLearner(_weights_here(folder, config), config, loss, group)
        return self._learner.version

    def call(self, method: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """Call a method of the learner; return its result and the learner's version."""
        if arguments and method in ("step", "measure"):
            arguments = ([_copied(tree) for tree in arguments[0]], *arguments[1:])
        result = getattr(self._learner, method)(*arguments, **keywords)
        return result, self._learner.version

    def version(self) -> int:
        return self._learner.version

    def process_id(self) -> int:
        return os.getpid()

    def sees(self, path: str) -> bool:
        """Whether the caller's file exists on this machine too."""
        return Path(path).exists()

    def free_path(self, name: str) -> str:
        """Return a free path on this machine for a folder called ``name``."""
        path = self._received / name
        shutil.rmtree(path, ignore_errors=True)
        return str(path)

    def files(self, folder: str) -> list[tuple[str, int]]:
        return listed(Path(folder))

    def read(self, folder: str, name: str, start: int) -> bytes:
        return read_block(Path(folder), name, start)

    def write(self, folder: str, name: str, block: bytes) -> None:
        write_block(Path(folder), name, block)

    def remove(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)


def _copied(tree: TokenTree) -> TokenTree:
    """Return a writable copy of the tree: arrays in Ray's shared memory are read-only, and torch warns about them."""
    return TokenTree(**{name: array.copy() for name, array in vars(tree).items()})


def _weights_here(folder: str, config: TrainConfig) -> str:
    """Return the start weights' folder or hub name on this machine. Raises ConfigError if the folder is missing here."""
    if config.model == "tiny":
        return model_folder("tiny")
    _check_here(folder, "model")
    return folder


def _check_here(folder: str, what: str) -> None:
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ConfigError(
            f"node {ray.util.get_node_ip_address()} has no folder {folder}: put the {what} there, on a disk that all nodes "
            "share, or pass its hub name"
        )
