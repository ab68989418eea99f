"""Computes which tokens a constrained answer may continue with, using llguidance.

A mask changes what is sampled, but not what is recorded: logprobs stay those of the unmasked distribution, and positions with
one legal token are reported as forced (for the effect on training see "Grammars" in docs/design.md). ``lark.py`` writes the
grammars. llguidance is imported at the first request that needs it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from art_embedded.formats import HERMES, Formats
from art_embedded.formats.thinking import Place
from art_embedded.lark import Lark, json_rule
from art_embedded.requests import Shape, refuse

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Number of compiled grammars that are cached."""
STUCK = "the answer can't continue under the request's grammar"


class Grammar:
    """The state of one answer in its grammar. For the decode thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((1, (vocab_size + 31) // 32), np.int32)
        self.error: str | None = None
        """Why the answer can't continue; None while it can."""

    def copy(self) -> Grammar:
        """Return a copy of this state for another answer."""
        return Grammar(self._matcher.deep_copy(), 32 * self._bits.shape[1])

    def legal(self, width: int) -> np.ndarray:
        """Return (width,) bool: which tokens may come next; all if there is an ``error``."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        legal = np.unpackbits(self._bits.view(np.uint8)[0], count=width, bitorder="little").view(bool)
        if self._matcher.is_error():
            self.error = f"{STUCK}: {_reason(self._matcher)}"
        elif not legal.any():
            self.error = f"{STUCK}: the model has no token for the required text"
        return legal if self.error is None else np.ones(width, bool)

    def take(self, token: int, *, possible: bool = True) -> None:
        """Advance by a legal token. ``possible=False``: the model gives it, and so every legal token, zero probability."""
        if not possible:
            self.error = f"{STUCK}: the model gives every legal token zero probability"
        elif self.error is None and not self._matcher.consume_token(token):
            self.error = f"{STUCK}: {_reason(self._matcher)}"


class Grammars:
    """Compiles and caches grammars for one tokenizer. ``begin`` is thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        vocab_size: int,
        formats: Formats = HERMES,
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._formats = formats
        self._compiler: LLTokenizer | None = None
        self._lark: Lark | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, shape: Shape, place: Place = "after") -> Grammar:
        """Return the initial grammar state of an answer that begins at ``place``.

        Raises UpstreamError 400 if the model's call format or llguidance doesn't support the shape.
        """
        with self._lock:
            if self._lark is None:
                self._lark = self._make_lark()
            text = self._lark.describe(shape, place)
            if text not in self._compiled:
                self._compiled[text] = self._compile(text, shape)
            self._compiled.move_to_end(text)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return self._compiled[text].copy()

    def _compile(self, text: str, shape: Shape) -> Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._compiler, LLMatcher.grammar_from_lark(text), log_level=0)
        if matcher.is_error():
            raise refuse(self._complaint(shape, matcher))
        return Grammar(matcher, self._vocab_size)

    def _make_lark(self) -> Lark:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise refuse(
                "response_format, a forced tool_choice, strict tools and parallel_tool_calls=false need llguidance, which is "
                f"not installed ({error}); run: pip install llguidance"
            ) from error
        try:
            compiler = from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._stop_ids) or None
            )
        except ValueError as error:
            raise refuse(f"llguidance doesn't support the model's tokenizer: {error}; use another model") from error
        special = {
            text: token
            for text, token in self._tokenizer.get_added_vocab().items()
            if token not in self._stop_ids and compiler.is_special_token(token)
        }
        self._compiler = compiler
        return Lark(self._formats, self._tokenizer.get_vocab(), special)

    def _complaint(self, shape: Shape, whole: LLMatcher) -> str:
        """Return the message about the schema that llguidance rejects, and why."""
        from llguidance import LLMatcher

        schemas = {f"the parameters of the tool {name}": schema for name, schema in shape.calls.items()}
        if shape.content is not None:
            schemas["the schema of response_format"] = shape.content
        for source, schema in schemas.items():
            alone = LLMatcher(self._compiler, LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}"), log_level=0)
            if alone.is_error():
                return f"{source} can't be enforced: {_reason(alone)}"
        return f"the request's tools and schemas can't be enforced together: {_reason(whole)}"


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's message without its state and positions in the grammar, which users never see."""
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", matcher.get_error())
    return re.split(r"\n +\d+ \| |\n<state>", message)[0]
