"""The shape that an answer must have -> its grammar, in llguidance's variant of Lark. Knows nothing about compiling one."""

from __future__ import annotations

import json
from collections.abc import Mapping

from art_embedded.formats import Formats
from art_embedded.formats.call import pattern
from art_embedded.formats.thinking import Place
from art_embedded.requests import Schema, Shape, refuse

WHITESPACE = r" |\n {0,24}"
"""Between the parts of JSON: a space, or a line break with an indentation. Without a bound a weak policy wanders off in it,
as it may with llguidance before 1.9, which repeats it."""
ANY = "(?s:.*)"


class Lark:
    """Writes grammars for one tokenizer and the formats that its model speaks."""

    def __init__(self, formats: Formats, vocabulary: Mapping[str, int], special: Mapping[str, int]) -> None:
        self._formats, self._vocabulary, self._special = formats, vocabulary, special
        """``special``: tokens that llguidance takes for no part of any text, but those that end an answer."""

    def marker(self, text: str) -> str:
        return f"<[{self._vocabulary[text]}]>" if text in self._vocabulary else self.text(text)

    def has(self, text: str) -> bool:
        return text in self._vocabulary

    def text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Schema) -> str:
        return json_rule(schema)

    def describe(self, shape: Shape, place: Place) -> str:
        """Return the grammar. Raises UpstreamError 400 where the model's format cannot have the shape."""
        rules = self._calls(shape) if shape.calls else []
        if shape.required:
            said = "calls"
        elif shape.content is not None:
            said = "content | calls" if rules else "content"
            rules.append(f"content: {self.json(shape.content)}")
        else:
            said = "free"
            rules += self._free(shape)
        return "\n".join(["%llguidance {}", *self._start(place), f"said: {said}", *rules])

    def _start(self, place: Place) -> list[str]:
        """Return the rules of an answer as a whole: ``said``, after thinking where there may be some."""
        thinking = self._formats.thinking
        if thinking is None or place == "after":
            return ["start: said"]
        opening, closing = map(self.marker, thinking)
        start = "start: thought said" if place == "inside" else f"start: said | {opening} thought said"
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
        """Return the rules of ``calls``, and of the ``body`` that follows their opening."""
        form = self._formats.calls
        if form is None and shape.required:
            raise refuse(
                "the embedded engine knows no format in which this model calls tools, so a call cannot be demanded; "
                "choose one with tool_parser=, or leave out tool_choice"
            )
        if form is None:
            return []
        free = not shape.required and shape.content is None
        several = shape.several and (form.one_batch or not free)
        opening = f"{self.marker(form.openings[0])} " if form.openings else ""
        return [f"calls: {opening}body", *form.rules(shape.calls, several, self)]

    def _free(self, shape: Shape) -> list[str]:
        """Return the rules of text that may have calls in it, with the opening of one there only."""
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
        """Return the special tokens but those of some texts; empty where there are none."""
        tokens = sorted(token for text, token in self._special.items() if text not in without)
        return f"<[{','.join(map(str, tokens))}]>" if tokens else ""


def json_rule(schema: Schema) -> str:
    """Return JSON that ``schema`` accepts, as a part of a rule."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not schema.strict}
    return "%json " + json.dumps(schema.schema | {"x-guidance": options}, ensure_ascii=False)
