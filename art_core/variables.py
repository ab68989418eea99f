"""The environment variables that people set: where ``.env`` is read, and what is done with each classic one. Shows no values."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import ConfigError

NO_OPENPIPE = (
    "OpenPipe's hosted logging is not supported, because nothing here can be tested against it; take trackers=['langfuse'] or "
    "['wandb'], or 'art view RUN', which needs no account"
)
"""The reason why ``OPENPIPE_API_KEY`` and the tracker ``openpipe`` are refused."""


@dataclass(frozen=True)
class Variable:
    """One that the classic programs set."""

    name: str
    does: str
    """What is done with it, or why nothing is."""
    needs: str = ""
    """The distribution that reads it; empty for the core, or for nobody."""
    refused: bool = False

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))


CLASSIC = (
    Variable("OPENAI_API_KEY", "key of a judge such as ART_JUDGE=openai/gpt-4.1-mini, and of agents outside of runs"),
    Variable("OPENPIPE_API_KEY", NO_OPENPIPE, refused=True),
    Variable("WANDB_API_KEY", "key of trackers=['wandb']; without it runs are kept offline", "art-wandb"),
    Variable("LANGFUSE_SECRET_KEY", "key of trackers=['langfuse'] and art import langfuse", "art-langfuse"),
    Variable("LANGFUSE_PUBLIC_KEY", "the other half of that key", "art-langfuse"),
    Variable("LANGFUSE_HOST", "address of the Langfuse server", "art-langfuse"),
    Variable("ART_SERVER_PORT", "port of art serve, where --port is not given", "art-server"),
    Variable("ART_CLIENT_WORKERS", "episodes at a time of art worker, where --workers is not given", "art-server"),
)


def load_env_file(path: Path = Path(".env")) -> None:
    """Put what ``.env`` of the working folder says into the environment, where that does not say it already.

    Raises ConfigError, without a value in it, for a file that cannot be read and for a line that is no NAME=VALUE.
    """
    from dotenv import load_dotenv
    from dotenv.parser import parse_stream

    if not path.exists() or path.is_dir():  # virtual environments are called .env too
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(
            f"{path.absolute()} cannot be read: {reason}; every art command reads .env in its working folder: mend the file, or "
            "start elsewhere"
        ) from None
    wrong = [it.original.line for it in parse_stream(io.StringIO(text)) if it.error]
    if wrong or "\0" in text:
        where = f", line {wrong[0]}" if wrong else ""
        raise ConfigError(
            f"{path.absolute()}{where}: this is no NAME=VALUE; close its quotes, or put # before it (its text is not shown, "
            "because it may be a secret)"
        )
    load_dotenv(stream=io.StringIO(text), interpolate=False)  # a secret may hold a ${...}, and is what stands there
