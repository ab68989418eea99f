"""One process of a learner on Ray: an actor that holds a TorchLearner. Knows nothing about the run, its store or its engine."""

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

from art_core.capture import is_loopback
from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError
from art_core.types import Loss, TokenTree
from art_ray.files import listed, read_block, write_block

WAIT = timedelta(hours=2)
"""Of the others for one, at most: the first look at a model may take long. A process that dies is noticed by who started it."""


class LearnerProcess:
    """Every method of the learner is called on all processes with the same arguments."""

    def address(self) -> tuple[str, int]:
        """Return where the others find this process, the first: the node's address and a port that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def join(
        self, first: tuple[str, int], rank: int, size: int, sharding: str, given: tuple[str, TrainConfig, Loss]
    ) -> int:
        """Meet the others and load the learner; return its version."""
        import torch
        import torch.distributed as dist

        from art_core.learner import TorchLearner
        from art_core.learner.alone import Alone
        from art_ray.sharding import processes

        host, port = first
        if is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # the only one that Ray lets this process see
        if size > 1 or sharding == "fsdp":
            meeting = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=WAIT)
            group = processes(sharding)
        else:
            group = Alone()
        folder, config, loss = given
        self._received = Path(tempfile.mkdtemp(prefix="art-ray-"))
        self._learner = TorchLearner(_here(folder, config), config, loss, group)
        return self._learner.version

    def call(self, method: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """Return what a method of the learner returns, and its version."""
        if arguments and method in ("step", "measure"):
            arguments = ([_own(tree) for tree in arguments[0]], *arguments[1:])
        result = getattr(self._learner, method)(*arguments, **keywords)
        return result, self._learner.version

    def version(self) -> int:
        return self._learner.version

    def process_id(self) -> int:
        return os.getpid()

    def sees(self, path: str) -> bool:
        """Whether a file of whoever asks is on this machine too."""
        return Path(path).exists()

    def room(self, name: str) -> str:
        """Return the path of an empty place for a folder on this machine."""
        place = self._received / name
        shutil.rmtree(place, ignore_errors=True)
        return str(place)

    def files(self, folder: str) -> list[tuple[str, int]]:
        return listed(Path(folder))

    def read(self, folder: str, name: str, start: int) -> bytes:
        return read_block(Path(folder), name, start)

    def write(self, folder: str, name: str, block: bytes) -> None:
        write_block(Path(folder), name, block)

    def forget(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)


def _own(tree: TokenTree) -> TokenTree:
    """Return the tree in this process's own memory: what Ray shares cannot be written to, of which torch warns."""
    return TokenTree(**{name: array.copy() for name, array in vars(tree).items()})


def _here(folder: str, config: TrainConfig) -> str:
    """Return where the start weights are on this machine: the same folder or hub name, and the model that ships with art."""
    if config.model == "tiny":
        return model_folder("tiny")
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ConfigError(
            f"the node {ray.util.get_node_ip_address()} has no folder {folder}: put the model there, on a disk that all nodes "
            "share, or give its hub name"
        )
    return folder
