"""Prompts and answers: templates, tool calls, streams, and conversations that come back."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from engine_checks import dictate
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import UpstreamError
from art_embedded.answer import Answer, message
from art_embedded.chat import Chat, Detokenizer
from art_embedded.engine import EmbeddedEngine
from art_embedded.sampling import Sampled
from art_embedded.scheduler import Generation

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city":  "Rome", "when": "é"}'
END = 2
"""The token ``<|im_end|>``."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"


MAPPED = """{%- for message in messages %}{{- '<|im_start|>' + message.role + message.content }}
{%- for call in message.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}{%- endfor %}"""


JOINS = """{%- for message in messages %}{{- message.role + ': ' }}{%- if message.content is string %}{{- message.content }}
{%- else %}{{- message.content | map(attribute='text') | join('+') }}{%- endif %}{{- '. ' }}{%- endfor %}"""


def ask(text: str, **settings) -> dict:
    return {"messages": [{"role": "user", "content": text}], **settings}


def read(text: str, **settings) -> dict:
    return message(Answer(tools=True, **settings).feed(text, final=True))


def calls_of(answer: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls", ())]


def test_several_tool_calls_keep_their_arguments_letter_for_letter():
    answer = read(f"I look.\n{CALL}\n{CALL}\n")
    assert answer["content"] == "I look."
    assert calls_of(answer) == [("get_weather", ARGUMENTS)] * 2
    assert len({call["id"] for call in answer["tool_calls"]}) == 2
    assert read(CALL)["content"] is None


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "f"',
        '{"name": "f"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        "[1]",
        '{"name": "f", "arguments": {"n": ' + "1" * 5000 + "}}",
        "",
        "NaN {}",
    ],
)
def test_a_malformed_tool_call_stays_text(inside):
    text = f"a\n<tool_call>{inside}</tool_call>b"
    assert read(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f"', CALL.removesuffix("ll>"), "<tool_call>", "<tool_"])
def test_a_tool_call_that_never_ends_stays_text(text):
    assert read(text) == {"role": "assistant", "content": text}


def test_a_whole_call_is_read_without_its_closing_marker_at_the_end_of_an_answer():
    for text, stop in ((CALL.removesuffix("</tool_call>"), ()), (f"I look.\n{CALL} more", ("</tool_call>",))):
        answer = read(text, stop=stop)
        assert calls_of(answer) == [("get_weather", ARGUMENTS)]
        assert answer["content"] == ("I look." if stop else None)
    assert calls_of(read(f"{CALL.removesuffix('</tool_call>')} and more")) == []


def test_without_tools_in_the_request_nothing_is_parsed():
    assert message(Answer(tools=False).feed(CALL, final=True)) == {"role": "assistant", "content": CALL}


@given(
    parts=st.lists(
        st.sampled_from([CALL, "\n", " ", "text", "<tool", "_call>", "</tool_call>", "STOP", "ST", "<", "é"])
    ),
    cuts=st.lists(st.integers(0, 400)),
)
def test_a_stream_says_the_same_as_the_whole_answer_wherever_it_is_cut(parts, cuts):
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    answer = Answer(tools=True, stop=("STOP",))
    deltas = [delta for a, b in pairwise(edges) for delta in answer.feed(text[a:b])]
    streamed, whole = message([*deltas, *answer.feed("", final=True)]), read(text, stop=("STOP",))
    assert streamed["content"] == whole["content"]
    assert calls_of(streamed) == calls_of(whole)


@given(text=st.text(max_size=40), size=st.integers(1, 5))
def test_streamed_text_is_cut_at_whole_characters_only(text, size, tokenizer):
    chat = Chat(tokenizer, frozenset({2}))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = Detokenizer(chat)
    pieces = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join([*pieces, stream.feed([], final=True)]) == chat.decode(ids)
    assert "�" in text or not any("�" in piece for piece in pieces)


async def test_prompt_ids_are_the_template_s(open_engine, tokenizer):
    engine = await open_engine()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("", "hi", "there")]},
    ]
    answer = await engine.chat({"messages": messages, "tools": [TOOL], "max_tokens": 1})
    plain = [messages[0], {"role": "user", "content": "hi\nthere"}]  # as vLLM joins them
    expected = tokenizer.apply_chat_template(plain, tools=[TOOL], add_generation_prompt=True, return_dict=False)
    assert answer["prompt_token_ids"] == expected
    without = await engine.chat({"messages": messages, "tools": [TOOL], "tool_choice": "none", "max_tokens": 1})
    assert without["prompt_token_ids"] == tokenizer.apply_chat_template(
        plain, add_generation_prompt=True, return_dict=False
    )


