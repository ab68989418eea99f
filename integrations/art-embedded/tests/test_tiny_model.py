"""The model that ships with the project: its size, its tokens, its chat template, and that it calls tools."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("langchain")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_embedded import TINY
from examples.email_search.mailbox import open_mailbox
from tiny.demonstrations import OPENAI_TOOLS, Habits, call, demonstrate, result, user
from tiny.drills import WORDS
from tiny.fragments import make_fragment
from tiny.trial import try_out

TOKENIZER = AutoTokenizer.from_pretrained(TINY)


def render(messages: list[dict], *, answer_next: bool = False) -> list[int]:
    return TOKENIZER.apply_chat_template(
        messages, tools=OPENAI_TOOLS, add_generation_prompt=answer_next, return_dict=False
    )


def test_it_is_small_and_loads_in_32_bits():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 5_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert model.config.max_position_embeddings == TOKENIZER.model_max_length == 16_384
    assert model.config.vocab_size == len(TOKENIZER)


def test_a_word_is_one_token_and_the_same_wherever_it_stands():
    for word in WORDS:
        (token,) = TOKENIZER(word)["input_ids"]
        for text in (f'"{word}"', f"a {word}.", f"\n{word}\n"):
            assert token in TOKENIZER(text)["input_ids"]


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_its_tokens(text: str):
    assert TOKENIZER.decode(TOKENIZER(text, split_special_tokens=True)["input_ids"]) == text


def test_a_prompt_extends_the_prompt_before_it_and_what_was_sampled():
    rng = random.Random(1)
    for seed in range(20):
        mailbox = open_mailbox(seed)
        messages = demonstrate(rng, mailbox, rng.choice(mailbox.facts), Habits()).messages
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            function = message["tool_calls"][0]["function"]
            said = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
            sampled = TOKENIZER(f"<tool_call>\n{said}\n</tool_call><|im_end|>")["input_ids"]
            known = render(messages[:position], answer_next=True) + sampled
            assert render(messages)[: len(known)] == known


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "search_inbox", "arguments": {"keywords": ["Falcon"}}\n</tool_call>',
        '{"name": "read_email"',
        "\n\n<tool_call>",
        "\n",
        "hello",
        "",
    ],
)
def test_malformed_output_is_rendered_again_as_it_was_sampled(text: str):
    before = [user("What is the room for the Falcon budget?")]
    known = render(before, answer_next=True) + TOKENIZER(f"{text}<|im_end|>")["input_ids"]
    again = render([*before, {"role": "assistant", "content": text}, user("Please call a tool.")])
    assert again[: len(known)] == known


def test_arguments_read_the_same_as_text_and_as_an_object():
    as_text = call(0, "search_inbox", keywords=["Falcon", "Zoë"])
    as_object = json.loads(json.dumps(as_text))
    function = as_object["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    as_text["tool_calls"][0]["function"]["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    assert render([user("hi"), as_text]) == render([user("hi"), as_object])


def test_content_may_be_missing_empty_or_in_parts():
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]}
    assert render([parts]) == render([user("What is this?")])
    for empty in (None, ""):
        message = call(0, "read_email", id=12) | {"content": empty}
        assert render([user("hi"), message]) == render([user("hi"), call(0, "read_email", id=12)])


def test_answers_to_parallel_calls_share_a_turn():
    both = call(0, "read_email", id=12)
    both["tool_calls"] += call(1, "read_email", id=34)["tool_calls"]
    text = TOKENIZER.decode(render([user("hi"), both, result(0, "one"), result(1, "two")]))
    assert text.endswith(
        "}}\n</tool_call>\n<tool_call>\n" + '{"name": "read_email", "arguments": {"id": 34}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_a_fragment_ends_with_its_label_and_the_label_is_right():
    rng = random.Random(2)
    for _ in range(50):
        fragment = make_fragment(rng, level=4)
        arguments = fragment.messages[-1]["tool_calls"][0]["function"]["arguments"]
        assert arguments.endswith(fragment.label)
        if fragment.messages[-2]["role"] == "tool":
            value = str(next(iter(json.loads(arguments).values())))
            assert value in fragment.messages[-2]["content"]


@pytest.mark.system
def test_it_calls_tools_and_is_sometimes_right():
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rates = try_out(model, TOKENIZER, 48, greedy=False)
    assert rates["malformed"] <= 0.1
    assert 0.05 <= rates["success"] <= 0.6
