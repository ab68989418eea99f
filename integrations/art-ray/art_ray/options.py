"""The options of an executor and a learner on Ray. Knows nothing about what they do."""

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
    """Processes that run agents; None: half of the cluster's CPUs, and no more than one for 8 of ``max_concurrent``."""
    cpus: float = 1.0
    """That Ray sets aside for each."""
    start_seconds: float = 300.0
    """Until the first one must have started: a cluster may have to grow first."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of these processes: ``env_vars``, ``working_dir``, ``pip``, ..."""


@dataclass(frozen=True)
class LearnerOptions:
    """``TrainConfig.learner_args``."""

    processes: int | None = None
    """None: one for each GPU of the cluster, or one where it has none."""
    sharding: str = "ddp"
    """``ddp``: every process has all weights; ``fsdp``: each has its part of weights, gradients and optimizer (FSDP2)."""
    cpus: float = 1.0
    """That Ray sets aside for each, and the threads that it computes with where there is no GPU."""
    start_seconds: float = 300.0
    """Until all must have started: a cluster may have to grow first."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of these processes."""


NUMBERS = {"workers": 1, "processes": 1, "cpus": 0, "start_seconds": 0}
"""The smallest value of every option that is a number."""


def parsed(kind: type[Options], setting: str, given: Mapping[str, Any]) -> Options:
    """Return the options of the setting called ``setting``; ConfigError for one that is none, or cannot be used."""
    names = [it.name for it in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names)}"
            raise ConfigError(f"{setting} has no option {name!r}{hint}")
        whole = name in ("workers", "processes")
        if name in NUMBERS and not (value is None and whole):
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or value < NUMBERS[name]:
                what = "a whole number" if whole else "a number"
                raise ConfigError(
                    f"{setting}: {name}={value!r} cannot be used; give {what} of at least {NUMBERS[name]}"
                )
        if name == "sharding" and value not in ("ddp", "fsdp"):
            raise ConfigError(f"{setting}: sharding={value!r} is unknown; use 'ddp' or 'fsdp'")
        if name == "runtime_env" and not isinstance(value, Mapping):
            raise ConfigError(f"{setting}: runtime_env={value!r} cannot be used; give a dict as ray.init takes it")
    return kind(**given)
