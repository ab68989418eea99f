"""Detects the formats of a model's tool calls and thinking, by vLLM's parser names.

The chat template counts first, because the model was trained on it; then the model type; then, for a model that isn't on
this machine, its name.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from art_core.errors import ConfigError
from art_embedded.tool_format import MARK, shows_tools, template_with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_PARSERS = {
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "deepseek_v4", "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47",
    "granite", "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling",
    "internlm", "jamba", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json", "llama4_json",
    "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer",
    "olmo3", "openai", "phi4_mini_json", "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json",
    "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
}  # fmt: skip
"""In vLLM 0.32."""
REASONING_PARSERS = {
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41",
    "ernie45", "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser", "hf", "holo2", "hunyuan_a13b",
    "hy_v3", "hy_v4", "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "ling3", "mimo", "minicpmv", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss",
    "plamo3", "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
}  # fmt: skip
"""In vLLM 0.32."""

WRITES_CALLS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<longcat_tool_call>", "longcat"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|channel|>", "openai"),
    ("｜DSML｜", "deepseek_v32"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("[func_name1(params_name1=", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("functools[", "phi4_mini_json"),
    ("<function_calls>", "olmo3"),
    ("<tool_calls>", "jamba"),
)
"""Text in a chat template -> format of tool calls; the first match counts."""

CALLS_OF_TYPES = {
    "qwen2": "hermes", "qwen2_moe": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "qwen3_next": "hermes",
    "qwen3_5": "qwen3_coder", "qwen3_5_moe": "qwen3_coder", "llama": "llama3_json", "llama4": "llama4_pythonic",
    "llama4_text": "llama4_pythonic", "mistral": "mistral", "mixtral": "mistral", "ministral": "mistral",
    "mistral3": "mistral", "ministral3": "mistral", "kimi_k2": "kimi_k2", "kimi_k25": "kimi_k2", "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32", "granite": "granite", "granitemoe": "granite", "granitemoehybrid": "granite4",
    "phi3": "phi4_mini_json", "glm4_moe": "glm45", "gpt_oss": "openai", "jamba": "jamba", "lfm2": "lfm2", "olmo3": "olmo3",
    "internlm2": "internlm", "seed_oss": "seed_oss", "minimax_m2": "minimax_m2", "longcat_flash": "longcat",
}  # fmt: skip
"""Model type -> format of the tool calls that its chat models were trained on."""
THINKING_OF_TYPES = {
    "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_next": "qwen3", "qwen3_5": "qwen3", "qwen3_5_moe": "qwen3",
    "glm4_moe": "glm45", "gpt_oss": "openai_gptoss", "seed_oss": "seed_oss", "minimax_m2": "minimax_m2", "olmo3": "olmo3",
    "nemotron_h": "nemotron_v3", "ernie4_5_moe": "ernie45", "kimi_k2": "kimi_k2", "kimi_k25": "kimi_k2",
    "step3_vl": "step3", "mimo": "mimo",
}  # fmt: skip
"""Model type -> format of thinking. Most models of other types don't think."""


class Spoken(NamedTuple):
    """The formats of one model."""

    tools: str | None
    thinking: str | None


NAMES = (
    (r"moonlight", Spoken(None, None)),
    (r"kimi-k2.*thinking|kimi-k2\.", Spoken("kimi_k2", "kimi_k2")),
    (r"kimi-k2", Spoken("kimi_k2", None)),
    (r"deepseek-r1.*distill", Spoken(None, "deepseek_r1")),
    (r"deepseek-r1", Spoken("deepseek_v3", "deepseek_r1")),
    (r"deepseek-v3\.1", Spoken("deepseek_v31", "deepseek_v3")),
    (r"deepseek-v3\.2", Spoken("deepseek_v32", "deepseek_v3")),
    (r"deepseek-v3", Spoken("deepseek_v3", None)),
    (r"qwen3-coder", Spoken("qwen3_coder", None)),
    (r"qwen3[._-]5", Spoken("qwen3_coder", "qwen3")),
    (r"qwen3.*instruct", Spoken("hermes", None)),
    (r"qwen3", Spoken("hermes", "qwen3")),
    (r"qwq", Spoken("hermes", "deepseek_r1")),
    (r"hermes|qwen", Spoken("hermes", None)),
    (r"llama-?4", Spoken("llama4_pythonic", None)),
    (r"llama-?3\.[1-9]", Spoken("llama3_json", None)),
    (r"magistral", Spoken("mistral", "mistral")),
    (r"mistral|mixtral|ministral|devstral", Spoken("mistral", None)),
    (r"granite-4", Spoken("granite4", None)),
    (r"granite-3", Spoken("granite", None)),
    (r"phi-4-mini", Spoken("phi4_mini_json", None)),
    (r"glm-4\.[5-9]", Spoken("glm45", "glm45")),
    (r"gpt-oss", Spoken("openai", "openai_gptoss")),
)
"""Case-insensitive pattern in a model's name -> its formats; the first match counts."""


