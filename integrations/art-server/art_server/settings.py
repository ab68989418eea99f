"""Settings of server and workers from the environment and ``.env``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from art_cli.variables import load_env_file, warn_refused
from art_core.errors import ConfigError

SECRETS = Path("/run/secrets")


class Settings(BaseSettings):
    """Defaults of ``art serve`` and ``art worker``, which their options override."""

    model_config = SettingsConfigDict(env_prefix="ART_", extra="ignore")

    server_host: str = "127.0.0.1"
    server_port: int = Field(8000, ge=0, le=65535)
    server_token: SecretStr | None = None
    """The token that clients must send. Required unless the server listens on a loopback address."""
    client_workers: int = Field(4, ge=1)
    """Episodes that one ``art worker`` runs concurrently."""


def load_settings() -> Settings:
    """Return the settings from the environment, else from ``.env`` in the working folder, else from files in ``/run/secrets``.

    The variables of ``.env`` are added to the environment, for libraries that read their keys there. Raises ConfigError for
    invalid values.
    """
    load_env_file()  # no command has, if a script connects
    warn_refused()
    try:
        # Containers get secrets, which process lists and images shouldn't show, as one file each, such as art_server_token.
        settings = Settings(_secrets_dir=SECRETS if SECRETS.is_dir() else None)  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        name = f"ART_{first['loc'][0]}".upper()
        raise ConfigError(f"{name} in the environment or .env: {first['msg']}") from error
    if settings.server_token is not None and not settings.server_token.get_secret_value():
        settings.server_token = None
    return settings
