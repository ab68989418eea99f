"""Reads ``.env``, and describes the environment variables that users set. Never shows their values."""

from __future__ import annotations

import functools
import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import ConfigError

NO_OPENPIPE = (
    "OpenPipe's hosted logging is not supported, because it cannot be tested here; use trackers=['langfuse'] or ['wandb'], or "
    "'art view RUN', which needs no account"
)
"""Why ``OPENPIPE_API_KEY`` and the tracker ``openpipe`` are refused."""
SET, NOT_SET = "set", "not set"
"""States of a variable with which nothing is wrong."""


@dataclass(frozen=True)
class Variable:
    name: str
    does: str
    """What it is for, or why it is ignored."""
    needs: str = ""
    """The distribution that reads it; empty for the core, or if nothing reads it."""
    refused: bool = False
    least: int | None = None
    """Set if the value must be an integer."""
    most: int | None = None

    def state(self) -> str:
        """Return whether the variable is set and valid; never its value."""
        value = os.environ.get(self.name, "").strip()
        if not value:
            return NOT_SET
        if self.refused:
            return "refused"
        if self.least is None or self._fits(value):
            return SET
        wanted = f">= {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"not an integer {wanted}; the command will refuse it"

    def _fits(self, value: str) -> bool:
        try:
            number = float(value)
        except ValueError:
            return False
        return number.is_integer() and (self.least or 0) <= number <= (number if self.most is None else self.most)


CHECKED = (
    Variable("OPENAI_API_KEY", "key for a judge such as ART_JUDGE=openai/gpt-6-luna, and for agents outside of runs"),
    Variable("OPENPIPE_API_KEY", NO_OPENPIPE, refused=True),
    Variable("WANDB_API_KEY", "key for trackers=['wandb']; without it runs are recorded offline", "art-wandb"),
    Variable("LANGFUSE_SECRET_KEY", "key for trackers=['langfuse'] and art import langfuse", "art-langfuse"),
    Variable("LANGFUSE_PUBLIC_KEY", "the other half of that key", "art-langfuse"),
    Variable("LANGFUSE_HOST", "address of the Langfuse server", "art-langfuse"),
    Variable("TINKER_API_KEY", "key of the server of engine='tinker' and learner='tinker'", "art-tinker"),
    Variable("ART_SERVER_PORT", "port of art serve without --port", "art-server", least=0, most=65535),
    Variable("ART_CLIENT_WORKERS", "concurrent rollouts of art worker without --workers", "art-server", least=1),
    Variable("ART_JUDGE", "judge of reward='ruler' and art judge, as a LiteLLM model string", "art-ruler"),
)


@functools.cache
def warn_refused() -> None:
    """Log, once per process, which variables are set but ignored."""
    for variable in CHECKED:
        if variable.state() == "refused":
            logging.getLogger(__name__).warning("%s is set but ignored: %s", variable.name, variable.does)


_from_file: set[str] = set()
"""Names that ``load_env_file`` has added to the environment."""


def load_env_file(path: Path = Path(".env")) -> None:
    """Add the variables of the working folder's ``.env`` to the environment; variables that are already set win.

    Variables from an earlier folder's ``.env`` are removed first. Raises ConfigError, without showing any value, if the file
    cannot be read or a line is not NAME=VALUE.
    """
    from dotenv import load_dotenv
    from dotenv.parser import parse_stream

    for name in _from_file:
        os.environ.pop(name, None)
    _from_file.clear()
    if not path.exists() or path.is_dir():  # some virtual environments are folders named .env
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(
            f"{path.absolute()} cannot be read: {reason}; every art command reads .env in its working folder: fix the file, or "
            "run the command in another folder"
        ) from None
    bindings = parse_stream(io.StringIO(text))
    # A bare name ("export NAME") is refused too: a key that was pasted without its name looks just like it.
    invalid = [binding.original for binding in bindings if binding.error or (binding.key and binding.value is None)]
    # A binding's text includes the blank lines before it.
    lines = [entry.line + entry.string[: -len(entry.string.lstrip()) or None].count("\n") for entry in invalid]
    if lines or "\0" in text:
        where = f", line {lines[0]}" if lines else ""
        raise ConfigError(
            f"{path.absolute()}{where}: not a NAME=VALUE line; write NAME=VALUE, close its quotes, or put # before it (the text "
            "is not shown, because it may be a secret)"
        )
    before = set(os.environ)
    load_dotenv(stream=io.StringIO(text), interpolate=False)  # a secret may contain a literal ${...}
    _from_file.update(set(os.environ) - before)
