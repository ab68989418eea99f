"""Memory, compute and bandwidth of GPUs, as published by their makers."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from art_core.errors import ConfigError

GIB = 2**30
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g|mb|mib)", re.IGNORECASE)
ROUNDED = 0.1
"""Share by which the size in a GPU's name may differ from the memory that programs see."""
UNITS = {"gb": 10**9, "g": 10**9, "mb": 10**6, "gib": 2**30, "mib": 2**20}


@dataclass(frozen=True)
class Gpu:
    """A GPU, or only a memory size."""

    name: str
    memory: int
    """Bytes available to programs: less than advertised."""
    half: float | None = None
    """Peak of dense 16-bit matrix products with 32-bit accumulation, in TFLOP/s."""
    single: float | None = None
    """Peak in float32 without tensor cores, torch's default for float32, in TFLOP/s."""
    bandwidth: float | None = None
    """Memory bandwidth in GB/s (10^9 bytes per second)."""


def _gpu(name: str, gib: float, half: float, single: float, bandwidth: float) -> Gpu:
    return Gpu(name, round(gib * GIB), half, single, bandwidth)


GPUS = (
    # memory that CUDA reports (GiB), 16-bit and float32 (TFLOP/s), bandwidth (GB/s)
    _gpu("T4", 14.6, 65, 8.1, 320),
    _gpu("L4", 22.0, 121, 30.3, 300),
    _gpu("A10", 22.0, 125, 31.2, 600),
    _gpu("A10G", 22.0, 70, 35.0, 600),
    _gpu("RTX 3090", 23.6, 71, 35.6, 936),
    _gpu("RTX 4090", 23.5, 165, 82.6, 1008),
    _gpu("RTX 5090", 31.3, 209, 104.8, 1792),
    _gpu("A100-40GB", 39.4, 312, 19.5, 1555),
    _gpu("L40S", 44.4, 362, 91.6, 864),
    _gpu("RTX A6000", 47.4, 155, 38.7, 768),
    _gpu("A100-80GB", 79.1, 312, 19.5, 2039),
    _gpu("H100", 79.1, 989, 67.0, 3350),
    _gpu("H200", 139.8, 989, 67.0, 4800),
    _gpu("B200", 178.3, 2250, 80.0, 8000),
    _gpu("MI300X", 191.7, 1307, 163.4, 5300),
)
"""From the makers' data sheets, smallest memory first: without sparsity; the SXM variant if there are several."""
ALIASES = {
    **{"A100": "A100-80GB", "A100 40": "A100-40GB", "A100 80": "A100-80GB", "A6000": "RTX A6000"},
    **{"3090": "RTX 3090", "4090": "RTX 4090", "5090": "RTX 5090"},
}


def find_gpu(text: str) -> Gpu:
    """Return the GPU that ``text`` names, or one with that memory, such as ``24GB`` (10^9) or ``24GiB`` (2^30).

    Raises ConfigError if it is neither.
    """
    if size := SIZE.fullmatch(text.strip()):
        memory = float(size[1]) * UNITS[size[2].lower()]
        if memory < GIB:
            raise ConfigError(
                f"--gpu {text}: less than 1 GiB is too small for any model; pass a size such as 24GB, or a GPU's name"
            )
        return Gpu(text.strip(), int(memory))
    known = {_plain(gpu.name): gpu for gpu in GPUS} | {_plain(name): _named(gpu) for name, gpu in ALIASES.items()}
    # A name may include the memory size ("L4 24GB") and the form factor ("NVIDIA H100 80GB HBM3").
    bare = re.sub(r"[-_\s](sxm\d?|pcie|hbm\d\w?)(?=[-_\s]|$)", "", text.strip(), flags=re.IGNORECASE)
    if gpu := known.get(_plain(bare)):
        return gpu
    sized = re.fullmatch(r"(.+?)[-_\s]*(\d+)\s*gi?b", bare, flags=re.IGNORECASE)
    if sized and (gpu := known.get(_plain(sized[1]))):
        size, gib = int(sized[2]), gpu.memory / GIB
        if abs(gib - size) > ROUNDED * size:
            raise ConfigError(
                f"--gpu {text!r}: {gpu.name} has {gib:.1f} GiB, not {size}; pass {gpu.name!r}, or a size alone: {size}GB"
            )
        return gpu
    wanted = _plain(text)
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    hint = f" (did you mean {known[near[0]].name!r}?)" if near else ""
    raise ConfigError(
        f"--gpu {text!r} is neither a known GPU nor a memory size{hint}; pass one of {', '.join(gpu.name for gpu in GPUS)}, or a "
        "size such as 24GB"
    )


def machine(gpu: Gpu, gpus: int) -> str:
    """Return a name for so many GPUs of a kind."""
    return f"{gpus} x {gpu.name}" if gpus > 1 else gpu.name


def _named(name: str) -> Gpu:
    return next(gpu for gpu in GPUS if gpu.name == name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct", "", name.lower())
