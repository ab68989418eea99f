"""Tool calls in every format that the engine reads, and thinking: whole, cut anywhere, malformed, and none at all."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from call_formats import BEGIN, WRITTEN, Calls
from hypothesis import given, settings
from hypothesis import strategies as st

from art_embedded.answer import Answer, message
from art_embedded.formats import CALLS, Formats
from art_embedded.formats.thinking import Thinking
from fuzz.targets import tool_calls

SCHEMAS = {name: tool_calls.SCHEMAS["f"] for name in ("get_weather", "f", "a_1")}
MARKERS = ("<", "[TOOL", "|>", "functools", "｜>")
TEXTS = st.text(max_size=12).filter(lambda text: not any(marker in text for marker in MARKERS))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-99, 10**12) | st.none(),
        "share": FLOATS | st.integers(-9, 9),
        "flag": st.booleans(),
        "items": st.lists(TEXTS | st.integers() | st.booleans(), max_size=3),
        "inner": st.dictionaries(TEXTS, TEXTS | FLOATS | st.none() | st.lists(st.integers(), max_size=2), max_size=2),
    },
)
CALLS_SAID = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)


def reading(name: str | None, **settings) -> Answer:
    formats = Formats(CALLS[name] if name else None, settings.pop("thinking", None))
    return Answer(tools=True, formats=formats, schemas=SCHEMAS, **settings)


def whole(name: str | None, text: str, **settings) -> dict:
    return message(reading(name, **settings).feed(text, final=True))


def streamed(name: str | None, text: str, cuts: list[int], **settings) -> dict:
    answer = reading(name, **settings)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [delta for a, b in pairwise(edges) for delta in answer.feed(text[a:b])]
    return message([*deltas, *answer.feed("", final=True)])


def calls_of(answer: dict) -> Calls:
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def same(streamed: dict, whole: dict) -> bool:
    said = ("content", "reasoning_content")
    return calls_of(streamed) == calls_of(whole) and all(streamed.get(key) == whole.get(key) for key in said)


@pytest.mark.parametrize("form", WRITTEN)
@given(calls=CALLS_SAID, before=TEXTS, cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=25, deadline=None)
def test_calls_are_read_as_they_were_written_wherever_they_are_cut(form, calls, before, cuts):
    name, write = WRITTEN[form]
    before = "" if name in BEGIN or before.endswith("\n") else before
    text = before + write(calls)
    answer = whole(name, text)
    assert calls_of(answer) == calls
    assert answer["content"] == (before or None)
    assert same(streamed(name, text, cuts), answer)
    assert same(streamed(name, text, list(range(len(text)))), answer)


@pytest.mark.parametrize("name", sorted(CALLS))
@given(text=st.text('ab {}[]()\n"<>|;=,.', max_size=40) | st.text(max_size=40), cuts=st.lists(st.integers(0, 40)))
@settings(max_examples=25, deadline=None)
def test_text_without_calls_comes_back_unchanged(name, text, cuts):
    assert whole(name, text) == {"role": "assistant", "content": text}
    assert streamed(name, text, cuts) == {"role": "assistant", "content": text}


PIECES = [
    "\n", " ", "text", "; ", "STOP", "ST", "[1]", "<", '{"name": "f"}', '{"name": "f", ', "[f(", ")]", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>", "[TOOL_CALLS]", "[ARGS]",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|python_tag|>",
]  # fmt: skip


@pytest.mark.parametrize("form", WRITTEN)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_whatever_is_said_a_stream_says_the_same_as_the_whole_answer(form, data):
    name, write = WRITTEN[form]
    written = [write([("f", {"text": "a"})]), write([("f", {}), ("a_1", {"count": 3})])]
    text = "".join(data.draw(st.lists(st.sampled_from([*PIECES, *written]), max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=8))
    said = {
        "stop": ("STOP",),
        "thinking": Thinking(),
        "place": data.draw(st.sampled_from(["before", "inside", "after"])),
    }
    assert same(streamed(name, text, cuts, **said), whole(name, text, **said))


@pytest.mark.parametrize(
    ("form", "broken"),
    [
        ("hermes", ('"name"', '"nam"')),
        ("llama3_json", ('"parameters"', '"parameter"')),
        ("kimi_k2", ("functions.f:0", "functions.f")),
        ("kimi_k2", ('{"text": "a"}', '{"text": "a"')),
        ("deepseek_v31", ("f<｜tool▁sep｜>", "f")),
        ("mistral", ('"arguments"', '"argument"')),
        ("mistral, newer", ('{"text": "a"}', '{"text": a}')),
        ("pythonic", ("text='a'", "'a'")),
        ("pythonic", ("'a'", "open('a')")),
        ("pythonic", ("'a'", "f'{a}'")),
        ("qwen3_coder", ("</parameter>\n", "\n")),
        ("qwen3_coder", ("</function>\n", "\n")),
    ],
)
def test_a_malformed_call_stays_text(form, broken):
    name, write = WRITTEN[form]
    good = write([("f", {"text": "a"})])
    assert broken[0] in good and calls_of(whole(name, good))
    text = good.replace(*broken)
    answer = whole(name, text)
    assert not calls_of(answer)
    assert answer["content"].startswith(text[:20])


@pytest.mark.parametrize("form", [form for form in WRITTEN if form not in ("mistral", "phi4_mini_json", "pythonic")])
def test_each_call_is_streamed_when_it_is_complete_and_text_at_once(form):
    name, write = WRITTEN[form]
    answer = reading(name)
    if name not in BEGIN:
        assert answer.feed("I look") == [{"content": "I look"}]
    text = write([("f", {}), ("a_1", {})])
    seen = [place for place, letter in enumerate(text) if answer.feed(letter)]
    assert seen
    assert "a_1" not in text[: seen[0]] or name == "llama4_pythonic"


@pytest.mark.parametrize("name", BEGIN)
def test_white_space_before_a_call_that_begins_the_answer_is_no_text(name):
    text = "\n" + WRITTEN[name][1]([("f", {})])
    assert calls_of(whole(name, text)) == calls_of(streamed(name, text, [1, 2])) == [("f", {})]
    thought = whole(name, "Hot?</think>\n\n" + text, thinking=Thinking(), place="inside")
    assert calls_of(thought) == [("f", {})] and not thought["content"]


def test_a_stop_string_ends_thinking_wherever_a_stream_is_cut():
    said = {"thinking": Thinking(), "place": "inside", "stop": ("STOP",)}
    for cut in range(9):
        assert streamed("hermes", "Hot? STOP</think>b", [cut], **said)["reasoning_content"] == "Hot? "


def test_thinking_is_streamed_as_it_comes_but_for_what_may_be_its_end():
    answer = reading("hermes", thinking=Thinking(), place="before")
    fed = ["\n<thi", "nk>Hot", "?</th", "ink>", "\n\n", "Yes"]
    deltas = [answer.feed(text) for text in fed]
    thought = [{"reasoning_content": "Hot"}], [{"reasoning_content": "?"}]
    assert deltas == [[], thought[0], thought[1], [], [], [{"content": "\n\nYes"}]]


def test_a_list_in_brackets_that_has_ended_and_is_no_call_is_content_at_once():
    answer = reading("pythonic")
    assert answer.feed("[see (x)]") == [{"content": "[see (x)]"}]
    assert calls_of(whole("pythonic", "[f(text=\"a)]'\", items=[')]', {'a': [1]}])]")) == [
        ("f", {"text": "a)]'", "items": [")]", {"a": [1]}]})
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f(text='" + ")] " * 20_000),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]" + " " * 200_000 + "]"),
        ("llama3_json", "{}" + " " * 200_000 + "x"),
    ],
)
def test_long_nonsense_is_read_in_time_that_grows_with_its_length(name, text):
    """Else this test takes minutes."""
    assert whole(name, text)["content"] == text


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_half_a_character_in_a_call_s_name_or_identifier_does_not_reach_the_answer(name):
    write = WRITTEN[name][1]
    text = write([("f", {})])
    half = whole(name, text.replace('"f"', r'"\ud800"'))
    assert half["content"] and not calls_of(half)
    named = whole(name, text.replace('"name"', r'"id": "\ud800", "name"'))
    assert calls_of(named) == [("f", {})]
    assert str(named).encode()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["text"]},
        *({"properties": {"text": {key: 5}}} for key in ("anyOf", "$ref", "type", "enum")),
        {"properties": {"text": {"type": {"a": 1}}}},
        {"properties": {"text": {"type": [["string"]]}}},
    ],
)
def test_a_schema_that_is_none_does_not_keep_a_call_from_being_read(schema):
    answer = Answer(tools=True, formats=Formats(CALLS["qwen3_coder"]), schemas={"f": schema})
    text = WRITTEN["qwen3_coder"][1]([("f", {"text": "1"})])
    assert calls_of(message(answer.feed(text, final=True))) == [("f", {"text": "1"})]


@pytest.mark.parametrize(
    ("key", "written", "read"), [("flag", "True", True), ("count", "None", None), ("text", "True", "True")]
)
def test_python_s_constants_between_tags_are_those_of_json_where_the_schema_has_no_text(key, written, read):
    text = WRITTEN["qwen3_coder"][1]([("f", {key: "VALUE"})]).replace("VALUE", written)
    assert calls_of(whole("qwen3_coder", text)) == [("f", {key: read})]


def test_a_text_between_tags_may_say_an_end_of_a_parameter():
    given = [("f", {"text": "a</parameter>b"})]
    assert calls_of(whole("qwen3_coder", WRITTEN["qwen3_coder"][1](given))) == given
