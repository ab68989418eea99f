"""Writes the grammar of a constrained answer in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping

from art_embedded.formats import Formats
from art_embedded.formats.call import pattern
from art_embedded.formats.thinking import Place
from art_embedded.requests import Schema, Shape, refuse

WHITESPACE = r" |\n {0,24}"
"""Whitespace in JSON: a space, or a line break with indentation. It is bounded because a weak policy could generate it
endlessly. With llguidance before 1.9, which repeats the pattern, it still could."""
ANY = "(?s:.*)"


class Lark:
    """Writes grammars for one tokenizer and its model's formats."""

    def __init__(self, formats: Formats, vocabulary: Mapping[str, int], special: Mapping[str, int]) -> None:
        self._formats, self._vocabulary, self._special = formats, vocabulary, special
        """``special``: tokens that llguidance never matches as text, except those that end an answer."""

    def marker(self, text: str) -> str:
        return f"<[{self._vocabulary[text]}]>" if text in self._vocabulary else self.text(text)

    def has(self, text: str) -> bool:
        return text in self._vocabulary

    def text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Schema) -> str:
        return json_rule(schema)

    def describe(self, shape: Shape, place: Place) -> str:
        """Return the grammar. Raises UpstreamError 400 if the model's format doesn't support the shape."""
        rules = self._calls(shape) if shape.calls else []
        if shape.required:
            body = "calls"
        elif shape.content is not None:
            body = "content | calls" if rules else "content"
            rules.append(f"content: {self.json(shape.content)}")
        else:
            body = "free"
            rules += self._free(shape)
        return "\n".join(["%llguidance {}", *self._start(place), f"answer: {body}", *rules])

    def _start(self, place: Place) -> list[str]:
        """Return the top rules of an answer: ``answer``, with thinking before it if there may be some."""
        thinking = self._formats.thinking
        if thinking is None or place == "after":
            return ["start: answer"]
        opening, closing = map(self.marker, thinking)
        start = "start: thought answer" if place == "inside" else f"start: answer | {opening} thought answer"
        others = self._tokens(thinking)
        if closing.startswith("<["):
            rules = [f"THOUGHT: /{ANY}/", f"last_thought: THOUGHT {closing}"]
        else:
            rules = [f"THOUGHT: /{ANY}/ & ~/{ANY}{pattern(thinking.closing)}{ANY}/"]
            rules.append(f"last_thought[lazy]: /{ANY}/ {closing}")
        between = "(THOUGHT other_thought)* " if others else ""
        rules += [f"thought: {between}last_thought GAP", "GAP: /\\n{0,2}/"]
        return [start, *rules, *([f"other_thought: {others}"] if others else [])]

    def _calls(self, shape: Shape) -> list[str]:
        """Return the rules of ``calls`` and of ``body``, which follows their opening."""
        form = self._formats.calls
        if form is None and shape.required:
            raise refuse(
                "the embedded engine doesn't know this model's format of tool calls, so it can't force a call; "
                "choose a format with tool_parser=, or omit tool_choice"
            )
        if form is None:
            return []
        free = not shape.required and shape.content is None
        several = shape.several and (form.one_batch or not free)
        opening = f"{self.marker(form.openings[0])} " if form.openings else ""
        return [f"calls: {opening}body", *form.rules(shape.calls, several, self)]

    def _free(self, shape: Shape) -> list[str]:
        """Return the rules of text that may contain calls; an opening may only start a call."""
        form = self._formats.calls
        others = self._tokens(form.markers if form else ())
        rules = [f"other: {others}", "before: (TEXT other)*"] if others else ['before: ""']
        if form is None:
            return [*rules, f"TEXT: /{ANY}/", "free: before TEXT"]
        if not form.openings:
            rules += [f"HEAD: /{ANY}/ & ~/{form.begins}{ANY}/", f"TEXT: /{ANY}/"]
            return [*rules, f"free: calls | HEAD {'| HEAD other before TEXT' if others else ''}"]
        excluded = "|".join(map(pattern, form.openings))
        rules += [f"TEXT: /{ANY}/ & ~/{ANY}({excluded}){ANY}/", "text: before TEXT"]
        rules.append("free: with_call* text" if shape.several and not form.one_batch else "free: text | with_call")
        if self.marker(form.openings[0]).startswith("<["):
            return [*rules, "with_call: text calls"]
        return [*rules, "with_call: before lead body", f"lead[lazy]: /{ANY}/ {self.marker(form.openings[0])}"]

    def _tokens(self, without: tuple[str, ...]) -> str:
        """Return the special tokens, except those of the texts ``without``, as a set of tokens; empty if there are none."""
        tokens = sorted(token for text, token in self._special.items() if text not in without)
        return f"<[{','.join(map(str, tokens))}]>" if tokens else ""


def json_rule(schema: Schema) -> str:
    """Return the part of a rule that matches JSON accepted by ``schema``."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not schema.strict}
    return "%json " + json.dumps(schema.schema | {"x-guidance": options}, ensure_ascii=False)
