"""The virtual environment ``.bench`` with the peers and art_core, so that all sides run in one process."""

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
"""ART records nothing with openai 3.x: it patches httpx, which openai 3.x no longer uses."""
QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "WEAVE_DISABLED": "true", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def setup() -> None:
    """Create the environment from the package registry, or update an existing one."""
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    install = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    ours = [
        f"{ROOT}[train,chart]",
        *(f"{ROOT}/integrations/art-{name}" for name in ("cli", "embedded", "hybrid", "ruler")),
    ]
    subprocess.run([*install, *(word for folder in ours for word in ("-e", folder)), *PEERS], check=True)
    print(f"{FOLDER} is ready; python -m bench.peers now uses it")


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
