"""What the environment and ``.env`` say about server and workers. Knows nothing about either."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from art_cli.variables import load_env_file, warn_refused
from art_core.errors import ConfigError

SECRETS = Path("/run/secrets")


class Settings(BaseSettings):
    """Defaults of ``art serve`` and ``art worker``; their options come first."""

    model_config = SettingsConfigDict(env_prefix="ART_", extra="ignore")

    server_host: str = "127.0.0.1"
    server_port: int = Field(8000, ge=0, le=65535)
    server_token: SecretStr | None = None
    """Whoever asks the server must know it. Needed on every address but this machine's own."""
    client_workers: int = Field(4, ge=1)
    """Episodes that one ``art worker`` runs at a time."""


def load_settings() -> Settings:
    """Return the settings; variables of ``.env`` in the working folder count where the environment has none, and files of
    ``/run/secrets`` where neither has any.

    They are put into the environment, for the libraries that read their keys there. Raises ConfigError for what cannot be used.
    """
    load_env_file()  # no command has, if a script connects
    warn_refused()
    try:
        # Where containers are given what no process list or image should show: one file a setting, art_server_token say.
        found = Settings(_secrets_dir=SECRETS if SECRETS.is_dir() else None)  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        name = f"ART_{first['loc'][0]}".upper()
        raise ConfigError(f"{name} in the environment or .env: {first['msg']}") from error
    if found.server_token is not None and not found.server_token.get_secret_value():
        found.server_token = None
    return found
