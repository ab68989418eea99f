"""``art.dev``: translates OpenPipe ART's configuration of engine and learner into art's settings, or refuses it by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_core.errors import ConfigError
from art_openpipe import refused

InternalModelConfig = BackendModelConfig = InitArgs = EngineArgs = TrainerArgs = OpenAIServerConfig = ServerArgs = dict
TrainConfig = TrainSFTConfig = LoRAConfig = TinkerArgs = TinkerNativeArgs = VllmRuntimeArgs = dict
MAPPED = {
    ("lora_config", "rank"): "lora_rank",
    ("lora_config", "random_state"): "seed",
    ("lora_config", "max_seq_length"): "max_context",
    ("init_args", "max_seq_length"): "max_context",
    ("init_args", "load_in_4bit"): "load_in_4bit",
    ("trainer_args", "max_grad_norm"): "max_grad_norm",
    ("trainer_args", "warmup_steps"): "warmup_steps",
    ("trainer_args", "learning_rate"): "learning_rate",
}  # (part, name) -> art's setting


def __getattr__(name: str) -> Any:
    return getattr(refused, name)


def settings_of(internal: Mapping[str, Any] | None, lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return art's settings. Raises ConfigError for options that art does not have."""
    parts = {**(internal or {}), "lora_config": lora or {}}
    if "peft_args" in parts:
        refused.PeftArgs()
    engine = {name.replace("_", "-"): value for name, value in parts.pop("engine_args", {}).items()}
    settings: dict[str, Any] = {"engine_args": engine} if engine else {}
    for part, options in parts.items():
        for name in options if isinstance(options, Mapping) else [str(options)]:
            if (part, name) not in MAPPED:
                raise ConfigError(
                    f"{part}: {name!r} is not supported by art, whose settings are keywords of LocalBackend, such as "
                    "LocalBackend(engine='vllm', engine_args={...}, lora_rank=16); see docs/settings.md"
                )
            settings[MAPPED[part, name]] = options[name]
    return settings


def refuse_server_config(config: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a configuration of the inference server."""
    if config:
        instead = "LocalBackend(host=, port=, tool_parser=), and for vLLM engine='vllm', engine_args={...}"
        raise ConfigError(f"_openai_client_config={dict(config)!r} is not supported by art: use {instead}")
