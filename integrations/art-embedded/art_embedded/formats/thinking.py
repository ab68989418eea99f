"""The formats of a model's thinking, which two markers separate from its answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["before", "inside", "after"]
"""Where an answer begins: before possible thinking, inside thinking, or after it."""


class Thinking(NamedTuple):
    """The markers around thinking, which comes at the start of an answer."""

    opening: str = "<think>"
    closing: str = "</think>"

    def place(self, prompt: str) -> Place:
        """Return where an answer to ``prompt`` begins: a template may open thinking, or open and close it."""
        end = prompt.rstrip()
        return "inside" if end.endswith(self.opening) else "after" if end.endswith(self.closing) else "before"


WITH_TAGS = (
    "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3",
    "qwen3", "step3", "step3p5",
)  # fmt: skip
THINKING = {name: Thinking() for name in WITH_TAGS} | {
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
}
"""vLLM's parser name -> markers."""