def test_a_template_that_joins_parts_itself_is_given_them_except_those_of_a_tool_s_result(tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = JOINS
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "tool")]
    text = Chat(tokenizer, frozenset({2})).render([*messages, {"role": "user", "content": "c"}], None, {})
    assert text == "system: a+b. user: a+b. tool: a\nb. user: c. "
    # Gemma 3 shows only the first part of a system message.
    tokenizer.chat_template = JOINS.replace(
        "message.content |", "message.content[: 1 if message.role == 'system' else 9] |"
    )
    text = Chat(tokenizer, frozenset({2})).render(messages, None, {})
    assert text == "system: a\nb. user: a+b. tool: a\nb. "


@pytest.mark.parametrize("takes_text", [True, False])
def test_a_sampled_tool_call_comes_back_as_the_ids_that_were_sampled(takes_text, tokenizer):
    template = tokenizer.chat_template
    if not takes_text:
        template = template.replace("call.function.arguments is string", "false")
    other = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    chat = Chat(other, frozenset({2}))
    user = {"role": "user", "content": "weather?"}
    text = chat.render([user], [TOOL], {})
    prompt = chat.encode(text)
    arguments = ARGUMENTS if takes_text else '{"city": "Rome", "when": "é"}'
    # One token per character is not how the tokenizer would write it, and nothing forbids to sample it so.
    sampled = [token for letter in CALL.replace(ARGUMENTS, arguments) for token in other(letter)["input_ids"]] + [2]
    chat.remember(text, prompt, sampled)
    answer = read(chat.decode(sampled))
    result = {"role": "tool", "content": "sunny", "tool_call_id": answer["tool_calls"][0]["id"]}
    later = chat.encode(chat.render([user, answer, result], [TOOL], {}))
    assert calls_of(answer) == [("get_weather", arguments)]
    assert later[: len(prompt) + len(sampled)] == prompt + sampled
    assert other.decode(later) == chat.render([user, answer, result], [TOOL], {})


@pytest.mark.parametrize("stop", ["終了しました", "🛑🛑🛑🛑"])
async def test_a_stop_string_whose_characters_take_several_tokens_ends_the_answer(
    stop, open_engine, monkeypatch, tokenizer
):
    engine = await open_engine()
    script = tokenizer(f"Rome {stop} and more", add_special_tokens=False)["input_ids"] + [2]
    assert len(tokenizer(stop)["input_ids"]) > len(stop) + 8
    dictate(monkeypatch, script)
    [choice] = (await engine.chat(ask("hi", stop=stop)))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Rome ", "stop")
    assert choice["token_ids"] == script[: len(tokenizer(f"Rome {stop}")["input_ids"])]


async def test_the_next_turn_continues_the_sampled_ids(open_engine, monkeypatch, tokenizer):
    engine = await open_engine()
    script = [token for letter in "the weather" for token in tokenizer(letter)["input_ids"]] + [2]
    assert script[:-1] != tokenizer("the weather")["input_ids"]
    dictate(monkeypatch, script)
    first = await engine.chat(ask("hi"))
    messages = [*ask("hi")["messages"], first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = await engine.chat({"messages": messages, "max_tokens": 2})
    sampled = first["prompt_token_ids"] + script
    assert second["prompt_token_ids"][: len(sampled)] == sampled
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(sampled) - 1


@pytest.mark.parametrize("value", [r'"\ud800"', "1" * 5000, "[" * 5000 + "]" * 5000])
def test_odd_arguments_that_come_back_are_shown_to_templates_that_want_a_mapping(value, tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = MAPPED
    chat = Chat(tokenizer, frozenset({2}))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {value}}}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert chat.encode(chat.render(messages, None, {}))


async def test_tools_without_a_name_or_a_schema_are_shown_to_the_template_as_they_are(open_engine):
    engine = await open_engine()
    odd = [
        {"type": "function", "function": {"name": ["f"], "parameters": {"type": "object"}}},
        {"name": "f", "parameters": [1]},
    ]
    assert (await engine.chat(ask("the weather", tools=odd, max_tokens=2)))["choices"][0]["token_ids"]


