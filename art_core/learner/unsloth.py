"""Whether Unsloth can run here and suits a model, and its import. Knows nothing about training.

Importing this file loads nothing heavy; ``load`` imports Unsloth, which changes other libraries for the whole process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from math import prod
from pathlib import Path
from types import ModuleType

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.sizes import LORA_FROM

logger = logging.getLogger("art_core.learner")

INSTALL = "pip install unsloth"
CPU_BACKEND_SINCE = (2026, 10, 9)
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"})
"""``model_type`` of the models whose attention Unsloth replaces by one that takes a tree: docs/unsloth.md. Others it
compiles from transformers' code; they train when asked for, and ``"auto"`` leaves them to torch."""
OPT_IN = "UNSLOTH_ALLOW_CPU"
"""With this variable at 1, ``"auto"`` takes Unsloth on a machine without a GPU too, where it has no kernels of its own."""


def installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None


def missing() -> str:
    """Return what keeps Unsloth from running here and what to do about it; empty where nothing does. Imports torch."""
    if not installed():
        return f"unsloth is not installed; run: {INSTALL}"
    version = importlib.metadata.version("unsloth")
    if not has_gpu() and _release(version) < CPU_BACKEND_SINCE:
        since = ".".join(map(str, CPU_BACKEND_SINCE))
        return f"unsloth {version} needs a GPU and torch finds none; run: pip install 'unsloth>={since}'"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, without what marks a candidate, a build or a post-release."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split(".")[:3])) if numbers else ()


def why_not(model_folder: str, config: TrainConfig) -> str:
    """Return why ``learner="auto"`` leaves this run to torch; empty where it takes Unsloth."""
    if reason := missing():
        return reason
    if not has_gpu() and os.environ.get(OPT_IN) != "1":
        return f"there is no GPU, and without one Unsloth has no kernels of its own ({OPT_IN}=1 takes it all the same)"
    if config.lora_rank == 0:
        return "lora_rank=0 trains all weights; Unsloth is for LoRA"
    try:
        family = json.loads((_local(model_folder) / "config.json").read_text())["model_type"]
        small = config.lora_rank is None and parameters(model_folder) < LORA_FROM
    except (OSError, ValueError, KeyError) as error:
        return f"what kind of model {model_folder} is could not be read: {error}"
    if family not in FAMILIES:
        return f"Unsloth's kernels are not known to follow a token tree in models of type {family!r}"
    return "a model this small trains all its weights (lora_rank=16 would train an adapter)" if small else ""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def check() -> None:
    """Raise ConfigError where Unsloth cannot run here."""
    if reason := missing():
        raise ConfigError(f"learner='unsloth' cannot be used: {reason}, or give learner='torch'")


def load() -> ModuleType:
    """Import Unsloth and return it; ConfigError where it cannot run here."""
    check()
    try:
        with quiet():
            import unsloth
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"unsloth is installed and cannot be imported: {type(error).__name__}: {error}; "
            f"reinstall it with: {INSTALL}, or give learner='torch'"
        ) from error
    return unsloth


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what Unsloth prints and warns about off the screen: it goes to the log, at level DEBUG.

    Without a GPU the variable ``UNSLOTH_ALLOW_CPU`` is hidden from it: there it asks for the code for GPUs, which fails.
    """
    hidden = None if has_gpu() else os.environ.pop(OPT_IN, None)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if hidden is not None:
            os.environ[OPT_IN] = hidden
        if text := printed.getvalue().strip():
            logger.debug("unsloth: %s", text)


def _local(model: str) -> Path:
    """Return the folder of a model; what is on the hub only is downloaded, as training would."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["config.json", "model*.safetensors"]))


def parameters(model_folder: str) -> int:
    """Return the number of weights of a model without loading it; ValueError where they are not in safetensors files."""
    from safetensors import safe_open

    files = sorted(_local(model_folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_folder} has no safetensors files")
    total = 0
    for file in files:
        with safe_open(file, framework="np") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no dict
    return total
