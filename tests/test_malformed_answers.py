"""Malformed answers of upstreams, field by field, and JSON that can't be written again."""

import copy
import json
import math

import pytest

from art_core.capture.shape import ANSWER, MAX_DEPTH, NUMBER, Shape, check_answer, read_object
from art_core.errors import UpstreamError

TOKENS = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "y", "logprob": -1}]}]}
TOOL_CALL = {"id": "c1", "type": "function", "index": 0, "function": {"name": "find", "arguments": "{}"}}
MESSAGE = {
    "role": "assistant", "content": "x", "reasoning_content": "r", "reasoning": "r", "refusal": "no", "tool_calls": [TOOL_CALL],
}  # fmt: skip
WHOLE = {
    "choices": [
        {
            "index": 0, "message": MESSAGE, "delta": MESSAGE, "finish_reason": "stop", "token_ids": [1], "token_logprobs": [-0.5],
            "forced": [False], "logprobs": TOKENS,
        }
    ],
    "usage": {
        "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    },
    "logprobs_temperature": 0.5,
}  # fmt: skip
CHOICES = ("choices", 0)


def fields_of(shape, place, above=()):
    """Yield where each field of an answer is, its name, its kind, and what an error calls its object."""
    fields = {"name": str, "arguments": str, "new": str} if shape.other_fields else shape.fields
    for name, kind in fields.items():
        inner, at = None, (*place, name)
        if isinstance(kind, Shape):
            kind, inner = dict, kind
        elif isinstance(kind, list):
            kind, inner, at = list, kind[0], (*at, 0)
        yield place, name, kind, shape.name
        if inner and inner not in above:
            yield from fields_of(inner, at, (*above, shape))


ALL_FIELDS = list(fields_of(ANSWER, ()))
FIELDS = [it for it in ALL_FIELDS if not isinstance(it[2], range)]
PLACES = list(dict.fromkeys(place for place, *_ in ALL_FIELDS))
"""Where the objects of an answer are."""
ONE_OF_EACH = ["a-key", 3, [3], {"a": "b"}]


def changed(place, **fields):
    """Return the whole answer with these fields in the object at ``place``."""
    answer = copy.deepcopy(WHOLE)
    it = answer
    for name in place:
        it = it[name]
    it.update(fields)
    return answer


def refused(answer):
    with pytest.raises(UpstreamError) as failure:
        check_answer(answer)
    assert failure.value.status == 502
    start, _, rest = str(failure.value).partition(": ")
    assert start == "the upstream's answer isn't a completion"
    return rest


def test_full_and_empty_answers_are_completions():
    check_answer(WHOLE)
    check_answer({})
    check_answer({"choices": [], "usage": {}})
    check_answer({"choices": [{"delta": {}, "logprobs": {}}, {"message": {}}], "usage": None})


@pytest.mark.parametrize(("place", "name", "kind", "what"), FIELDS)
def test_a_field_of_another_kind_is_named_and_its_text_is_not_quoted(place, name, kind, what):
    for value in ONE_OF_EACH:
        if isinstance(value, kind):
            continue
        shown = "3" if value == 3 else f"of type {type(value).__name__}"
        assert refused(changed(place, **{name: value})) == f"{name!r} of {what} is {shown}"


@pytest.mark.parametrize(("place", "name", "kind", "what"), FIELDS)
def test_a_field_may_be_null_except_in_tokens(place, name, kind, what):
    answer = changed(place, **{name: None})
    if name in ("token", "logprob"):
        assert refused(answer) == "a token of logprobs is of type dict"
    elif name == "message":
        assert refused(answer) == "'message' of a choice is None"
    else:
        check_answer(answer)


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, name, kind, _ in FIELDS if kind == NUMBER])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(place, name, value):
    assert refused(changed(place, **{name: value})).endswith(f"is {value!r}")


@pytest.mark.parametrize("place", PLACES[1:])
def test_objects_must_be_objects(place):
    *parents, last = place
    answer = changed(())
    it = answer
    for name in parents:
        it = it[name]
    it[last] = 3
    assert refused(answer).endswith("is 3")


@pytest.mark.parametrize(
    ("place", "end", "what"),
    [(CHOICES, 2**31, "a choice"), ((*CHOICES, "message", "tool_calls", 0), 1024, "a tool call")],
)
def test_an_index_is_an_integer_within_its_limit(place, end, what):
    for index in (0, 1, end - 1):
        check_answer(changed(place, index=index))
    for index in (-1, end, 1.0, None):
        assert refused(changed(place, index=index)) == f"'index' of {what} is {index!r}"
    for index in ("0", [0]):
        assert refused(changed(place, index=index)) == f"'index' of {what} is of type {type(index).__name__}"
    assert refused(changed(place, index=True)) == f"'index' of {what} is True"


@pytest.mark.parametrize(("answer", "shown"), [(3, "3"), (None, "None"), ([], "of type list"), ("x", "of type str")])
def test_an_answer_must_be_an_object(answer, shown):
    assert refused(answer) == f"an answer is {shown}"


def test_unread_fields_may_be_anything():
    check_answer(changed((), id=3, model=[], choices=[{"message": {"audio": 3}, "stop_reason": 5}]))


def nested(depth):
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_the_deepest_writable_json_is_accepted():
    assert read_object(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    for text in (nested(MAX_DEPTH + 1), b'{"a":' * 255 + b"1" + b"}" * 255):
        with pytest.raises(ValueError, match="^is nested deeper than 254 levels$"):
            read_object(text)


def test_many_sibling_lists_are_not_deep():
    assert read_object(b'{"a":[' + b"[]," * 1000 + b"{}]}") == {"a": [[]] * 1000 + [{}]}


@pytest.mark.parametrize(("text", "why"), [(b"{", "^is not JSON \\("), (b"[]", "^is a list, not a JSON object$")])
def test_anything_but_a_json_object_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        read_object(text)
