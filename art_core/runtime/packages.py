"""Where what a user installed or converted once is kept, and how packages get there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of this name in ``ART_CACHE``, else in art's part of the user's cache folder. It may not exist."""
    if named := os.environ.get("ART_CACHE"):
        return Path(named).expanduser() / name
    usual = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(usual).expanduser() / "art" / name


def install_packages(*arguments: str, python: str = sys.executable, quiet: bool = False) -> bool:
    """Install for ``python`` with uv if it is on PATH, else (or if uv fails) with pip; return whether that succeeded.

    ``arguments`` are requirements and options that both know; ``quiet`` hides their errors.
    """
    uv = shutil.which("uv")
    installers = [[uv, "pip", "install", "--python", python]] if uv else []
    installers.append([python, "-m", "pip", "install", "--disable-pip-version-check"])
    stderr = subprocess.DEVNULL if quiet else None
    commands = ([*installer, "--quiet", *arguments] for installer in installers)
    return any(not subprocess.run(command, check=False, stderr=stderr).returncode for command in commands)