def tool_parser(model_folder: str, chosen: str | None = None, tool_format: str | None = None) -> str | None:
    """Return the format of the model's tool calls; None if it has none.

    ``model_folder`` is a folder or a hub name; nothing is downloaded. ``chosen`` takes precedence; ``"none"`` means no format.
    ``tool_format`` is the setting. Raises ConfigError for a name that vLLM doesn't know either.
    """
    if chosen is not None:
        return _checked("tool_parser", chosen, TOOL_PARSERS)
    return "hermes" if needs_tool_format(model_folder, tool_format) else _detected(model_folder).tools


def needs_tool_format(model_folder: str, tool_format: str | None) -> bool:
    """Whether art writes tools into the prompt: if ``tool_format`` says so, or if it is None and the chat template has none."""
    calls, template = _detected(model_folder).tools, _template(model_folder) or ""
    if MARK in template or tool_format == "none":
        return False
    return tool_format is not None or (bool(template) and calls is None and not shows_tools(template))


def extend_template(tokenizer: PreTrainedTokenizerBase, model_folder: str, tool_format: str | None) -> bool:
    """Add tools to the tokenizer's chat template if art writes them; return whether it does."""
    needed = needs_tool_format(model_folder, tool_format)
    if needed:
        tokenizer.chat_template = template_with_tools(tokenizer)
    return needed


def reasoning_parser(model_folder: str, chosen: str | None = None) -> str | None:
    """Return the format of the model's thinking; None if it doesn't think. Otherwise like ``tool_parser``."""
    return (
        _detected(model_folder).thinking if chosen is None else _checked("reasoning_parser", chosen, REASONING_PARSERS)
    )


def _checked(setting: str, chosen: str, known: set[str]) -> str | None:
    if chosen == "none":
        return None
    if chosen not in known:
        near = difflib.get_close_matches(chosen, sorted(known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"pass 'none' or one of: {', '.join(sorted(known))}"
        raise ConfigError(f"{setting}={chosen!r} isn't a known format; {hint}")
    return chosen


def _detected(model: str) -> Spoken:
    config, template = _config(model), _template(model)
    kind = str(config.get("model_type", ""))
    if template is not None:
        return Spoken(_calls_in_template(template, kind), _thinking_in_template(template, kind))
    if kind:
        return Spoken(CALLS_OF_TYPES.get(kind), THINKING_OF_TYPES.get(kind))
    named = (spoken for pattern, spoken in NAMES if re.search(pattern, model, re.IGNORECASE))
    return next(named, Spoken(None, None))


def _calls_in_template(template: str, kind: str) -> str | None:
    if MARK in template:
        return "hermes"
    for marker, name in WRITES_CALLS:
        if marker in template:
            return name
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|tool_call|>" in template:
        return {"gemma4": "gemma4", "phi3": "phi4_mini_json"}.get(kind, "granite")
    if "<tool_call>" in template:
        return CALLS_OF_TYPES.get(kind, "granite") if kind.startswith("granite") else "hermes"
    # A template without tools belongs to a model that wasn't trained to call them, such as Moonlight, whose type is
    # that of DeepSeek V3.
    return CALLS_OF_TYPES.get(kind) if shows_tools(template) else None


def _thinking_in_template(template: str, kind: str) -> str | None:
    if "<|channel|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "<seed:think>" in template:
        return "seed_oss"
    if "<think>" not in template and "</think>" not in template:
        return None
    if "<|im_middle|>" in template:
        return "kimi_k2"
    if "<｜Assistant｜>" in template:
        return "deepseek_v3" if re.search(r"\b(if|not) thinking\b", template) else "deepseek_r1"
    if kind.startswith("qwen3") and "think>" not in template.rpartition("add_generation_prompt")[2]:
        return None  # It renders earlier thinking, but neither starts nor suppresses it: an Instruct model.
    return THINKING_OF_TYPES.get(kind, "deepseek_r1")


def _config(model: str) -> dict[str, Any]:
    return _read_json(_file(model, "config.json"))


def _template(model: str) -> str | None:
    """Return the model's chat templates, joined; None if its tokenizer isn't on this machine."""
    jinja = (_file(model, name) for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"))
    if found := [_read_text(file) for file in jinja if file]:
        return "\n".join(found)
    files = [_file(model, name) for name in ("tokenizer_config.json", "chat_template.json")]
    if not any(files):
        return None
    templates = [(_read_json(file).get("chat_template"), file) for file in files]
    return "\n".join(text for template, file in templates for text in _texts(template, file))


def _texts(template: Any, file: Path | None) -> list[str]:
    """Return the texts of a file's ``chat_template``, which is a text or a list of named templates."""
    named = template if isinstance(template, list) else [{"template": template or ""}]
    texts = [each.get("template") if isinstance(each, dict) else None for each in named]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"the chat_template of {file} is neither a text nor a list of named templates; download the file again"
        )
    return texts


def _read_json(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} isn't valid JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} isn't a JSON object; download it again")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}; download it again") from error


def _file(model: str, name: str) -> Path | None:
    """Return a model's file from its folder or the local hub cache; None if it is missing."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model, name)
    except ValueError:  # not a valid hub name
        return None
    return Path(cached) if isinstance(cached, str) else None
