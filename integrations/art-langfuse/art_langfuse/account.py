"""The keys and the address of a Langfuse project, from the environment."""

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
        """Return the headers of a request with spans."""
        pair = f"{self.public_key}:{self.secret_key}".encode()
        return {
            "Authorization": "Basic " + base64.b64encode(pair).decode("ascii"),
            "x-langfuse-public-key": self.public_key,
            "x-langfuse-ingestion-version": "4",  # traces appear at once instead of after minutes
        }


def account() -> Account:
    """Return the project that the environment names; ConfigError if it names none."""
    keys = {name: os.environ.get(name, "").strip() for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")}
    if missing := [name for name, value in keys.items() if not value]:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; copy both keys from Langfuse (project "
            f"settings, API keys), and set LANGFUSE_HOST for a server other than {CLOUD}"
        )
    host = os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST") or CLOUD
    if not host.startswith(("http://", "https://")) or "@" in host:
        # The value is not shown, because it may be a key that was pasted into the wrong variable.
        raise ConfigError(
            f"LANGFUSE_HOST must be an address such as {CLOUD}, without user and password; the project's keys are used instead"
        )
    return Account(host.rstrip("/"), *keys.values())
