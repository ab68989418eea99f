"""The options of the executor and the learner on Ray."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from art_core.errors import ConfigError

Options = TypeVar("Options")


@dataclass(frozen=True)
class ExecutorOptions:
    """``TrainConfig.executor_args``."""

    workers: int | None = None
    """Processes that run agents; None: half of the cluster's CPUs, but at most one for every 8 of ``max_concurrent``."""
    cpus: float = 1.0
    """CPUs that Ray reserves for each process."""
    start_seconds: float = 300.0
    """Seconds within which the first process must start; a cluster may have to grow first."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of these processes: ``env_vars``, ``working_dir``, ``pip``, ..."""


@dataclass(frozen=True)
class LearnerOptions:
    """``TrainConfig.learner_args``."""

    processes: int | None = None
    """Processes that learn; None: one for each GPU of the cluster, or one if it has no GPU."""
    sharding: str = "ddp"
    """``ddp``: every process has all weights; ``fsdp``: each has a part of weights, gradients and optimizer state (FSDP2)."""
    cpus: float = 1.0
    """CPUs that Ray reserves for each process, and its number of threads if there is no GPU."""
    start_seconds: float = 300.0
    """Seconds within which all processes must start; a cluster may have to grow first."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of these processes."""


MINIMUM = {"workers": 1, "processes": 1, "cpus": 0, "start_seconds": 0}
"""The smallest value of each numeric option."""


def parsed(kind: type[Options], setting: str, values: Mapping[str, Any]) -> Options:
    """Return the options in ``values``, which the user passed as ``setting``. ConfigError for unknown or invalid ones."""
    names = [option.name for option in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; available: {', '.join(names)}"
            raise ConfigError(f"{setting} has no option {name!r}{hint}")
        is_count = name in ("workers", "processes")
        if name in MINIMUM and not (value is None and is_count):
            is_number = isinstance(value, int if is_count else int | float) and not isinstance(value, bool)
            if not is_number or value < MINIMUM[name]:
                expected = "an integer" if is_count else "a number"
                raise ConfigError(f"{setting}: {name} must be {expected} >= {MINIMUM[name]}, got {value!r}")
        if name == "sharding" and value not in ("ddp", "fsdp"):
            raise ConfigError(f"{setting}: sharding must be 'ddp' or 'fsdp', got {value!r}")
        if name == "runtime_env" and not isinstance(value, Mapping):
            raise ConfigError(f"{setting}: runtime_env must be a dict for ray.init, got {value!r}")
    return kind(**values)
