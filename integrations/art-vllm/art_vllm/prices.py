"""What GPUs cost per hour: the user's assumption, for one kind of GPU or for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art_core.errors import ConfigError
from art_vllm.gpus import GPUS, Gpu, find_gpu


@dataclass(frozen=True)
class Prices:
    """Dollars per hour."""

    any_gpu: float | None
    """Of every GPU that ``named`` doesn't list."""
    named: Mapping[str, float]
    """By the name of the GPU."""

    def of(self, gpu: Gpu) -> float | None:
        return self.named.get(gpu.name, self.any_gpu)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The known GPUs that have a price, smallest memory first."""
        return tuple(gpu for gpu in GPUS if self.of(gpu) is not None)


def read_prices(options: Sequence[str]) -> Prices:
    """Read ``2.5`` (any GPU) and ``H100=2.5`` (one kind). Raises ConfigError for another form or an unknown GPU."""
    any_gpu, named = None, {}
    for option in options:
        name, _, amount = option.rpartition("=")
        try:
            dollars = float(amount)
        except ValueError:
            dollars = -1.0
        if not 0 <= dollars < float("inf"):
            raise ConfigError(f"--dollars-per-hour must be a price such as 2.5 or H100=2.5, got {option!r}")
        if name:
            named[with_speed(name, name).name] = dollars
        else:
            any_gpu = dollars
    return Prices(any_gpu, named)


def with_speed(name: str, said: str) -> Gpu:
    """Return a GPU. Raises ConfigError if nothing but its size is known, of which the command line ``said``."""
    gpu = find_gpu(name)
    if gpu.half is None:
        raise ConfigError(
            f"--dollars-per-hour needs the GPU's speed, and {said} is only a size; name the GPU, such as 'RTX 4090'"
        )
    return gpu
