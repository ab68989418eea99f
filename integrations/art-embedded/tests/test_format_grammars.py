"""Forced calls in every format that is read, and thinking before what is forced."""

from __future__ import annotations

import json

import jsonschema
import pytest
from call_formats import BEGIN, WRITTEN
from grammar_walks import STOP, follow, variant, walk

from art_core.errors import UpstreamError
from art_embedded.answer import Answer, message
from art_embedded.chat import Chat
from art_embedded.formats import CALLS, Formats
from art_embedded.formats.thinking import THINKING
from art_embedded.grammar import Grammars
from art_embedded.requests import Schema, Shape

CITY = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "city": {"type": "string", "maxLength": 6},
        "days": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
}
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
}
SCHEMAS = {"get_weather": CITY, "pick": {**DIGIT, "additionalProperties": False}}
SHAPED = {name: Schema(schema) for name, schema in SCHEMAS.items()}


class Setting:
    """A format with a tokenizer whose markers are special tokens, plain ones, or text."""

    def __init__(self, tokenizer, name: str, markers: str, thinking: str | None = None) -> None:
        self.formats = Formats(CALLS[name], THINKING.get(thinking or ""))
        self.tokenizer = variant(tokenizer, markers, self.formats.markers)
        self.width = len(self.tokenizer)
        self.chat = Chat(self.tokenizer, frozenset({STOP}), self.formats)
        self.grammars = Grammars(self.tokenizer, frozenset({STOP}), self.width, self.formats)

    def said(self, shape: Shape, seed: int, place: str = "after") -> dict:
        text = self.chat.decode(walk(self.grammars, shape, seed, self.width, 2.0, place=place))
        answer = Answer(tools=True, formats=self.formats, place=place, schemas=SCHEMAS)
        return message(answer.feed(text, final=True))

    def allows(self, shape: Shape, text: str, place: str = "after") -> bool:
        try:
            follow(self.grammars.begin(shape, place), [*self.tokenizer(text)["input_ids"], STOP])
        except AssertionError:
            return False
        return True


@pytest.fixture
def setting(tokenizer):
    return lambda *args: Setting(tokenizer, *args)


def calls_of(answer: dict) -> list[tuple[str, dict]]:
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("markers", ["special", "plain", "none"])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_forced_call_is_read_as_one_with_valid_arguments(name, several, markers, setting):
    chosen = setting(name, markers)
    for seed in range(4):
        answer = chosen.said(Shape(None, SHAPED, required=True, several=several), seed)
        found = calls_of(answer)
        assert len(found) == 1 or (several and found)
        assert answer["content"] is None
        for called, arguments in found:
            jsonschema.validate(arguments, SCHEMAS[called])


FREE = [form for form in WRITTEN if form not in ("mistral", "mistral, named", "mistral, newer")]


@pytest.mark.parametrize("markers", ["special", "plain", "none"])
@pytest.mark.parametrize("form", FREE)
def test_free_text_may_have_calls_in_it_that_the_schemas_accept(form, markers, setting):
    name, write = WRITTEN[form]
    if "tag" in form or form == "llama4_pythonic":
        return
    chosen, before = setting(name, markers), "" if name in BEGIN else "I look."
    good, two = write([("pick", {"digit": 3})]), write([("pick", {"digit": 3})] * 2)
    for several in (True, False):
        free = Shape(None, SHAPED, several=several)
        assert chosen.allows(free, "No call. {} [1]")
        assert chosen.allows(free, before + good)
        assert not chosen.allows(free, before + good.replace("digit", "other"))
        assert chosen.allows(free, before + two) == several
        assert not chosen.allows(Shape(None, SHAPED, required=True, several=several), "No call.")
        assert chosen.allows(Shape(None, SHAPED, required=True, several=several), good)


@pytest.mark.parametrize("space", [" ", ""])
def test_a_forced_list_of_mistral_s_may_have_the_space_that_some_templates_write(space, setting):
    text = WRITTEN["mistral"][1]([("pick", {"digit": 3})] * 2).replace("] [", f"]{space}[")
    assert setting("mistral", "none").allows(Shape(None, SHAPED, required=True), text)


