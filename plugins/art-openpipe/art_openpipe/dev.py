"""``art.dev``: translates OpenPipe ART's configuration of engine and learner into art's settings, or refuses it by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_core.errors import ConfigError

InternalModelConfig = InitArgs = EngineArgs = PeftArgs = TrainerArgs = OpenAIServerConfig = ServerArgs = TrainConfig = (
    dict
)
"""Plain dicts, as in OpenPipe ART."""

MAPPED = {
    ("init_args", "max_seq_length"): "max_context",
    ("init_args", "load_in_4bit"): "load_in_4bit",
    ("peft_args", "r"): "lora_rank",
    ("peft_args", "random_state"): "seed",
    ("trainer_args", "max_grad_norm"): "max_grad_norm",
    ("trainer_args", "warmup_steps"): "warmup_steps",
    ("trainer_args", "learning_rate"): "learning_rate",
}
"""(part, name) -> art's setting."""
UNSLOTH = ("gpu_memory_utilization", "fast_inference", "max_lora_rank", "use_gradient_checkpointing", "enforce_eager")
"""Ignored options of ``init_args``, ``peft_args`` and ``engine_args`` about sharing a GPU's memory, which art manages itself."""


def settings_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return art's settings. Raises ConfigError for options that art does not have."""
    settings: dict[str, Any] = {}
    for part, options in (config or {}).items():
        if part == "engine_args":
            settings["engine_args"] = {name.replace("_", "-"): value for name, value in options.items()}
            continue
        if part not in {known for known, _ in MAPPED}:
            raise ConfigError(f"_internal_config[{part!r}] is not supported by art: {_INSTEAD}")
        for name, value in options.items():
            if (part, name) in MAPPED:
                settings[MAPPED[part, name]] = value
            elif name not in UNSLOTH:
                raise ConfigError(f"_internal_config[{part!r}][{name!r}] is not supported by art: {_INSTEAD}")
    return settings


_INSTEAD = (
    "art's settings are keywords of LocalBackend, such as LocalBackend(engine='vllm', engine_args={...}, lora_rank=16); "
    "docs/settings.md lists them"
)


def refuse_server_config(config: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a configuration of the inference server."""
    if config:
        raise ConfigError(
            f"_openai_client_config={dict(config)!r} is not supported by art: set the address with LocalBackend(host=, port=), "
            "the tool format with LocalBackend(tool_parser=), vLLM's options with LocalBackend(engine='vllm', engine_args={...})"
        )
