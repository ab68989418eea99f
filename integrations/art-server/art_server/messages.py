"""What server and workers say to each other: JSON texts over one WebSocket, ``/ws/{client_id}``. Knows nothing about sockets.

Server to worker: ``train_episodes``, ``cancel_episodes``, ``update_model``, ``ack``, ``error``, ``shutdown``. Worker to server:
``status_update``, ``episode_result``. Every message has ``v``, the version of this schema; a message without one is of a
classic client, which knows no leases. Fields that a reader does not know are passed over.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from art_core.errors import ArtError, ConfigError

VERSION = 1
SESSION = "x-art-session"
"""Header of the handshake: the session that a status update will name, so that a worker is not taken for another by its name."""
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Of workers and pools. They stand in URLs, logs and pages; no "..", which URLs and folders give a meaning of its own."""
MOST_RESULTS = 1024
"""In one message."""
MAX_MESSAGE = 64 * 2**20
"""Bytes of one message, in both directions."""


MOST_LETTERS = 500
"""Of what is said about a bad message."""


class BadMessage(ArtError):
    """A message that is not of this schema; its text is sent back as it is."""


class Message(BaseModel):
    """Part of a message."""

    model_config = ConfigDict(extra="ignore")


class Episode(Message):
    """One run of the agent, as a worker is given it. Fields of a classic episode (``model_name``, ...) go along untouched."""

    model_config = ConfigDict(extra="allow")

    episode_id: str
    lease: str | None = None
    """Names this handing over of the episode: a result is taken from whoever holds the lease."""
    input: Any = None
    rollout: dict[str, Any] | None = None
    """``RolloutAddress`` without its address, which a worker knows best itself: the server that it reached."""


class TrainEpisodes(Message):
    """Run these."""

    type: Literal["train_episodes"] = "train_episodes"
    v: int = VERSION
    client_id: str
    episodes: list[Episode]
    lease_seconds: float | None = None
    """A worker that is silent for so long loses them."""


class CancelEpisodes(Message):
    """Give these up: nobody waits for them any more."""

    type: Literal["cancel_episodes"] = "cancel_episodes"
    v: int = VERSION
    leases: list[str]


class ModelState(Message):
    """Which weights are served now."""

    version: int
    """Optimizer steps behind them."""
    url: str | None = Field(None, pattern="^/")
    """Path on the server of the newest checkpoint's list of files; None before the first. It may lag behind ``version``."""


class UpdateModel(Message):
    """Other weights are served now. A worker whose model calls go to the server needs to do nothing."""

    type: Literal["update_model"] = "update_model"
    v: int = VERSION
    model_state: ModelState


class Ack(Message):
    """These results arrived, and need not be sent again."""

    type: Literal["ack"] = "ack"
    v: int = VERSION
    leases: list[str]
    stale: list[str] = []
    """Those of them that nobody waited for: of a run that was given to another worker, say."""


class ErrorMessage(Message):
    """Something was wrong with what was said."""

    type: Literal["error"] = "error"
    v: int = VERSION
    code: Literal["bad_message", "refused"]
    message: str


class Shutdown(Message):
    """End."""

    type: Literal["shutdown"] = "shutdown"
    v: int = VERSION


class StatusUpdate(Message):
    """How a worker is. The first says who it is; later ones are its heartbeat."""

    type: Literal["status_update"] = "status_update"
    v: int | None = None
    client_id: str | None = None
    status: str = Field(max_length=1000)
    """``connected``, ``running``, ``idle``, ``leaving``, and ``left``, with which it gives back all that it holds; others are
    shown as they are."""
    session: str | None = Field(None, max_length=64)
    """Of this process: a worker that comes back with the same one has kept its leases."""
    capacity: int = Field(1, ge=0, le=10_000)
    """Episodes that it runs at a time."""
    pool: str = Field("default", pattern=NAME)
    """Whose episodes it takes."""
    running: list[str] = Field([], max_length=10_000)
    """Leases that it holds: every one is prolonged by this message, and one that is missing is given up."""


class Result(Message):
    """How an episode ended. Fields of a classic result (``total_reward``, ``steps``, ``data``) go along untouched."""

    model_config = ConfigDict(extra="allow")

    episode_id: str
    lease: str | None = None
    output: Any = None
    error: str | None = None
    """Why the agent failed, with the exception's type."""
    capture_error: bool = False
    """Whether ``error`` says that the agent's calls cannot be recorded, which no other worker would mend."""
    lost: bool = False
    """Whether ``error`` is of a time when the server could not be reached: it says nothing about the agent."""


class EpisodeResult(Message):
    """Episodes that ended."""

    type: Literal["episode_result"] = "episode_result"
    v: int | None = None
    client_id: str | None = None
    results: list[Result] = Field(max_length=MOST_RESULTS)


FromServer = TrainEpisodes | CancelEpisodes | UpdateModel | Ack | ErrorMessage | Shutdown
FromWorker = StatusUpdate | EpisodeResult
_READERS = {
    "server": TypeAdapter(Annotated[FromServer, Field(discriminator="type")]),
    "worker": TypeAdapter(Annotated[FromWorker, Field(discriminator="type")]),
}


def read(text: str | bytes, sender: Literal["server", "worker"]) -> Any:
    """Return the message; BadMessage where it is none, or of a version that is not spoken here."""
    try:
        found = json.loads(text)  # which knows numbers of any size, and text that UTF-8 cannot say
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    version = found.get("v") if isinstance(found, dict) else None
    if version is not None and version != VERSION:
        raise BadMessage(
            f"schema version {version!r:.20} is not spoken here, but {VERSION}: install the same art-server"
        )
    try:
        return _READERS[sender].validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        # What was sent may stand in both, at any length: it is told to who sent it, and logged.
        raise BadMessage(f"{where or 'message':.100}: {first['msg']:.{MOST_LETTERS}}") from error


def check_name(what: str, name: str) -> None:
    """Raise ConfigError for what cannot name a worker or a pool."""
    if not re.fullmatch(NAME.removesuffix("$"), name):  # $ would let a line end through
        raise ConfigError(
            f"{what} {name!r}: give 1 to 64 letters, digits, dots, hyphens and underscores; a dot not as the first"
        )


def write(message: BaseModel) -> str:
    """Return the message as text; what was not set in an optional field is left out."""
    return json.dumps(message.model_dump(exclude_none=True), separators=(",", ":"), default=repr)
