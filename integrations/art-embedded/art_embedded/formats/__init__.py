"""The formats in which models call tools and think, by vLLM's names. What a model speaks is ``art_embedded.parsers``'s to say."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from art_core.config import TrainConfig
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
    """What one model speaks."""

    calls: Format | None = CALLS["hermes"]
    """None: it calls no tools, or in a format that is not read here."""
    thinking: Thinking | None = None
    """None: it does not think, or in a format that is not read here."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen, also where a tokenizer calls them special."""
        return (*(self.calls.markers if self.calls else ()), *(self.thinking or ()))


HERMES = Formats()


def find_formats(model_folder: str, config: TrainConfig) -> Formats:
    """Return the formats that the model speaks or ``config`` names, and log which. Raises ConfigError for unknown names."""
    calls = tool_parser(model_folder, config.tool_parser)
    thinking = reasoning_parser(model_folder, config.reasoning_parser)
    log.info(
        "formats of the model: %s for tool calls, %s for thinking (tool_parser=, reasoning_parser= change them)",
        calls or "none",
        thinking or "none",
    )
    for what, name, known in (("tool_parser", calls, CALLS), ("reasoning_parser", thinking, THINKING)):
        if name is not None and name not in known:
            log.warning(
                "%s=%s is not read by the embedded engine, which answers it as text; it reads %s. "
                "Choose one of these if the model writes it, or serve the model with vLLM",
                what,
                name,
                ", ".join(sorted(known)),
            )
    return Formats(CALLS.get(calls or ""), THINKING.get(thinking or ""))