async def test_a_tokenizer_without_a_chat_template_is_a_400_that_says_so(open_engine):
    engine = await open_engine()
    engine._chat.tokenizer.chat_template = None
    with pytest.raises(UpstreamError, match="has no chat template") as caught:
        await engine.chat(ask("hi"))
    assert caught.value.status == 400


async def test_a_template_that_refuses_the_messages_is_a_400_with_its_reason(open_engine):
    engine = await open_engine()
    engine._chat.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UpstreamError, match="roles must alternate") as caught:
        await engine.chat(ask("hi"))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took longer than 0.2 s"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.at.all }}", "has no attribute"),
    ],
)
async def test_a_template_that_never_ends_or_fails_in_any_way_is_a_400(open_engine, monkeypatch, template, said):
    monkeypatch.setattr("art_embedded.chat.RENDER_SECONDS", 0.2)
    engine = await open_engine()
    engine._chat.tokenizer.chat_template = template
    with pytest.raises(UpstreamError, match=said) as refusal:
        await engine.chat(ask("hi"))
    assert refusal.value.status == 400


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_has_every_token_once_and_adds_up_to_the_completion(n, open_engine):
    engine = await open_engine()
    request = ask(
        "the weather in Rome", seed=3, n=n, max_tokens=20, stream_options={"include_usage": True}, tools=[TOOL]
    )
    whole = await engine.chat(request)
    chunks = [chunk async for chunk in engine.stream(request)]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["policy_version"] == 0
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [x for part in parts for x in part["token_logprobs"]] == pytest.approx(
            choice["token_logprobs"], abs=1e-4
        )
        assert message([part["delta"] for part in parts])["content"] == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


async def test_a_sampled_tool_call_is_answered_as_one_whole_and_streamed(open_engine, monkeypatch, tokenizer):
    engine = await open_engine()
    script = tokenizer(f"I look.\n{CALL}", add_special_tokens=False)["input_ids"] + [2]
    dictate(monkeypatch, script)
    request = ask("weather?", tools=[TOOL])
    choice = (await engine.chat(request))["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("tool_calls", script)
    assert (choice["message"]["content"], calls_of(choice["message"])) == ("I look.", [("get_weather", ARGUMENTS)])
    parts = [chunk["choices"][0] async for chunk in engine.stream(request)]
    assert calls_of(message([part["delta"] for part in parts])) == [("get_weather", ARGUMENTS)]
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert [token for part in parts for token in part["token_ids"]] == script


class EndsWhileItIsRead(Generation):
    """Ends, with a token that has no text, as soon as it was found running."""

    @property
    def finish_reason(self):
        ended = bool(self.sampled)
        if not ended:
            self.sampled.append(Sampled(END, -0.5))
            self.changed.set()
        return "stop" if ended else None


async def test_a_stream_has_the_tokens_with_which_an_answer_ends_while_it_is_read(open_engine, monkeypatch):
    def submit(self, generations, version):
        for generation in generations:
            generation.__class__ = EndsWhileItIsRead
            generation.changed.set()

    monkeypatch.setattr(EmbeddedEngine, "_submit", submit)
    engine = await open_engine()
    parts = [chunk["choices"][0] async for chunk in engine.stream(ask("hi"))]
    assert [token for part in parts for token in part["token_ids"]] == [END]
    assert parts[-1]["finish_reason"] == "stop"


def test_an_answer_sampled_anew_in_other_tokens_is_continued_in_these(tokenizer):
    """Two runs say the same in other tokens: the second run's next prompt goes on from its own."""
    chat = Chat(tokenizer, frozenset({tokenizer.eos_token_id}))
    prompt = chat.encode("Hello")
    end = tokenizer.eos_token_id
    whole = [*tokenizer("Rome", add_special_tokens=False)["input_ids"], end]
    letters = [*(tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "Rome"), end]
    assert whole != letters
    again = "Hello" + "Rome<|im_end|>" + "\nand"
    for sampled in (whole, letters):
        chat.remember("Hello", prompt, sampled)
        assert chat.encode(again)[: len(prompt) + len(sampled)] == [*prompt, *sampled]
