"""Every test has a W&B of its own: no key, no settings, and no process when it is over."""

import os
import sys
from pathlib import Path

import pytest
import wandb

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_wandb(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # Registered with monkeypatch, so that what art_wandb sets is undone as well.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    wandb.teardown()
