"""Translates a run's config and model into the options and environment variables of a vLLM server."""

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

from art_core import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.sizes import LORA_FROM, LORA_RANK, SMALL_MODEL
from art_embedded.parsers import needs_tool_format, reasoning_parser, tool_parser
from art_embedded.tool_format import template_with_tools

BASE = "policy@0"
"""The name of the start weights on the server."""
RESERVED = {"model", "served-model-name", "host", "port", "api-key"}
"""Options that ``engine_args`` can't change."""
SECRET = re.compile("(^|-)(token|key|password|secret)$")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""
INSIDE = Path(__file__).with_name("inside")
"""Folder with the code that vLLM's worker imports on CPUs."""
CPU_WORKER, CPU_RELOAD = "art_cpu_worker.Repaired", "reload_all_weights"
"""The worker extension's class, and its method that loads whole weights."""
SHARED_GPU = 0.5
"""vLLM's share of GPU memory: the learner uses the first GPU too."""

Options = dict[str, Any]


def options(model_folder: str, config: TrainConfig, *, cuda: bool) -> Options:
    """Return vLLM's options by name, without dashes; ``config.engine_args`` overrides and extends them.

    True is a flag, False its opposite (``--no-...``), and None omits the option. Raises ConfigError for options in
    ``engine_args`` that are reserved or contain secrets.
    """
    chosen: Options = {
        "model": model_folder,
        "served-model-name": BASE,
        "dtype": "auto" if cuda else "float32",
        "seed": config.seed,
        # Else the model's generation_config.json would set sampling parameters that a request leaves open.
        "generation-config": "vllm",
        # "auto": the model's context, or what the memory holds: the 262,144 positions of a 4B model may need 36 GiB.
        "max-model-len": config.max_context or "auto",
        "max-num-seqs": concurrency(config),
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "logprobs-mode": "raw_logprobs"
        if {config.temperature, config.max_temperature} <= {None, 1}
        else "processed_logprobs",
        "disable-uvicorn-access-log": True,
        **parsers(model_folder, config.tool_parser, config.tool_format, config.reasoning_parser),
        "chat-template": chat_template(model_folder, config.tool_format),
        **_lora(model_folder, config),
    }
    if cuda:
        # If rollouts run ahead of the learner, vLLM never sleeps.
        chosen |= {"enable-sleep-mode": not config.max_staleness, "gpu-memory-utilization": SHARED_GPU}
    else:
        chosen |= {"enforce-eager": True, "worker-extension-cls": CPU_WORKER}
    overrides = {name.lstrip("-").replace("_", "-"): value for name, value in config.engine_args.items()}
    if reserved := sorted(overrides.keys() & RESERVED):
        raise ConfigError(
            f"engine_args can't change {', '.join(reserved)}: art sets them to reach its server; to change the model, pass model="
        )
    if secrets := sorted(filter(SECRET.search, overrides)):
        raise ConfigError(
            f"engine_args can't contain {', '.join(secrets)}: others could read it in the process list and in the server's log; "
            "set it in the environment, such as HF_TOKEN"
        )
    return chosen | overrides


def concurrency(config: TrainConfig) -> int:
    """Return how many answers are sampled concurrently: the rollouts of all concurrent steps, up to ``max_concurrent``."""
    return min(config.max_concurrent, config.tasks_per_step * config.group_size * (1 + config.max_staleness))


def chat_template(model: str, tool_format: str | None) -> str | None:
    """Return the chat template to use instead of the model's own, which has no tools; None: its own."""
    if not needs_tool_format(model, tool_format):
        return None
    from art_core.learner.pretrained import load_tokenizer

    return template_with_tools(load_tokenizer(model))


def parsers(model: str, tools: str | None, tool_format: str | None, thinking: str | None) -> Options:
    """Return the parser options for tool calls and thinking: ``tools`` and ``thinking``, else the model's own formats."""
    calls = tool_parser(model, tools, tool_format)
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
        raise ConfigError(f"vLLM serves adapters up to rank {RANKS[-1]}, got lora_rank={rank}; lower it")
    # The newest version, the previous one, whose rollouts still run, and one more for each overlapping step.
    versions = 2 + config.max_staleness
    least = next(allowed for allowed in RANKS if allowed >= rank)
    return {"enable-lora": True, "max-lora-rank": least, "max-loras": versions, "max-cpu-loras": versions + 1}


def adapter_rank(model_folder: str, config: TrainConfig) -> int:
    """Return the rank of the adapters to serve; 0 if whole weights are trained. Follows the learner's own rule."""
    if config.lora_rank is not None:
        return config.lora_rank
    size = parameters(model_folder)
    return 0 if size is not None and size < LORA_FROM else LORA_RANK


def parameters(model_folder: str) -> int | None:
    """Return the number of weights in a folder's safetensors files; None if it has none, as for a hub name."""
    files = list(Path(model_folder).glob("*.safetensors"))
    return sum(map(_weights_in, files)) if files else None


def _weights_in(file: Path) -> int:
    """Count the weights from the file's header: its length (8 bytes, little-endian), then JSON with every tensor's shape."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options as command-line arguments."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def environment(model_folder: str, *, cuda: bool, own: bool) -> dict[str, str]:
    """Return the server's environment variables; ``own``: it runs in this process's Python environment."""
    variables = dict(os.environ)
    if not own:
        # These point to packages of another Python.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
    # Meant for another server: ours would reject requests without it. Ours listens on 127.0.0.1 only.
    variables.pop("VLLM_API_KEY", None)
    variables |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        # Needed for reloading whole weights, resetting caches and sleeping; the server listens on 127.0.0.1 only.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
    if not cuda:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), variables.get("PYTHONPATH"))))
        # Compiling one small function would delay the first request by seconds, and needs a compiler.
        variables.setdefault("TORCHDYNAMO_DISABLE", "1")
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_cache_gib(model_folder)))
        # Run the worker in the engine's own process: on two cores, start plus stop take 17 s instead of 24, and no process
        # spins while it waits for the other. vLLM separates them to set the number of threads, which is set here.
        variables.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) - 1)))
        # Unsloth's switch for CPUs breaks vLLM if both are installed.
        variables.pop("UNSLOTH_ALLOW_CPU", None)
    return variables


def cpu_cache_gib(model_folder: str) -> int:
    """Return the memory for keys and values in GiB: a tenth of the machine's, between 1 and 16; 1 for a small model."""
    if (parameters(model_folder) or SMALL_MODEL) < SMALL_MODEL:
        return 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(16, total // 10 // 2**30))
