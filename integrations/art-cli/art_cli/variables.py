"""The environment variables that people set: where ``.env`` is read, and what is done with those that matter at a start, the
classic ones and ``ART_JUDGE``. Shows no values."""

from __future__ import annotations

import functools
import io
import logging
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
    """One that people set before a start."""

    name: str
    does: str
    """What is done with it, or why nothing is."""
    needs: str = ""
    """The distribution that reads it; empty for the core, or for nobody."""
    refused: bool = False
    least: int | None = None
    """Where it must be a whole number."""
    most: int | None = None

    def state(self) -> str:
        """Return whether it is set, and whether it can be used; never its value."""
        value = os.environ.get(self.name, "").strip()
        if not value:
            return "not set"
        if self.refused:
            return "refused"
        if self.least is None or self._fits(value):
            return "set"
        return f"no whole number from {self.least}{'' if self.most is None else f' to {self.most}'}: refused at a start"

    def _fits(self, value: str) -> bool:
        try:
            number = float(value)
        except ValueError:
            return False
        return number.is_integer() and (self.least or 0) <= number <= (number if self.most is None else self.most)


CHECKED = (
    Variable("OPENAI_API_KEY", "key of a judge such as ART_JUDGE=openai/gpt-6-luna, and of agents outside of runs"),
    Variable("OPENPIPE_API_KEY", NO_OPENPIPE, refused=True),
    Variable("WANDB_API_KEY", "key of trackers=['wandb']; without it runs are kept offline", "art-wandb"),
    Variable("LANGFUSE_SECRET_KEY", "key of trackers=['langfuse'] and art import langfuse", "art-langfuse"),
    Variable("LANGFUSE_PUBLIC_KEY", "the other half of that key", "art-langfuse"),
    Variable("LANGFUSE_HOST", "address of the Langfuse server", "art-langfuse"),
    Variable("ART_SERVER_PORT", "port of art serve, where --port is not given", "art-server", least=0, most=65535),
    Variable(
        "ART_CLIENT_WORKERS", "episodes at a time of art worker, where --workers is not given", "art-server", least=1
    ),
    Variable("ART_JUDGE", "LiteLLM's name of the judge of reward='ruler' and art judge", "art-ruler"),
)


@functools.cache
def say_refused() -> None:
    """Log, once in a process, which variables are set of which nothing is done."""
    for it in CHECKED:
        if it.state() == "refused":
            logging.getLogger(__name__).warning("%s is set, and nothing is done with it: %s", it.name, it.does)


_from_file: set[str] = set()
"""What ``load_env_file`` has put into the environment."""


def load_env_file(path: Path = Path(".env")) -> None:
    """Put what ``.env`` of the working folder says into the environment, where that does not say it already; what another
    folder's said before is taken back.

    Raises ConfigError, without a value in it, for a file that cannot be read and for a line that is no NAME=VALUE.
    """
    from dotenv import load_dotenv
    from dotenv.parser import parse_stream

    for name in _from_file:
        os.environ.pop(name, None)
    _from_file.clear()
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
    # A name alone, as in "export NAME", says nothing to us, and a key that was pasted without its name looks like one.
    unusable = [it.original for it in parse_stream(io.StringIO(text)) if it.error or (it.key and it.value is None)]
    # Where it begins, blank lines before it left out.
    wrong = [it.line + it.string[: -len(it.string.lstrip()) or None].count("\n") for it in unusable]
    if wrong or "\0" in text:
        where = f", line {wrong[0]}" if wrong else ""
        raise ConfigError(
            f"{path.absolute()}{where}: this is no NAME=VALUE; write one, close its quotes, or put # before it (its text is not "
            "shown, because it may be a secret)"
        )
    before = set(os.environ)
    load_dotenv(stream=io.StringIO(text), interpolate=False)  # a secret may hold a ${...}, and is what stands there
    _from_file.update(set(os.environ) - before)
