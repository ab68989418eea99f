"""The connection of this process to Ray: one that is there, or a local Ray that nobody else can reach.

Knows nothing about what runs there. A Ray that the user has initialised is used and never shut down.
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
    """A holder's place at the connection; the connection ends with its last holder."""

    def __init__(self) -> None:
        _connection.hold()
        self._held = True

    def leave(self) -> None:
        if self._held:
            self._held = False
            _connection.release()

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive, as Ray describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def total(self, resource: str) -> int:
        """Return how many ``"CPU"`` or ``"GPU"`` the nodes have."""
        return int(sum(node["Resources"].get(resource, 0) for node in self.nodes))

    @property
    def here(self) -> str:
        """The address of this machine's node."""
        import ray

        return ray.util.get_node_ip_address()


class _Connection:
    """Counted, because executor and learner may each be there without the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._keeper: _Keeper | None = None
        """None where the user's own code initialised Ray."""

    def hold(self) -> None:
        import ray

        with self._lock:
            if not self._holders and not ray.is_initialized():
                self._keeper = _Keeper()
                self._keeper.begin()
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._keeper is not None:
                self._keeper.end()
                self._keeper = None


class _Keeper(threading.Thread):
    """Initialises Ray and stays until it is shut down: a local Ray's processes end with the thread that started them."""

    def __init__(self) -> None:
        super().__init__(name="art-ray", daemon=True)
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def begin(self) -> None:
        self.start()
        self._begun.wait()
        if self._error is not None:
            raise ConfigError(
                f"Ray could not be reached or started: {type(self._error).__name__}: {self._error}; look at RAY_ADDRESS (unset: "
                "a cluster on this machine, else a local Ray) and, where the cluster has token authentication, RAY_AUTH_TOKEN"
            ) from self._error

    def end(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        import ray

        try:
            _initialise()
        except Exception as error:  # noqa: BLE001 - carried to the thread that waits
            self._error = error
            return
        finally:
            self._begun.set()
        self._ended.wait()
        ray.shutdown()


def _initialise() -> None:
    """Connect to ``RAY_ADDRESS``, else to a Ray that was started on this machine, else start one."""
    import ray

    quiet = {"logging_level": logging.ERROR}  # it would say that it has set no signal handler outside the main thread
    address = os.environ.get("RAY_ADDRESS") or _started_here()
    if address not in (None, "local"):
        ray.init(address=address, **quiet)
        logger.info("connected to the Ray at %s", ray.get_runtime_context().gcs_address)
        return
    # Token authentication is switched on by ray.init itself, for whom RAY_AUTH_MODE does not say otherwise.
    with on_loopback():
        ray.init(address="local", include_dashboard=False, **quiet)
    logger.info("started a local Ray at %s", ray.get_runtime_context().gcs_address)


def _started_here() -> str | None:
    """Return the address of the cluster that ``ray start`` has left running on this machine.

    Not by address="auto", which also takes the local Ray of somebody else's script; and what Ray notes outlives the cluster.
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
    """Let a Ray that is started in this block listen on 127.0.0.1 only.

    Else even a local one listens at every address of the machine. Ray does it by itself on macOS, and on Linux where the variable
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0 when ray is imported, which it is by now.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


_connection = _Connection()
