"""The keys and the address of a Langfuse project, from the environment. Knows nothing about what is sent there."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field

from art_core.errors import ConfigError

CLOUD = "https://cloud.langfuse.com"


@dataclass(frozen=True)
class Account:
    """A Langfuse project."""

    host: str
    public_key: str
    secret_key: str = field(repr=False)

    def headers(self) -> dict[str, str]:
        """Return what a request for spans has besides its body."""
        pair = f"{self.public_key}:{self.secret_key}".encode()
        return {
            "Authorization": "Basic " + base64.b64encode(pair).decode("ascii"),
            "x-langfuse-public-key": self.public_key,
            "x-langfuse-ingestion-version": "4",  # shown at once, not after minutes
        }


def account() -> Account:
    """Return the project that the environment names; ConfigError says what to set where it names none."""
    keys = {name: os.environ.get(name, "").strip() for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")}
    if missing := [name for name, value in keys.items() if not value]:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: Langfuse shows both keys under a project's "
            f"settings, API keys; set them, and LANGFUSE_HOST for another server than {CLOUD}"
        )
    host = os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST") or CLOUD
    if not host.startswith(("http://", "https://")) or "@" in host:
        # Its text is not shown: it may be a key that was pasted in the wrong place.
        raise ConfigError(
            f"LANGFUSE_HOST is no address such as {CLOUD}; a user and a password have no place in it, the project's keys are sent"
        )
    return Account(host.rstrip("/"), *keys.values())
