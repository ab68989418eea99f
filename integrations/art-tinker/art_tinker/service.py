"""The server that speaks Tinker's API: where it is, whether it lives, and what its errors mean."""

from __future__ import annotations

import os
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import tinker

from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner.checkpoint import read_state

T = TypeVar("T")

ADDRESS = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOOK_EVERY = 15.0
"""Seconds after which the server's health is checked while an answer is awaited."""
GIVE_UP_AFTER = 300.0
"""Seconds without a sign of life after which the server counts as lost. The SDK itself would wait forever."""
SAMPLER, STATE = "tinker_sampler", "tinker_state"
"""Names in a checkpoint's manifest: the server's paths of the weights to sample with, and of weights and optimizer."""


class ServerLost(ArtError):
    """The server no longer answers. Start again with the same run folder to resume."""


class Awaited(Protocol[T]):
    """A future of the SDK."""

    def result(self, timeout: float | None = None) -> T: ...


def address() -> str:
    """Return the server's address."""
    return os.environ.get("TINKER_BASE_URL") or ADDRESS


def check() -> None:
    """Raise ConfigError if no key is set, or the server doesn't answer."""
    if not os.environ.get("TINKER_API_KEY"):
        raise ConfigError(
            "Tinker needs a key: set TINKER_API_KEY (for a server of your own, any text that begins with tml-, and "
            "TINKER_BASE_URL to its address)"
        )
    if not is_alive():
        raise ConfigError(f"no Tinker server answers at {address()}; start it, or set TINKER_BASE_URL to its address")


def is_alive() -> bool:
    """Whether the server answers at all."""
    try:
        return httpx.get(f"{address()}/api/v1/healthz", timeout=10.0).status_code < 500
    except httpx.HTTPError:
        return False


def wait(awaited: Awaited[T], what: str) -> T:
    """Return a result of the server, however long it takes while the server lives.

    Raises ServerLost if it is gone, ConfigError if it refuses the request.
    """
    last_sign = time.monotonic()
    while True:
        try:
            return awaited.result(timeout=LOOK_EVERY)
        except TimeoutError:
            if is_alive():
                last_sign = time.monotonic()
            elif time.monotonic() - last_sign > GIVE_UP_AFTER:
                raise ServerLost(
                    f"{address()} has not answered for {GIVE_UP_AFTER:g} s ({what}); start it, then repeat the command with the "
                    "same run folder to resume"
                ) from None
        except tinker.TinkerError as error:
            raise ConfigError(f"{address()} refused to {what}: {message_of(error)}") from error


def message_of(error: Exception) -> str:
    """Return what the server says of an error."""
    body: Any = getattr(error, "body", None)
    detail = body.get("detail") or body.get("error") if isinstance(body, dict) else None
    return str(detail or error)


def sampler_path(folder: Path) -> str:
    """Return the server's path of the weights that a learner published in ``folder``. Raises ConfigError, DamagedCheckpoint."""
    state = read_state(folder)
    if SAMPLER not in state:
        raise ConfigError(f"{folder} has no weights on a Tinker server; engine='tinker' needs learner='tinker'")
    return str(state[SAMPLER])


def download(service: tinker.ServiceClient, path: str, folder: Path) -> None:
    """Unpack the adapter that the server keeps as ``path`` into ``folder``, in PEFT's format. Raises StoreError."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    url = wait(service.create_rest_client().get_checkpoint_archive_url(run, name), f"send {path}").url
    try:
        with tempfile.TemporaryFile() as file:
            with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as answer:
                answer.raise_for_status()
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:*") as archive:
                archive.extractall(folder, filter="data")
    except (OSError, httpx.HTTPError, tarfile.TarError) as error:
        raise StoreError(f"{path} couldn't be downloaded from {address()} to {folder}: {error}") from error
