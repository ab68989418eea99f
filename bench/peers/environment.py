"""The virtual environment ``.bench`` with the peers and art_core in it, so that all sides run in one process."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench"
PYTHON = FOLDER / "bin" / "python"
PEERS = ("openpipe-art==0.5.18", "trl==1.16.0", "torch==2.13.0", "openai<3")
"""ART records nothing from openai 3.x: it patches httpx, which that no longer uses."""
QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "WEAVE_DISABLED": "true", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def setup() -> None:
    """Make the environment from the package registry; what is there already is kept."""
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    install = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*install, "-e", f"{ROOT}[train,chart]", "-e", f"{ROOT}/integrations/art-ruler", *PEERS], check=True)
    print(f"{FOLDER} is ready; python -m bench.peers uses it from now on")


def enter(module: str, arguments: list[str], threads: int) -> None:
    """Go on as ``python -m module`` in the environment of the peers where there is one, with quiet libraries."""
    settings = {**QUIET, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "ART_BENCH": "1"}
    if os.environ.get("ART_BENCH"):
        return
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    if python == sys.executable and not PYTHON.exists():
        print("no .bench here, so peers that this Python lacks are left out: python -m bench.peers setup", flush=True)
    sys.stdout.flush()
    os.execve(python, [python, "-m", module, *arguments], {**os.environ, **settings})
