"""This process's connection to Ray: to a running cluster, or to a new local Ray that other machines can't reach.

A Ray that the user's code has initialised is used and never shut down.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from art_core.errors import ConfigError

logger = logging.getLogger("art_ray")


class Cluster:
    """A reference to the connection, which ends with its last reference."""

    def __init__(self) -> None:
        _connection.acquire()
        self._open = True

    def leave(self) -> None:
        """Drop the reference; further calls do nothing."""
        if self._open:
            self._open = False
            _connection.release()

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The live nodes, as Ray describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def total(self, resource: str) -> int:
        """Return the number of ``"CPU"`` or ``"GPU"`` of all nodes together."""
        return int(sum(node["Resources"].get(resource, 0) for node in self.nodes))

    @property
    def here(self) -> str:
        """The address of this machine's node."""
        import ray

        return ray.util.get_node_ip_address()


class _Connection:
    """Counts its references, because executor and learner can be used separately or together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._references = 0
        self._thread: _RayThread | None = None
        """None if the user's own code initialised Ray."""

    def acquire(self) -> None:
        import ray

        with self._lock:
            if not self._references and not ray.is_initialized():
                self._thread = _RayThread()
                self._thread.connect()
            self._references += 1

    def release(self) -> None:
        with self._lock:
            self._references -= 1
            if not self._references and self._thread is not None:
                self._thread.shut_down()
                self._thread = None


class _RayThread(threading.Thread):
    """Initialises Ray and lives until it is shut down, because a local Ray's processes end with the thread that started them."""

    def __init__(self) -> None:
        super().__init__(name="art-ray", daemon=True)
        self._ready, self._stop_requested = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def connect(self) -> None:
        self.start()
        self._ready.wait()
        if self._error is not None:
            raise ConfigError(
                f"can't reach or start Ray: {type(self._error).__name__}: {self._error}; check RAY_ADDRESS (unset: a cluster on "
                "this machine, else a local Ray) and, if the cluster has token authentication, RAY_AUTH_TOKEN"
            ) from self._error

    def shut_down(self) -> None:
        self._stop_requested.set()
        self.join()

    def run(self) -> None:
        import ray

        try:
            _initialise()
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self._error = error
            return
        finally:
            self._ready.set()
        self._stop_requested.wait()
        ray.shutdown()


def _initialise() -> None:
    """Connect to ``RAY_ADDRESS``, else to a cluster that runs on this machine, else start a local Ray."""
    import ray

    quiet = {
        "logging_level": logging.ERROR
    }  # Ray would warn that it can't set a signal handler outside the main thread
    address = os.environ.get("RAY_ADDRESS") or _local_cluster()
    if address not in (None, "local"):
        ray.init(address=address, **quiet)
        logger.info("connected to Ray at %s", ray.get_runtime_context().gcs_address)
        return
    # ray.init enables token authentication by itself, unless RAY_AUTH_MODE says otherwise.
    with on_loopback():
        ray.init(address="local", include_dashboard=False, **quiet)
    logger.info("started a local Ray at %s", ray.get_runtime_context().gcs_address)


def _local_cluster() -> str | None:
    """Return the address of a cluster that ``ray start`` started on this machine, if it is still running.

    address="auto" isn't used, because it also connects to the local Ray of another script. Ray's record of the address
    outlives the cluster, so a connection is tried.
    """
    from ray._private.utils import read_ray_address

    address = read_ray_address(None)
    host, _, port = (address or "").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return address
    except (OSError, ValueError):
        return None


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make a Ray that is started in this block listen on 127.0.0.1 only.

    Otherwise even a local Ray listens on every address of the machine. Ray binds to loopback by itself on macOS, and on Linux if
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0 when ray is imported; here it has already been imported.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


_connection = _Connection()
