"""The server that speaks Tinker's API: where it is, whether it is alive, and what its errors mean."""

from __future__ import annotations

import json
import logging
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
import tinker
from safetensors import safe_open

from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner.checkpoint import MANIFEST, read_state
from art_core.plugin_api import describe_error, without_keys

T = TypeVar("T", covariant=True)

ADDRESS = "https://tinker.thinkingmachines.dev/services/tinker-prod"
POLL_SECONDS = 15.0
"""How often the server's health is checked while a result is awaited."""
GIVE_UP_AFTER = 300.0
"""Seconds without a sign of life after which the server counts as lost. The SDK itself would wait forever."""
SAMPLER, STATE = "tinker_sampler", "tinker_state"
"""Names in a checkpoint's manifest: the server's paths of the weights to sample with, and of weights and optimizer."""


# At each download it warns that this may take a while.
logging.getLogger("tinker.lib.public_interfaces.rest_client").setLevel(logging.ERROR)


class ServerLost(ArtError):
    """The server no longer answers. Start again with the same run folder to resume."""


class Awaited(Protocol[T]):
    """A future of the SDK."""

    def result(self, timeout: float | None = None) -> T: ...


def address() -> str:
    """Return the server's address, for requests and messages: without user and password."""
    return without_keys(os.environ.get("TINKER_BASE_URL") or ADDRESS)


def check() -> None:
    """Raise ConfigError if no key is set, or the server isn't alive."""
    if not (os.environ.get("TINKER_API_KEY") or "").startswith(("tml-", "eyJ")):
        raise ConfigError(
            "Tinker needs a key that begins with tml-: set TINKER_API_KEY (any such text for a server of your own, and "
            "TINKER_BASE_URL to its address)"
        )
    if not is_alive():
        raise ConfigError(f"no Tinker server answers at {address()}; start it, or set TINKER_BASE_URL to its address")


def is_alive() -> bool:
    """Whether the server says that it is healthy."""
    try:
        return httpx.get(f"{address()}/api/v1/healthz", timeout=10.0).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def begin(call: Callable[[], T]) -> Future[T]:
    """Call what blocks in a thread that doesn't keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="art-tinker").start()
    return future


def wait(awaited: Awaited[T], what: str) -> T:
    """Return a result of the server, however long it takes while the server is alive.

    Raises ServerLost if the server is gone, ConfigError if it refuses ``what``, such as "compute gradients".
    """
    last_sign = time.monotonic()
    while True:
        asked = time.monotonic()
        try:
            return awaited.result(timeout=POLL_SECONDS)
        except TimeoutError as error:
            if time.monotonic() - asked < POLL_SECONDS / 2:
                raise explained(error, what) from error  # the result itself is an error
            if is_alive():
                last_sign = time.monotonic()
            elif time.monotonic() - last_sign > GIVE_UP_AFTER:
                raise lost(what, f"no answer for {GIVE_UP_AFTER:g} s") from None
        except Exception as error:  # the SDK raises several kinds, ValueError among them
            raise explained(error, what) from error


def explained(error: Exception, what: str) -> ArtError:
    """Return what the SDK's ``error`` means: the server is lost, or it refuses ``what``."""
    down = isinstance(error, tinker.APIConnectionError | TimeoutError) or status_of(error) >= 500
    if down and not is_alive():
        return lost(what, describe_error(error))
    return ConfigError(f"{address()} refused to {what}: {describe_error(error)}")


def lost(what: str, reason: str) -> ServerLost:
    return ServerLost(
        f"{address()} is lost ({what}: {reason}); when it is back, repeat the command with the same run folder to resume"
    )


def status_of(error: Exception) -> int:
    """Return the HTTP status of the SDK's ``error``; 0 if it has none."""
    status = getattr(error, "status_code", 0)
    return status if isinstance(status, int) else 0


def sampler_path(folder: Path) -> str:
    """Return the server's path of the weights that a learner published in ``folder``, or in the folder around an adapter.

    Raises ConfigError if they aren't on a server, DamagedCheckpoint.
    """
    state = read_state(folder if (folder / MANIFEST).is_file() else folder.parent)
    if SAMPLER not in state:
        raise ConfigError(f"{folder} has no weights on a Tinker server; engine='tinker' needs learner='tinker'")
    return str(state[SAMPLER])


def download(service: tinker.ServiceClient, path: str, folder: Path) -> None:
    """Unpack the adapter that the server keeps as ``path`` into ``folder``. Raises StoreError, ServerLost, ConfigError."""
    run, name = _parts(path)
    url = wait(service.create_rest_client().get_checkpoint_archive_url(run, name), f"send {path}").url
    try:
        with tempfile.TemporaryFile() as file:
            with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as answer:
                # Not raise_for_status: its message quotes the signed address, with which anyone can read the weights.
                if not answer.is_success:
                    raise httpx.HTTPError(f"status {answer.status_code}")
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:*") as archive:
                archive.extractall(folder, filter="data")
        _name_modules(folder)
    except Exception as error:  # noqa: BLE001 - no list names all that a damaged archive raises
        reason = str(error) if type(error) is httpx.HTTPError else type(error).__name__
        raise StoreError(f"{path} couldn't be downloaded from {address()}: {reason}") from None


def _name_modules(folder: Path) -> None:
    """Complete an adapter's configuration: SkyRL's names no modules, and PEFT would then load some and skip the others."""
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    if config.get("target_modules") is None:
        with safe_open(folder / "adapter_model.safetensors", framework="numpy") as weights:
            names = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights.keys()}  # noqa: SIM118 - no mapping
        file.write_text(json.dumps(config | {"target_modules": sorted(names)}, indent=2))


def delete(service: tinker.ServiceClient, path: str) -> None:
    """Begin to delete what the server keeps as ``path``."""
    run, name = _parts(path)
    # SkyRL's paths of sampler weights lack their kind.
    service.create_rest_client().delete_checkpoint(run, name if "/" in name else f"sampler_weights/{name}")


def _parts(path: str) -> tuple[str, str]:
    """Return the training run and the name in a server's path, such as ``tinker://RUN/weights/NAME``."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    return run, name
