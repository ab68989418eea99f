"""Whether Unsloth can run here and suits a model, and its import.

Importing this module is light; ``load`` imports Unsloth, which patches other libraries for the whole process.
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
"""``model_type`` of the models whose attention Unsloth replaces by one that accepts a tree: docs/unsloth.md. It compiles
others from transformers' code; ``"unsloth"`` trains them, ``"auto"`` leaves them to torch."""
NO_TEACHER = "a teacher is computed by transformers' own code, which Unsloth changes for the whole process"
OPT_IN = "UNSLOTH_ALLOW_CPU"
"""If this variable is 1, ``"auto"`` uses Unsloth even without a GPU, where it has no kernels of its own."""


def installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None


def missing() -> str:
    """Return why Unsloth can't run here and what to do about it, or "" if it can. Imports torch."""
    if not installed():
        return f"unsloth is not installed; run: {INSTALL}"
    version = importlib.metadata.version("unsloth")
    if not has_gpu() and _release(version) < CPU_BACKEND_SINCE:
        since = ".".join(map(str, CPU_BACKEND_SINCE))
        return f"unsloth {version} needs a GPU and torch finds none; run: pip install 'unsloth>={since}'"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, without suffixes for candidates, builds and post-releases."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split(".")[:3])) if numbers else ()


def why_not(model_folder: str, config: TrainConfig) -> str:
    """Return why ``learner="auto"`` leaves this run to torch, or "" if it uses Unsloth."""
    if reason := missing():
        return reason
    if not has_gpu() and os.environ.get(OPT_IN) != "1":
        return f"there is no GPU, and without one Unsloth has no kernels of its own (set {OPT_IN}=1 to use it anyway)"
    if config.teacher:
        return NO_TEACHER
    if config.lora_rank == 0:
        return "lora_rank=0 trains all weights, and Unsloth is for LoRA"
    try:
        family = json.loads((_local(model_folder) / "config.json").read_text())["model_type"]
        small = config.lora_rank is None and parameters(model_folder) < LORA_FROM
    except (OSError, ValueError, KeyError) as error:
        return f"the type of the model {model_folder} could not be read: {error}"
    if family not in FAMILIES:
        return f"Unsloth's kernels are not known to follow a token tree in models of type {family!r}"
    return "a model this small trains all its weights (lora_rank=16 would train an adapter)" if small else ""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def check() -> None:
    """Raise ConfigError if Unsloth can't run here."""
    if reason := missing():
        raise ConfigError(f"learner='unsloth' cannot be used: {reason}, or use learner='torch'")


def load() -> ModuleType:
    """Import Unsloth and return it. Raises ConfigError if it can't run here."""
    check()
    try:
        with quiet():
            import unsloth
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"unsloth is installed but can't be imported: {type(error).__name__}: {error}; "
            f"reinstall it with: {INSTALL}, or use learner='torch'"
        ) from error
    return unsloth


@contextmanager
def quiet() -> Iterator[None]:
    """Log at level DEBUG what Unsloth prints, and hide its warnings.

    Without a GPU, ``UNSLOTH_ALLOW_CPU`` is hidden from Unsloth: there the variable selects the code for GPUs, which fails.
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
    """Return a model's folder; a hub model is downloaded, as training would do."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["config.json", "model*.safetensors"]))


def parameters(model_folder: str) -> int:
    """Return a model's number of weights without loading it. Raises ValueError if it has no safetensors files."""
    from safetensors import safe_open

    files = sorted(_local(model_folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_folder} has no safetensors files")
    total = 0
    for file in files:
        with safe_open(file, framework="np") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no dict
    return total
