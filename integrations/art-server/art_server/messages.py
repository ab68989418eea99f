"""The messages between server and workers: JSON texts over one WebSocket, ``/ws/{client_id}``.

Server to worker: ``train_episodes``, ``cancel_episodes``, ``update_model``, ``ack``, ``error``, ``shutdown``. Worker to server:
``status_update``, ``episode_result``. Every message has ``v``, the version of this schema. A message without it comes from a
classic client, which doesn't support leases. Readers ignore unknown fields.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from art_core.errors import ArtError, ConfigError

VERSION = 1
SESSION = "x-art-session"
"""The handshake's header with the session of later status updates. It tells a reconnecting worker from another of its name."""
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Names of workers and pools, which appear in URLs, logs and pages. ".." isn't allowed, because URLs and paths interpret it."""
MAX_RESULTS = 1024
"""Results per message."""
MAX_MESSAGE = 64 * 2**20
"""Bytes per message, in both directions."""


MAX_ERROR_LENGTH = 500
"""Characters about a bad message."""


class BadMessage(ArtError):
    """A message that doesn't match the schema. The error's text is sent back to the sender."""


class Message(BaseModel):
    """Part of a message."""

    model_config = ConfigDict(extra="ignore")


class Episode(Message):
    """One rollout for a worker. Fields of a classic episode (``model_name``, ...) are passed on unchanged."""

    model_config = ConfigDict(extra="allow")

    episode_id: str
    lease: str | None = None
    """Identifies this assignment of the episode; a result is only accepted from the lease's holder."""
    input: Any = None
    rollout: dict[str, Any] | None = None
    """``RolloutAddress`` without its URL: a worker uses the address at which it reached the server."""


class TrainEpisodes(Message):
    """Run these episodes."""

    type: Literal["train_episodes"] = "train_episodes"
    v: int = VERSION
    client_id: str
    episodes: list[Episode]
    lease_seconds: float | None = None
    """A worker that is silent for this long loses them."""


class CancelEpisodes(Message):
    """Stop these episodes; their results are no longer awaited."""

    type: Literal["cancel_episodes"] = "cancel_episodes"
    v: int = VERSION
    leases: list[str]


class ModelState(Message):
    """The weights that are served."""

    version: int
    """The number of optimizer steps that they have had."""
    url: str | None = Field(None, pattern="^/")
    """The server's path with the list of checkpoints; None before the first. The newest may be older than ``version``."""


class UpdateModel(Message):
    """New weights are served. A worker whose model calls go to the server doesn't have to do anything."""

    type: Literal["update_model"] = "update_model"
    v: int = VERSION
    model_state: ModelState


class Ack(Message):
    """These results have arrived; they needn't be sent again."""

    type: Literal["ack"] = "ack"
    v: int = VERSION
    leases: list[str]
    stale: list[str] = []
    """The results among them that weren't awaited, such as those of episodes that another worker has repeated."""


class ErrorMessage(Message):
    """The last message was refused."""

    type: Literal["error"] = "error"
    v: int = VERSION
    code: Literal["bad_message", "refused"]
    message: str


class Shutdown(Message):
    """The worker must stop."""

    type: Literal["shutdown"] = "shutdown"
    v: int = VERSION


class StatusUpdate(Message):
    """A worker's status. The first one registers the worker; later ones are its heartbeat."""

    type: Literal["status_update"] = "status_update"
    v: int | None = None
    client_id: str | None = None
    status: str = Field(max_length=1000)
    """``connected``, ``running``, ``idle``, ``leaving``, or ``left``, which ends all its leases; others are only displayed."""
    session: str | None = Field(None, max_length=64)
    """Identifies the worker's process: a worker that reconnects with the same session has kept its leases."""
    capacity: int = Field(1, ge=0, le=10_000)
    """Episodes that it runs concurrently."""
    pool: str = Field("default", pattern=NAME)
    """The pool whose episodes it runs."""
    running: list[str] = Field([], max_length=10_000)
    """The leases that it holds. This message renews them; a missing lease ends."""


class Result(Message):
    """The result of an episode. Fields of a classic result (``total_reward``, ``steps``, ``data``) are passed on unchanged."""

    model_config = ConfigDict(extra="allow")

    episode_id: str
    lease: str | None = None
    output: Any = None
    error: str | None = None
    """The agent's error, starting with the exception's type."""
    capture_error: bool = False
    """Whether ``error`` means that the agent's calls can't be recorded; then it isn't repeated on another worker."""
    lost: bool = False
    """Whether the error happened while the server was unreachable, so that it isn't the agent's fault."""


class EpisodeResult(Message):
    """Results of finished episodes."""

    type: Literal["episode_result"] = "episode_result"
    v: int | None = None
    client_id: str | None = None
    results: list[Result] = Field(max_length=MAX_RESULTS)


FromServer = TrainEpisodes | CancelEpisodes | UpdateModel | Ack | ErrorMessage | Shutdown
FromWorker = StatusUpdate | EpisodeResult
_READERS = {
    "server": TypeAdapter(Annotated[FromServer, Field(discriminator="type")]),
    "worker": TypeAdapter(Annotated[FromWorker, Field(discriminator="type")]),
}


def read(text: str | bytes, sender: Literal["server", "worker"]) -> Any:
    """Return the message. Raises BadMessage if it is invalid or has another schema version."""
    try:
        fields = json.loads(text)  # not orjson, which rounds large integers and refuses lone surrogates
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    version = fields.get("v") if isinstance(fields, dict) else None
    if version is not None and version != VERSION:
        raise BadMessage(
            f"schema version {version!r:.20} isn't supported, only {VERSION}: install the same art-server on both sides"
        )
    try:
        return _READERS[sender].validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        # Both may contain what was sent, at any length, so they are cut: the text is sent back and logged.
        raise BadMessage(f"{location or 'message':.100}: {first['msg']:.{MAX_ERROR_LENGTH}}") from error


def check_name(what: str, name: str) -> None:
    """Raise ConfigError for an invalid name of a worker or a pool."""
    if not re.fullmatch(NAME.removesuffix("$"), name):  # $ would accept a trailing newline
        raise ConfigError(
            f"{what} must be 1 to 64 letters, digits, dots, hyphens and underscores, not starting with a dot, got {name!r}"
        )


def write(message: BaseModel) -> str:
    """Return the message as text, without optional fields that are None."""
    return json.dumps(message.model_dump(exclude_none=True), separators=(",", ":"), default=repr)
