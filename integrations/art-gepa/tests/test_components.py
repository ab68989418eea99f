"""Which texts of an agent can be optimised, and what a request is with others in their place."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.capture import Dialect
from art_core.errors import ConfigError
from art_core.types import Call
from art_gepa import Change, WithPrompts, components
from art_gepa.components import constant_parts
from art_gepa.live import edited_body
from art_gepa.prompts import Current, Edits, Prompted, read, write

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the mails.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def call(*system, agent=None, tools=(), user="hello"):
    messages = [{"role": "system", "content": text} for text in system] + [{"role": "user", "content": user}]
    request = {"messages": messages, **({"tools": list(tools)} if tools else {})}
    return Call((1,), (2,), (-1.0,), agent=agent, request=request)


def test_a_system_prompt_and_a_tool_of_an_agent_are_components():
    found = components([call("You answer questions.", tools=[TOOL])] * 2)
    assert [(it.name, it.text, it.tool) for it in found] == [
        ("agent: system prompt", "You answer questions.", None),
        ("tool search", "Search the mails.", "search"),
    ]


def test_every_node_has_its_own_prompt_and_a_shared_one_is_one_component():
    calls = [call("You search the inbox.", agent="searcher"), call("You write the answer.", agent="writer")]
    assert [it.name for it in components(calls)] == ["searcher: system prompt", "writer: system prompt"]
    shared = [call("You are a helpful team.", agent=name) for name in ("searcher", "writer")]
    assert [it.name for it in components(shared)] == ["searcher: system prompt"]


def test_of_a_template_only_the_constant_parts_are_components():
    calls = [
        call(f"You work for {name}. Today is {day}. Answer in one short sentence.")
        for name, day in (("Ann", "Monday"), ("Bob Smith", "Tuesday 3rd"), ("Cy", "a day off"))
    ]
    assert [(it.name, it.text) for it in components(calls)] == [
        ("agent: system prompt, part 1", "You work for"),
        ("agent: system prompt, part 2", "Answer in one short sentence."),
    ]


def test_a_prompt_without_anything_constant_is_no_component():
    assert components([call("alpha beta gamma delta"), call("one two three four")]) == []


def shot(task, *more):
    """A call with an example."""
    examples = [{"role": "user", "content": "Say it: rain"}, {"role": "assistant", "content": "RAIN"}]
    return Call((1,), (2,), (-1.0,), request={"messages": [*examples, {"role": "user", "content": task}, *more]})


def test_messages_with_which_all_conversations_begin_are_examples():
    later = [{"role": "assistant", "content": "SNOW"}, {"role": "user", "content": "Again."}]
    found = components([shot("Say it: snow"), shot("Say it: snow", *later), shot("Say it: hail")])
    assert [(it.name, it.text, it.role) for it in found] == [
        ("agent: example 1, user", "Say it: rain", "user"),
        ("agent: example 2, assistant", "RAIN", "assistant"),
    ]
    changed = with_changes(shot("Say it: rain and RAIN").request, Change("x", "RAIN", "rain!", role="assistant"))
    assert [it["content"] for it in changed["messages"]] == ["Say it: rain", "rain!", "Say it: rain and RAIN"]


def test_what_every_conversation_asks_is_no_example():
    assert components([call(user="Begin."), call(user="Begin.")]) == []


words = st.lists(st.sampled_from(["ab", "cd", "ef", "gh", "ij", "kl"]), min_size=0, max_size=12).map(" ".join)


@given(st.lists(words, min_size=1, max_size=5))
def test_constant_parts_stand_in_every_text_in_order(texts):
    for text in texts:
        start = 0
        for part in constant_parts(texts):
            place = text.find(part, start)
            assert place >= 0
            start = place + len(part)


def with_changes(request, *changes):
    return Edits(changes).in_chat(request)


def test_a_change_replaces_its_text_in_instructions_and_nowhere_else():
    request = {
        "messages": [
            {"role": "system", "content": "Be kind. Answer in French."},
            {"role": "developer", "content": [{"type": "text", "text": "Answer in French."}, {"type": "image_url"}]},
            {"role": "user", "content": "Answer in French."},
        ]
    }
    found = with_changes(request, Change("x", "Answer in French.", "Answer in one word."))["messages"]
    assert found[0]["content"] == "Be kind. Answer in one word."
    assert found[1]["content"] == [{"type": "text", "text": "Answer in one word."}, {"type": "image_url"}]
    assert found[2] == request["messages"][2]
    assert request["messages"][0]["content"] == "Be kind. Answer in French.", "the agent's own request stays"


def system(text, *changes):
    return with_changes({"messages": [{"role": "system", "content": text}]}, *changes)["messages"][0]["content"]


def test_changes_do_not_change_each_others_texts():
    swap = [Change("a", "two", "three"), Change("b", "three", "two"), Change("c", "one two three four", "never")]
    assert system("one two three", *swap) == "one three two"
    longest = [Change("a", "two", "2"), Change("d", "one two three", "two words")]
    assert system("one two three", *longest) == "two words"
    unchanged = [
        Change("a", "You help.", "You hinder."),
        Change("b", "You help. Write it down.", "You help. Write it down."),
    ]
    assert system("You help. Write it down.", *unchanged) == "You help. Write it down."


def test_a_change_replaces_whole_words_once():
    change = Change("x", "act as an", "play the")
    assert system("act as another", change) == "act as another"
    assert system("act as an actor who can act as an ape", change) == "play the actor who can act as an ape"


def test_a_tools_description_changes_and_its_name_and_schema_stay():
    found = with_changes(
        {"messages": [], "tools": [TOOL]}, Change("x", "Search the mails.", "Finds mails by word.", "search")
    )
    [tool] = found["tools"]
    assert tool["function"] == {**TOOL["function"], "description": "Finds mails by word."}
    other = with_changes({"messages": [], "tools": [TOOL]}, Change("x", "Search the mails.", "No.", "another"))
    assert other["tools"] == [TOOL]


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": "abc"},
        {
            "messages": ["abc", {"role": "system", "content": None}, {"role": "system", "content": ["abc"]}],
            "tools": "none",
        },
        {"messages": [{"role": "system"}], "tools": [None, {"function": None}, {"function": {}}]},
        {"prompt": "You help."},
    ],
)
def test_a_request_of_another_shape_stays_as_it_is(request_):
    assert with_changes(request_, Change("x", "You help.", "No."), Change("y", "a", "b", "search")) == request_


class Own(Dialect):
    """A dialect of its own."""

    def to_chat(self, body):
        return {"messages": [{"role": "system", "content": body["instructions"]}]}


def test_a_dialect_gets_the_changes_that_a_searchs_file_has_when_a_request_arrives(tmp_path):
    file = tmp_path / "candidate.json"
    write(file, [])
    dialect = Prompted(Own(), Current(file))
    assert dialect.to_chat({"instructions": "Hello."})["messages"][0]["content"] == "Hello."
    write(file, [Change("x", "Hello.", "Goodbye.")])
    assert dialect.to_chat({"instructions": "Hello."})["messages"][0]["content"] == "Goodbye."


def dialect_of(file):
    return WithPrompts(file).registered("register_dialects")["/v1/chat/completions"]


def test_a_run_keeps_the_texts_that_the_file_had_when_it_began(tmp_path):
    file = tmp_path / "prompts.json"
    write(file, [Change("x", "Hello.", "Goodbye.")])
    dialect = dialect_of(file)
    file.unlink()
    assert (
        dialect.to_chat({"messages": [{"role": "system", "content": "Hello."}]})["messages"][0]["content"] == "Goodbye."
    )


def test_texts_that_do_not_fit_the_agent_are_warned_of_once(tmp_path, caplog):
    write(tmp_path / "prompts.json", [Change("x", "Hello on Monday.", "Goodbye.")])
    dialect = dialect_of(tmp_path / "prompts.json")
    for _ in range(50):
        dialect.to_chat({"messages": [{"role": "system", "content": "Hello on Tuesday."}]})
    assert [it.getMessage() for it in caplog.records if "the first 3 requests contain none" in it.getMessage()]
    assert len(caplog.records) == 1


def test_a_file_that_is_missing_or_another_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        WithPrompts(tmp_path / "none.json")
    other = Path(tmp_path / "other.json")
    other.write_text(json.dumps({"texts": [{"find": "a"}]}))
    with pytest.raises(ConfigError, match="isn't a file of prompts"):
        read(other)


class Changes:
    """The changes of a test."""

    def __init__(self, *changes):
        self.changes = changes

    def edits(self):
        return Edits(self.changes)

    def note(self, before, after):
        pass


BRIEF = Changes(Change("x", "Be brief.", "Be kind."))
BODIES = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Be brief."}]},
    "Responses": {"instructions": "Be brief.", "input": [{"role": "developer", "content": [{"text": "Be brief."}]}]},
    "Messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "Be brief."}],
    },
    "Gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [{"parts": [{"text": "Be brief."}]}],
    },
    "Converse": {"system": [{"text": "Be brief."}], "messages": [{"role": "user", "content": [{"text": "Be brief."}]}]},
}


@pytest.mark.parametrize("api", BODIES)
def test_a_providers_request_gets_the_changes_where_it_instructs(api):
    found = edited_body(json.dumps(BODIES[api]).encode(), BRIEF).decode()
    asked = {"Responses": 2}.get(api, 1)
    assert found.count("Be kind.") == asked
    assert found.count("Be brief.") == json.dumps(BODIES[api]).count("Be brief.") - asked


PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("description", "name", "instructions")},
}
FUNCTION = {"name": "search", "description": "Search the mails.", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"tools": [{"functionDeclarations": [FUNCTION]}]},
        {"toolConfig": {"tools": [{"toolSpec": FUNCTION}]}},
    ],
    ids=["chat", "Responses and Messages", "Gemini", "Converse"],
)
def test_a_providers_tools_get_the_changes_of_their_descriptions(tools):
    body = json.dumps(tools).encode()
    found = edited_body(body, Changes(Change("x", "Search the mails.", "Finds mails.", "search")))
    assert json.loads(found) == json.loads(body.replace(b"Search the mails.", b"Finds mails."))


def test_a_tool_call_that_the_user_quotes_stays():
    call = {"type": "tool_use", "name": "set", "input": {"system": "Be brief.", "instructions": "Be brief."}}
    body = json.dumps({"system": "Be brief.", "messages": [{"role": "assistant", "content": [call]}]}).encode()
    assert json.loads(edited_body(body, BRIEF)) == {**json.loads(body), "system": "Be kind."}


def test_what_does_not_change_is_sent_as_it_is():
    for body in (b'{"messages" : []}', b"no JSON", b'{"system":"Hello."}', b"[]", b'{"systemInstruction": {}}'):
        assert edited_body(body, BRIEF) is body


def test_half_a_character_of_the_user_is_passed_on():
    body = json.dumps({"system": "Be brief.", "messages": [{"role": "user", "content": "\ud83d"}]}).encode()
    assert b"ud83d" in edited_body(body, BRIEF)
