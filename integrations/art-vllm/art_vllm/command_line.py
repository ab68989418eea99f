"""A run's config and model as the options and the environment of a vLLM server. Knows nothing about processes."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import psutil

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.sizes import LORA_FROM, LORA_RANK, SMALL_MODEL
from art_embedded.parsers import reasoning_parser, tool_parser

BASE = "policy@0"
"""The name under which the start weights are served."""
TAKEN = {"model", "served-model-name", "host", "port", "api-key"}
"""Options that are not anybody's to change."""
KEY = re.compile("(^|-)(token|key|password|secret)$")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM can be started for."""
INSIDE = Path(__file__).with_name("inside")
"""Of what vLLM's worker imports from us on CPUs."""
CPU_WORKER, CPU_RELOAD = "art_cpu_worker.Repaired", "reload_all_weights"
"""Its class, and the method of it that loads whole weights."""
SHARED_GPU = 0.5
"""vLLM's share of a GPU: the learner works on the first, where vLLM is too."""

Options = dict[str, Any]


def options(model_folder: str, config: TrainConfig, *, cuda: bool) -> Options:
    """Return vLLM's options by name, without dashes; ``config.engine_args`` override and add.

    True is a flag, False its opposite (``--no-...``), None leaves the option out.
    """
    chosen: Options = {
        "model": model_folder,
        "served-model-name": BASE,
        "dtype": "auto" if cuda else "float32",
        "seed": config.seed,
        # Else the model's own file changes how is sampled where a request does not say.
        "generation-config": "vllm",
        "max-model-len": config.max_context,
        "max-num-seqs": concurrency(config),
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "logprobs-mode": "raw_logprobs" if config.temperature == 1 else "processed_logprobs",
        "disable-uvicorn-access-log": True,
        **parsers(model_folder, config.tool_parser, config.reasoning_parser),
        **_lora(model_folder, config),
    }
    if cuda:
        # With rollouts ahead of the learner it never sleeps.
        chosen |= {"enable-sleep-mode": not config.max_staleness, "gpu-memory-utilization": SHARED_GPU}
    else:
        chosen |= {"enforce-eager": True, "worker-extension-cls": CPU_WORKER}
    given = {name.lstrip("-").replace("_", "-"): value for name, value in config.engine_args.items()}
    if taken := sorted(given.keys() & TAKEN):
        raise ConfigError(
            f"engine_args cannot change {', '.join(taken)}: art asks its server at them; model= names the model"
        )
    if keys := sorted(filter(KEY.search, given)):
        raise ConfigError(
            f"engine_args cannot give {', '.join(keys)}: others could read it, in the list of processes and in the server's log; "
            "set it in the environment, such as HF_TOKEN"
        )
    return chosen | given


def concurrency(config: TrainConfig) -> int:
    """Return how many answers are sampled at a time: the rollouts of the steps that run at once, up to their limit."""
    return min(config.max_concurrent, config.tasks_per_step * config.group_size * (1 + config.max_staleness))


def parsers(model: str, tools: str | None, thinking: str | None) -> Options:
    """Return the options for the formats of tool calls and of thinking: those that are named, else what suits the model."""
    calls = tool_parser(model, tools)
    return {
        "enable-auto-tool-choice": True if calls else None,
        "tool-call-parser": calls,
        "reasoning-parser": reasoning_parser(model, thinking),
    }


def _lora(model_folder: str, config: TrainConfig) -> Options:
    rank = adapter_rank(model_folder, config)
    if not rank:
        return {}
    if rank > RANKS[-1]:
        raise ConfigError(f"lora_rank={rank} is more than vLLM serves; give at most {RANKS[-1]}")
    # The newest, the one before it, whose rollouts still run, and as many more as steps overlap.
    versions = 2 + config.max_staleness
    least = next(allowed for allowed in RANKS if allowed >= rank)
    return {"enable-lora": True, "max-lora-rank": least, "max-loras": versions, "max-cpu-loras": versions + 1}


def adapter_rank(model_folder: str, config: TrainConfig) -> int:
    """Return the rank of the adapters to come; 0 where whole weights are trained, which a learner decides in the same way."""
    if config.lora_rank is not None:
        return config.lora_rank
    size = parameters(model_folder)
    return 0 if size is not None and size < LORA_FROM else LORA_RANK


def parameters(model_folder: str) -> int | None:
    """Return the number of weights in a folder's safetensors files; None where there are none, as for a hub name."""
    files = list(Path(model_folder).glob("*.safetensors"))
    return sum(map(_weights_in, files)) if files else None


def _weights_in(file: Path) -> int:
    """Read the file's header: its length, 8 bytes little-endian, then JSON with every tensor's shape."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options as a command line."""
    line: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            line += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            line += [f"--{name}", *map(str, value)]
        elif value is not None:
            line += [f"--{name}", str(value)]
    return line


def environment(model_folder: str, *, cuda: bool, own: bool) -> dict[str, str]:
    """Return the server's environment; ``own``: it runs in the environment of this process."""
    variables = dict(os.environ)
    if not own:
        # What is imported from there belongs to another Python.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
    # Meant for another server: ours would refuse who does not send it, and it listens to this machine only.
    variables.pop("VLLM_API_KEY", None)
    variables |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        # Reloading whole weights, dropping caches and sleeping are endpoints for developers; it listens to this machine only.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
    if not cuda:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), variables.get("PYTHONPATH"))))
        # Compiling a single small function would take the first request some seconds, and a compiler.
        variables.setdefault("TORCHDYNAMO_DISABLE", "1")
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_cache_gib(model_folder)))
        # The worker runs in the engine's own process. On two cores a run starts and ends in 17 s instead of 24, and neither
        # process spins while it waits for the other. vLLM separates them to set the number of threads, which is set here.
        variables.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) - 1)))
        # Unsloth's switch for CPUs breaks vLLM where both are installed.
        variables.pop("UNSLOTH_ALLOW_CPU", None)
    return variables


def cpu_cache_gib(model_folder: str) -> int:
    """Return what the keys and values may take of the machine's memory: a tenth, 1 to 16 GiB; 1 for a small model."""
    if (parameters(model_folder) or SMALL_MODEL) < SMALL_MODEL:
        return 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(16, total // 10 // 2**30))
