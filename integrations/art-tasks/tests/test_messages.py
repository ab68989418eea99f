"""What instrumentations write as a model's input and output is read as chat messages, or refused; nothing is guessed."""

import json

import pytest

from art_tasks.traffic.messages import Unreadable, answer_of, shown_of

USER = {"role": "user", "content": "Where?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "desk"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a key"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

CONVERSATIONS = {
    "chat completions": [USER, CALLED, RESULT],
    "chat completions with tools": {"messages": [USER, CALLED, RESULT], "tools": [TOOL]},
    "langchain": [
        [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "args": {"at": "desk"}, "id": "c1"}]},
            {"role": "tool", "content": "a key", "tool_call_id": "c1"},
            {"role": "tool", "content": TOOL},
        ]
    ],
    "langchain by type": [
        {"type": "human", "content": "Where?"},
        {"type": "ai", "content": "", "tool_calls": [{"name": "look", "args": {"at": "desk"}, "id": "c1"}]},
        {"type": "tool", "content": "a key", "tool_call_id": "c1"},
    ],
    "anthropic": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "desk"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a key"}]},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "desk"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a key"},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    },
    "opentelemetry": [
        {"role": "user", "parts": [{"type": "text", "content": "Where?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "desk"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "a key"}]},
    ],
}  # fmt: skip


def test_text_parts_are_lines_as_the_engines_show_them_and_those_of_an_answer_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": parts}]}
    messages, _ = shown_of(json.dumps([*asked, result]))
    assert [message["content"] for message in messages] == ["a\nb", "ab", "a\nb"]


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_a_conversation_with_a_tool_is_the_same_in_every_form(form):
    messages, tools = shown_of(json.dumps(CONVERSATIONS[form]))
    assert messages[0] == USER and messages[2] == RESULT and len(messages) == 3
    assert {**messages[1], "content": messages[1]["content"] or None} == CALLED
    offered = form in ("chat completions with tools", "langchain", "anthropic", "responses")
    assert tools == ([TOOL] if offered else [])


@pytest.mark.parametrize(
    ("gave", "answer"),
    [
        ("Here.", {"role": "assistant", "content": "Here."}),
        ("42", {"role": "assistant", "content": "42"}),
        ('{"city":  "Rome"}', {"role": "assistant", "content": '{"city":  "Rome"}'}),
        ('{"type": "search"}', {"role": "assistant", "content": '{"type": "search"}'}),
        ("[1, 2]", {"role": "assistant", "content": "[1, 2]"}),
        ({"city": "Rome"}, {"role": "assistant", "content": '{"city": "Rome"}'}),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "desk"}}],
                "tool_calls": [{"name": "look", "args": {"at": "desk"}, "id": "c1"}],
            },
            CALLED,
        ),
        ('{"role": "assistant", "content": "Here."}', {"role": "assistant", "content": "Here."}),
        ({"role": None, "content": "Here."}, {"role": "assistant", "content": "Here."}),
        ([{"role": "assistant", "parts": [{"type": "text", "content": "Here."}]}], {"role": "assistant", "content": "Here."}),
        ({"choices": [{"message": {"role": "assistant", "content": "Here."}}]}, {"role": "assistant", "content": "Here."}),
        ([{"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "desk"}'}], CALLED),
        (
            [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "message", "content": [{"type": "output_text", "text": "Here.", "annotations": []}]},
            ],
            {"role": "assistant", "content": "Here.", "reasoning_content": "Hm."},
        ),
        (
            {"role": "model", "parts": [{"text": "Here."}]},
            {"role": "assistant", "content": "Here."},
        ),
        ({"role": "assistant", "content": {"city": "Rome"}}, {"role": "assistant", "content": '{"city": "Rome"}'}),
    ],
)  # fmt: skip
def test_an_answer_is_read_in_every_form(gave, answer):
    assert answer_of(gave) == answer


def test_a_text_is_the_users_and_instructions_are_the_systems():
    assert shown_of("Where?") == ([USER], [])
    messages, _ = shown_of({"instructions": "Be brief.", "input": "Where?"})
    assert messages == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "expected text or messages"),
        ({"query": "Where?"}, "none of messages, input and contents"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "narrator", "content": "x"}], "narrator"),
        ([], "no messages"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {}}]}],
            "a tool call has no name",
        ),
    ],
)
def test_what_is_no_conversation_in_text_is_refused(given, why):
    with pytest.raises(Unreadable, match=why):
        shown_of(given)


def test_an_answer_that_is_none_is_refused():
    for gave in (None, "", {}, [], {"role": "user", "content": "me"}, {"role": "assistant", "content": ""}):
        with pytest.raises(Unreadable, match=r"no output|not an assistant"):
            answer_of(gave)
