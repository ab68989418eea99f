"""The formats of tool calls and thinking that the engine parses, by vLLM's names. ``parsers`` says which a model uses."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from art_core import TrainConfig
from art_embedded.formats.call import Format
from art_embedded.formats.hermes import Hermes
from art_embedded.formats.lists import Lists, Mistral
from art_embedded.formats.llama import Llama
from art_embedded.formats.pythonic import Pythonic
from art_embedded.formats.sections import DEEPSEEK, KIMI, Sections
from art_embedded.formats.tags import Tags
from art_embedded.formats.thinking import THINKING, Thinking
from art_embedded.parsers import reasoning_parser, tool_parser

log = logging.getLogger("art_core.engine")

CALLS: dict[str, Format] = {
    "hermes": Hermes(),
    "qwen3_json": Hermes(),
    "granite4": Hermes(),
    "longcat": Hermes("<longcat_tool_call>", "</longcat_tool_call>"),
    "llama3_json": Llama(),
    "llama4_json": Llama(),
    "pythonic": Pythonic(),
    "llama4_pythonic": Pythonic("<|python_start|>", "<|python_end|>"),
    "kimi_k2": Sections(KIMI, numbered=True),
    "deepseek_v31": Sections(DEEPSEEK, numbered=False),
    "mistral": Mistral(),
    "phi4_mini_json": Lists("functools"),
    "qwen3_coder": Tags(),
    "qwen3_xml": Tags(),
}


@dataclass(frozen=True)
class Formats:
    """The formats of one model."""

    calls: Format | None = CALLS["hermes"]
    """None: the model doesn't call tools, or its format isn't supported."""
    thinking: Thinking | None = None
    """None: the model doesn't think, or its format isn't supported."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be kept when decoding, even if the tokenizer marks them as special."""
        return (*(self.calls.markers if self.calls else ()), *(self.thinking or ()))


HERMES = Formats()


def find_formats(model_folder: str, config: TrainConfig) -> Formats:
    """Return the model's formats, or those that ``config`` names, and log them. Raises ConfigError for unknown names."""
    calls = tool_parser(model_folder, config.tool_parser, config.tool_format)
    thinking = reasoning_parser(model_folder, config.reasoning_parser)
    log.info(
        "model formats: %s for tool calls, %s for thinking (change them with tool_parser=, reasoning_parser=)",
        calls or "none",
        thinking or "none",
    )
    for setting, name, known in (("tool_parser", calls, CALLS), ("reasoning_parser", thinking, THINKING)):
        if name is not None and name not in known:
            log.warning(
                "the embedded engine can't parse %s=%s and returns such output as plain text; it supports %s. "
                "Choose one of these if the model uses it, or serve the model with vLLM",
                setting,
                name,
                ", ".join(sorted(known)),
            )
    return Formats(CALLS.get(calls or ""), THINKING.get(thinking or ""))
