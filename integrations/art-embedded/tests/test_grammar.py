"""Structured output and forced tool calls: what may be sampled, what is recorded of it, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import jsonschema
import numpy as np
import pytest
import torch
from engine_checks import plain_model, worst_difference
from grammar_walks import STOP, follow, variant, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.errors import UpstreamError
from art_embedded import grammar
from art_embedded.answer import Answer, message
from art_embedded.chat import Chat
from art_embedded.grammar import Grammars
from art_embedded.requests import Schema, Shape, parse
from art_embedded.sampling import Draw, sample

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict | None, **function) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


WEATHER, PICK = tool("get_weather", CITY), tool("pick", DIGIT)
SCHEMAS = {"get_weather": CITY, "pick": DIGIT}
NAMED = {"type": "function", "function": {"name": "pick"}}


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def as_format(schema: dict, strict: bool | None = True) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def ask(**settings) -> dict:
    return {"messages": [{"role": "user", "content": "the weather in Rome"}], "max_tokens": 300, **settings}


def arguments_of(answer: dict) -> list[tuple[str, dict]]:
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def leaves() -> st.SearchStrategy:
    text = st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 4)] * 2
    )
    number = st.builds(
        lambda kind, low, more: {"type": kind, "minimum": low, "maximum": low + more},
        st.sampled_from(["integer"]), st.integers(-50, 50), st.integers(0, 200),
    )  # fmt: skip
    values = st.lists(st.text(max_size=4) | st.integers(-9, 9) | st.booleans() | st.none(), min_size=1, max_size=3)
    choice = st.builds(
        lambda values: {"enum": values}, values.filter(lambda them: len(set(map(repr, them))) == len(them))
    )
    formats = st.sampled_from(["date", "time", "ipv4", "uuid"])
    plain = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}])
    return text | number | choice | plain | st.builds(lambda kind: {"type": "string", "format": kind}, formats)


def composed(inner: st.SearchStrategy) -> st.SearchStrategy:
    array = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    return array | objects(inner) | st.builds(lambda any_of: {"anyOf": any_of}, st.lists(inner, min_size=1, max_size=3))


@st.composite
def objects(draw, inner: st.SearchStrategy) -> dict:
    properties = draw(st.dictionaries(st.text('abé "\\', min_size=1, max_size=3), inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schemas() -> st.SearchStrategy:
    return objects(st.recursive(leaves(), composed, max_leaves=4))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, frozenset({STOP}), len(tokenizer))


@given(schema=schemas(), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_whatever_the_schema_the_answer_is_json_that_it_accepts(schema, seed, grammars, tokenizer):
    ids = walk(grammars, Shape(Schema(schema), {}), seed, len(tokenizer))
    jsonschema.validate(json.loads(Chat(tokenizer, frozenset({STOP})).decode(ids)), schema)


@pytest.mark.system
@given(schema=schemas(), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_whatever_the_parameters_a_forced_call_is_read_as_one_with_valid_arguments(schema, seed, grammars, tokenizer):
    shape = Shape(None, {"f": Schema(schema), "get_é": Schema(schema)}, required=True, several=False)
    text = Chat(tokenizer, frozenset({STOP})).decode(walk(grammars, shape, seed, len(tokenizer)))
    answer = message(Answer(tools=True).feed(text, final=True))
    [(name, arguments)] = arguments_of(answer)
    assert answer["content"] is None and name in shape.calls
    jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("markers", ["special", "plain", "none"])
@pytest.mark.parametrize("several", [True, False])
def test_markers_may_be_special_tokens_or_plain_ones_or_text(markers, several, tokenizer):
    chosen = variant(tokenizer, markers)
    chat, grammars = Chat(chosen, frozenset({STOP})), Grammars(chosen, frozenset({STOP}), len(chosen))
    calls = {name: Schema(schema) for name, schema in SCHEMAS.items()}
    for seed in range(10):
        forced = Shape(None, calls, required=True, several=several)
        text = chat.decode(walk(grammars, forced, seed, len(chosen), spread=2.0))
        found = arguments_of(message(Answer(tools=True).feed(text, final=True)))
        assert len(found) == 1 or (several and found)
        free = Shape(None, calls, several=several)
        said = f'I look.\n<tool_call>\n{{"name": "pick", "arguments": {{"digit": {seed}}}}}\n</tool_call>'
        follow(grammars.begin(free), [*chosen(said)["input_ids"], STOP])
        follow(grammars.begin(free), [*chosen(f"<think>\nPick?</think>\n{said}")["input_ids"], STOP])
        follow(grammars.begin(free), [*chosen("<think>no</think>\nNo call.")["input_ids"], STOP])
        with pytest.raises(AssertionError):
            follow(grammars.begin(free), chosen(said.replace("digit", "other"))["input_ids"])
        if not several:
            with pytest.raises(AssertionError):
                follow(grammars.begin(free), chosen(f"{said}\n{said}")["input_ids"])


@pytest.mark.parametrize("markers", ["special", "plain"])
def test_no_string_in_a_call_has_the_marker_in_it_that_would_end_the_call(markers, tokenizer):
    chosen = variant(tokenizer, markers)
    started = Grammars(chosen, frozenset({STOP}), len(chosen)).begin(Shape(None, {"f": Schema(CITY)}, required=True))
    follow(started, chosen('<tool_call>\n{"name": "f", "arguments": {"city": "a')["input_ids"])
    legal = started.legal(len(chosen))
    assert legal.sum() > 100 and not legal[chosen.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])].any()


REQUESTS = {
    "json_object": ask(response_format={"type": "json_object"}),
    "json_schema": ask(response_format=as_format(CITY)),
    "not strict": ask(response_format=as_format(CITY, strict=None)),
    "required": ask(tools=[WEATHER, PICK], tool_choice="required", parallel_tool_calls=False),
    "several": ask(tools=[WEATHER, PICK], tool_choice="required"),
    "named": ask(tools=[WEATHER, PICK], tool_choice=NAMED),
    "allowed": ask(tools=[WEATHER, PICK], tool_choice=allowed("required", "pick"), parallel_tool_calls=False),
    "strict tool": ask(tools=[WEATHER, tool("pick", DIGIT, strict=True)]),
    "one call": ask(tools=[WEATHER, PICK], parallel_tool_calls=False),
    "both": ask(tools=[WEATHER, PICK], response_format=as_format(CITY)),
    "free": ask(tools=[WEATHER, PICK]),
}


@pytest.mark.smoke
@pytest.mark.system
async def test_requests_of_every_shape_run_together_and_each_is_answered_as_if_it_were_alone(open_engine, save_model):
    engine = await open_engine()
    requests = [{**request, "seed": seed, "n": 2} for seed in range(3) for request in REQUESTS.values()]
    together = await asyncio.gather(*[engine.chat(request) for request in requests])
    model = plain_model(save_model())
    for answer in together:
        assert worst_difference(model, answer) < 1e-4, "logprobs are the model's own, whatever the grammar"
        assert all(np.isfinite(logprob) for choice in answer["choices"] for logprob in choice["token_logprobs"])
    for request, answer in list(zip(requests, together, strict=True))[: len(REQUESTS)]:
        alone = await engine.chat(request)
        assert [c["token_ids"] for c in alone["choices"]] == [c["token_ids"] for c in answer["choices"]]
        assert [c.get("forced") for c in alone["choices"]] == [c.get("forced") for c in answer["choices"]]


@pytest.mark.system
@pytest.mark.parametrize("kind", REQUESTS)
async def test_the_answer_has_the_shape_that_was_asked_for(kind, open_engine):
    engine, request = await open_engine(), REQUESTS[kind]
    ends = []
    for seed in range(6):
        choice = (await engine.chat({**request, "seed": seed}))["choices"][0]
        calls, content = arguments_of(choice["message"]), choice["message"]["content"]
        ends.append(choice["finish_reason"])
        for name, arguments in calls if kind != "free" else ():
            jsonschema.validate(arguments, SCHEMAS[name])
        if choice["finish_reason"] == "length":
            continue
        if "json" in kind or kind == "not strict" or (kind == "both" and not calls):
            jsonschema.validate(json.loads(content), CITY if kind != "json_object" else {"type": "object"})
        if kind in ("required", "several", "named", "allowed"):
            assert calls and content is None
            assert choice["finish_reason"] == ("stop" if kind == "named" else "tool_calls")
        if kind in ("required", "named", "allowed", "one call"):
            assert len(calls) <= 1
        if kind in ("named", "allowed"):
            assert calls[0][0] == "pick"
    assert kind in ("json_object", "free", "strict tool", "one call") or any(end != "length" for end in ends)


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if kind != "free"])
async def test_forced_positions_are_those_where_one_token_was_legal(kind, open_engine):
    engine = await open_engine()
    request = {**REQUESTS[kind], "seed": 4}
    choice = (await engine.chat(request))["choices"][0]
    counts = follow(engine._grammars.begin(parse(request, 100).shape), choice["token_ids"])
    assert choice.get("forced", []) == [place for place, count in enumerate(counts) if count == 1]
    assert choice.get("forced") or kind in ("json_object", "strict tool", "one call")
    chunks = [chunk async for chunk in engine.stream(request)]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [place for part in parts for place in part.get("forced", ())] == choice.get("forced", [])
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert "forced" not in (await engine.chat(ask(seed=4, max_tokens=5)))["choices"][0]


async def test_an_answer_that_is_cut_off_says_so_and_one_with_a_stop_string_ends_there(open_engine):
    engine = await open_engine()
    cut = (await engine.chat({**REQUESTS["named"], "max_tokens": 5}))["choices"][0]
    assert (cut["finish_reason"], len(cut["token_ids"])) == ("length", 5)
    stopped = (await engine.chat({**REQUESTS["json_schema"], "stop": '"unit"'}))["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert '"city"' in stopped["message"]["content"] and "unit" not in stopped["message"]["content"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"response_format": {"type": "grammar"}}, "must be of type 'text', 'json_object' or 'json_schema'"),
        ({"response_format": "json"}, "got 'json'"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": "json_schema"}, "has no schema"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ["pick"]}, "tools": [PICK]}, "names no tool"),
        ({"tool_choice": {"type": "function", "function": "pick"}, "tools": [PICK]}, "has no function name"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tool name 'a b' can't be enforced",
        ),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": ""}}]},
            "tool name '' can't be enforced",
        ),
        (
            {"response_format": as_format({"type": "strnig"})},
            "response_format can't be enforced: Invalid type: strnig",
        ),
        ({"response_format": as_format({"not": {}})}, r'Unimplemented keys: \["not"\]$'),
        ({"response_format": as_format({"type": "string", "pattern": "(?=a)"}, strict=None)}, "look-around"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "sometimes", "tools": [PICK]}, "must be 'none', 'auto', 'required'"),
        ({"tool_choice": allowed("auto", "pick", "fly"), "tools": [PICK]}, "names fly, but the tools are pick"),
        ({"tool_choice": allowed("auto"), "tools": [PICK]}, "names no tool"),
        (
            {"tool_choice": "required", "tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "only tools of type 'function'",
        ),
        ({"tool_choice": "required", "tools": [tool("f", {"type": "string"})]}, "tool f must be .* of type 'object'"),
        (
            {"tool_choice": "required", "tools": [PICK, tool("f", {"not": {}}, strict=True)]},
            "the parameters of the tool f can't be enforced: Unimplemented",
        ),
    ],
)
async def test_a_shape_that_cannot_be_kept_is_a_400_that_says_why(asked, says, open_engine):
    engine = await open_engine()
    for answering in (engine.chat(ask(**asked)), anext(engine.stream(ask(**asked)))):
        with pytest.raises(UpstreamError, match=says) as caught:
            await answering
        assert caught.value.status == 400
    await engine.chat(ask(max_tokens=1))


async def test_what_is_not_strict_is_followed_as_far_as_it_can_be(open_engine):
    engine = await open_engine()
    schema = {**CITY, "not": {"required": ["country"]}}
    answer = await engine.chat(ask(response_format=as_format(schema, strict=False)))
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), CITY)


async def test_without_llguidance_the_request_is_refused_with_what_to_install(open_engine, monkeypatch):
    engine = await open_engine()
    for name in ("llguidance", "llguidance.hf"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UpstreamError, match="pip install llguidance"):
        await engine.chat(REQUESTS["json_schema"])
    await engine.chat(ask(max_tokens=1))


async def test_a_schema_is_compiled_once_and_not_kept_for_ever(open_engine, monkeypatch):
    engine, compiled = await open_engine(), []
    compile_ = Grammars._compile
    monkeypatch.setattr(grammar, "MAX_COMPILED", 2)
    monkeypatch.setattr(Grammars, "_compile", lambda self, *args: compiled.append(1) or compile_(self, *args))
    for kind in ("named", "json_schema", "named", "named", "required", "named", "json_schema"):
        await engine.chat({**REQUESTS[kind], "max_tokens": 1})
    assert (len(compiled), len(engine._grammars._compiled)) == (4, 2)


class Only:
    """A grammar that allows some tokens for ever."""

    error: str | None = None
    possible = True

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def legal(self, width: int) -> np.ndarray:
        return np.isin(np.arange(width), self.tokens)

    def take(self, token: int, *, possible: bool = True) -> None:
        assert token in self.tokens
        self.possible = possible


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 0.0}])
def test_what_the_model_all_but_rules_out_is_sampled_by_its_share_of_what_is_legal(settings):
    logits = torch.full((1, 50), 400.0)
    logits[0, 7], logits[0, 9] = 0.0, -1.0
    draws = [Draw(random=random.Random(seed), grammar=Only(7, 9), **settings) for seed in range(2000)]
    sampled = sample(logits.expand(2000, -1), draws)
    assert all(np.isfinite(token.logprob) and token.logprob < -390 for token in sampled)
    share = sum(token.token == 7 for token in sampled) / 2000
    expected = {0.5: 1 / (1 + np.exp(-2)), 0.0: 1.0}.get(settings.get("temperature", 1.0), 1 / (1 + np.exp(-1)))
    assert share == pytest.approx(expected, abs=0.04)
    assert not any(token.forced for token in sampled)
    [alone] = sample(logits, [Draw(grammar=Only(9), **settings)])
    assert (alone.token, alone.forced) == (9, True)


def test_what_the_model_rules_out_altogether_is_not_recorded():
    logits = torch.zeros(1, 50)
    logits[0, 7] = float("-inf")
    grammar = Only(7)
    sample(logits, [Draw(grammar=grammar)])
    assert not grammar.possible


async def test_an_answer_whose_grammar_cannot_go_on_is_an_error_and_the_others_go_on(open_engine, monkeypatch):
    engine = await open_engine()
    monkeypatch.setattr(grammar.Grammar, "take", fail_at_third)
    running = [engine.chat(request) for request in (ask(max_tokens=30, seed=1), REQUESTS["named"])]
    free, failed = await asyncio.gather(*running, return_exceptions=True)
    assert free["choices"][0]["token_ids"]
    assert isinstance(failed, UpstreamError) and failed.status == 400 and "too complex" in str(failed)
    assert all(occupant is None for occupant in engine._scheduler.rows.occupants)


def fail_at_third(self, token, *, possible=True):
    self.taken = getattr(self, "taken", 0) + 1
    self.error = "too complex" if self.taken == 3 else None
    self._matcher.consume_token(token)


async def test_a_raw_prompt_is_answered_without_the_template(open_engine, tokenizer, save_model):
    engine = await open_engine()
    text = await engine.chat({"prompt": "the weather in Rome is ", "seed": 3, "max_tokens": 8, "n": 2})
    ids = tokenizer("the weather in Rome is ")["input_ids"]
    assert text["prompt_token_ids"] == ids
    listed = await engine.chat({"prompt": ids, "seed": 3, "max_tokens": 8, "n": 2})
    assert [c["token_ids"] for c in listed["choices"]] == [c["token_ids"] for c in text["choices"]]
    assert worst_difference(plain_model(save_model()), text) < 1e-4
    chunks = [chunk async for chunk in engine.stream({"prompt": ids, "seed": 3, "max_tokens": 8})]
    streamed = "".join(part["delta"].get("content", "") for chunk in chunks for part in chunk["choices"])
    assert streamed == text["choices"][0]["message"]["content"]
    shaped = await engine.chat({"prompt": "Rome: ", "response_format": as_format(DIGIT), "max_tokens": 100})
    jsonschema.validate(json.loads(shaped["choices"][0]["message"]["content"]), DIGIT)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": ["a", "b"]}, "a string or a list of token ids"),
        ({"prompt": [1, True]}, "a string or a list of token ids"),
        ({"prompt": [1, 100_000]}, "token id 100000"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": "a", "echo": True}, "can't combine echo with prompt"),
        ({"prompt": "a", "suffix": "b"}, "can't combine suffix with prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "can't combine messages with prompt"),
        ({"prompt": [3] * 600}, "maximum context length"),
    ],
)
async def test_a_raw_prompt_that_cannot_be_answered_is_a_400(asked, says, open_engine):
    engine = await open_engine()
    with pytest.raises(UpstreamError, match=says) as caught:
        await engine.chat(asked)
    assert caught.value.status == 400
