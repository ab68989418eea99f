"""The virtual environment ``.bench`` with the peers and art_core, so that all sides run in one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench"
PYTHON = FOLDER / "bin" / "python"
VERSION = "3.12"
"""ART 0.5.23 needs at least this, and AReaL 1.0.4 at most this."""
PEERS = ("openpipe-art==0.5.23", "trl==1.16.0", "torch==2.13.0")
AREAL = "areal==1.0.4"
"""Installed without what it requires: it pins torch below 2.11 and transformers to 5.3; its tree imports ``AREAL_NEEDS``."""
AREAL_NEEDS = (
    "aiofiles", "colorlog", "einops", "flask", "hydra-core==1.4.0.dev1", "lark", "numba", "omegaconf==2.4.0.dev2", "ray",
    "torchdata", "uvloop",
)  # fmt: skip
OURS = ("cli", "embedded", "hybrid", "ruler")
QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "WEAVE_DISABLED": "true", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def setup() -> None:
    """Create the environment from the package registry, or update an existing one."""
    if not PYTHON.exists() or version_of(str(PYTHON)) != VERSION:
        subprocess.run(creation(), check=True)
    install = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    ours = [f"{ROOT}[train,chart]", *(f"{ROOT}/integrations/art-{name}" for name in OURS)]
    editable = [word for folder in ours for word in ("-e", folder)]
    subprocess.run([*install, *editable, *PEERS, *AREAL_NEEDS], check=True)
    subprocess.run([*install, "--no-deps", AREAL], check=True)
    print(f"{FOLDER} is ready; python -m bench.peers now uses it")


def creation() -> Sequence[str]:
    """Return the command that creates an empty environment, in place of one with another Python."""
    for python in (sys.executable, shutil.which(f"python{VERSION}")):
        if python and version_of(python) == VERSION:
            return [python, "-m", "venv", "--clear", str(FOLDER)]
    uv = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".uv" / "bin"))
    if uv:
        return [uv, "venv", "--clear", "--seed", "--python", VERSION, str(FOLDER)]
    raise SystemExit(
        f"The peers need Python {VERSION}. Install it so that python{VERSION} is on PATH, or install uv, which can fetch it."
    )


def version_of(python: str) -> str:
    """Return the interpreter's version as ``3.12``; empty if it cannot start, as in an environment whose Python is gone."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def enter(module: str, arguments: list[str], threads: int) -> None:
    """Continue as ``python -m module`` in the peers' environment, if it exists, with quiet libraries."""
    settings = {**QUIET, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "ART_BENCH": "1"}
    if os.environ.get("ART_BENCH"):
        return
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    if python == sys.executable and not PYTHON.exists():
        print(
            ".bench is missing, so peers that this Python lacks are left out; run: python -m bench.peers setup",
            flush=True,
        )
    sys.stdout.flush()
    os.execve(python, [python, "-m", module, *arguments], {**os.environ, **settings})