@pytest.mark.parametrize("markers", ["special", "plain", "none"])
@pytest.mark.parametrize("thinking", ["qwen3", "mistral"])
def test_thinking_comes_before_what_is_forced(thinking, markers, setting):
    chosen = setting("hermes", markers, thinking)
    opening, closing = THINKING[thinking]
    forced, shaped = Shape(None, SHAPED, required=True), Shape(Schema(CITY), {})
    call, city = WRITTEN["hermes"][1]([("pick", {"digit": 3})]), '{"city": "Rome"}'
    for shape, text in ((forced, call), (shaped, city)):
        assert chosen.allows(shape, f"{opening}\nWhich? [1] {{\n{closing}\n\n{text}", "before")
        assert chosen.allows(shape, text, "before")
        assert chosen.allows(shape, f"Which?\n{closing}\n\n{text}", "inside")
        assert not chosen.allows(shape, text, "inside")
        assert chosen.allows(shape, text, "after")
        assert not chosen.allows(shape, f"{opening}Which?{closing}{text}", "after")
        assert not chosen.allows(shape, f"Which?{closing} well {text}", "inside")
    for seed in range(3 if markers != "none" else 0):  # a model that knows nothing does not spell a marker by chance
        assert calls_of(chosen.said(forced, seed, "inside"))
        jsonschema.validate(json.loads(chosen.said(shaped, seed, "inside")["content"]), CITY)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("pythonic", {"properties": {"from": {"type": "string"}}}, "'from' isn't a valid name"),
        ("pythonic", {"anyOf": [{}]}, "use anyOf"),
        ("pythonic", {"properties": ["a"]}, "aren't a JSON schema"),
        ("qwen3_coder", {"properties": {"a": {}}, "required": 1}, "aren't a JSON schema"),
        ("qwen3_coder", {"properties": {"a>b": {}}}, "'a>b' of the tool f can't be written as a tag"),
        ("qwen3_coder", {"additionalProperties": True}, "use additionalProperties"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "has a format"),
    ],
)
def test_what_a_format_cannot_say_is_a_400_that_says_why(name, parameters, says, setting):
    shape = Shape(None, {"f": Schema({"type": "object", **parameters})}, required=True)
    with pytest.raises(UpstreamError, match=says) as caught:
        setting(name, "special").grammars.begin(shape)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"pythonic", "llama4_pythonic"}))
def test_a_tool_may_have_a_name_like_those_of_servers_of_tools(name, setting):
    shape = Shape(None, {"files/v1.2:read-é": SHAPED["pick"]}, required=True, several=False)
    [(called, _)] = calls_of(setting(name, "special").said(shape, 1))
    assert called == "files/v1.2:read-é"


def test_without_a_format_a_call_cannot_be_demanded_and_there_is_never_more_than_one(tokenizer):
    grammars = Grammars(tokenizer, frozenset({STOP}), len(tokenizer), Formats(None))
    with pytest.raises(UpstreamError, match="tool_parser="):
        grammars.begin(Shape(None, SHAPED, required=True))
    follow(grammars.begin(Shape(None, SHAPED, several=False)), [*tokenizer("No call. {}")["input_ids"], STOP])
    follow(grammars.begin(Shape(Schema(CITY), SHAPED)), [*tokenizer('{"city": "Rome"}')["input_ids"], STOP])


@pytest.mark.parametrize("end", ["</parameter>", "</function>"])
def test_a_forced_text_between_tags_cannot_say_an_end_of_tags(end, setting):
    chosen = setting("qwen3_coder", "special")
    shape = Shape(None, {"f": Schema({"type": "object", "properties": {"a": {"type": "string"}}})}, required=True)
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx{}y\n</parameter>\n</function>\n</tool_call>"
    assert chosen.allows(shape, text.format("<"))
    assert not chosen.allows(shape, text.format(end))


UNIT = {"$defs": {"Unit": {"enum": ["C", "F"]}}}


@pytest.mark.parametrize(
    ("described", "good", "bad"),
    [
        ({"$ref": "#/$defs/Unit"}, "F", "K"),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, "null", "K"),
        ({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}, "null", "too long"),
        ({"type": ["integer", "null"]}, "12", "a"),
        ({"type": "string", "minLength": 2}, "two\nlines", "a"),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', "{}"),
    ],
)
def test_parameters_between_tags_are_text_or_json_as_their_schema_says(described, good, bad, setting):
    chosen = setting("qwen3_coder", "special")
    schema = {"type": "object", "properties": {"a": described, "b": {"type": "string"}}, "required": ["a"], **UNIT}
    shape = Shape(None, {"f": Schema(schema)}, required=True)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert chosen.allows(shape, text.format(good))
    assert not chosen.allows(shape, text.format(bad))
    answer = Answer(tools=True, formats=chosen.formats, schemas={"f": schema})
    [(_, arguments)] = calls_of(message(answer.feed(text.format(good), final=True)))
    jsonschema.validate(arguments, schema)
