"""Conversations with calls that come back through a template continue the ids that were sampled, in every format."""

from __future__ import annotations

import json

import pytest
from call_formats import WRITTEN
from grammar_walks import STOP, variant

from art_embedded.answer import Answer, message
from art_embedded.chat import Chat
from art_embedded.formats import CALLS, Formats

ARGUMENTS = {"city": "Rome", "note": "ünï 😀", "days": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "note": {"type": "string"}, "days": {"type": "integer"}},
}
NAMED = "{{- '{\"name\": \"' + f.name + '\", \"%s\": ' + f.arguments + '}' }}"
KIMI = "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + f.arguments + '<|tool_call_end|>' }}"
DEEPSEEK = "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
MAPPED = "{%- for key, value in f.arguments.items() %}"
PYTHON = (
    "{{- f.name + '(' }}" + MAPPED + "{{- key + '=' + (\"'\" + value + \"'\" if value is string else value | tojson) }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
)
TAGS = (
    "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}" + MAPPED + "{{- '<parameter=' + key + '>\\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}"
)
SHOWN = {
    "hermes": ("", "{{- '<tool_call>\\n' }}" + NAMED % "arguments" + "{{- '\\n</tool_call>' }}", "\\n", ""),
    "llama3_json": ("", NAMED % "parameters", "; ", ""),
    "llama3_json with its tag": ("<|python_tag|>", NAMED % "parameters", "; ", ""),
    "kimi_k2": ("<|tool_calls_section_begin|>", KIMI, "", "<|tool_calls_section_end|>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", DEEPSEEK, "", "<｜tool▁calls▁end｜>"),
    "mistral": ("[TOOL_CALLS] [", NAMED % "arguments", ", ", "]"),
    "mistral, named": ("", "{{- '[TOOL_CALLS]' + f.name + f.arguments }}", "", ""),
    "mistral, newer": ("", "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}", "", ""),
    "phi4_mini_json": ("functools[", NAMED % "arguments", ", ", "]"),
    "pythonic": ("[", PYTHON, ", ", "]"),
    "llama4_pythonic": ("<|python_start|>[", PYTHON, ", ", "]<|python_end|>"),
    "qwen3_coder": ("", TAGS, "\\n", ""),
}
"""A form of a format -> what a template writes before all calls, for each, between two and after all."""


def template(form: str) -> str:
    before, call, between, after = SHOWN[form]
    lines = [
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
        "{%- if message.tool_calls %}{{- '" + before + "' }}{%- for call in message.tool_calls %}",
        "{%- set f = call.function %}"
        + call
        + "{%- if not loop.last %}{{- '"
        + between
        + "' }}{%- endif %}{%- endfor %}",
        "{{- '" + after + "' }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ]
    return "".join(lines)


@pytest.mark.parametrize("markers", ["special", "plain", "none"])
@pytest.mark.parametrize("form", WRITTEN)
def test_calls_that_come_back_continue_the_sampled_ids(form, markers, tokenizer):
    name, write = WRITTEN[form]
    formats = Formats(CALLS[name])
    chosen = variant(tokenizer, markers, formats.markers)
    chosen.chat_template = template(form)
    chat = Chat(chosen, frozenset({STOP}), formats)
    asked = [{"role": "user", "content": "the weather in Rome"}]
    text = chat.render(asked, None, {})
    prompt = chat.encode(text)
    said = write([("get_weather", ARGUMENTS), ("get_weather", {"city": "Oslo"})])
    # Letter by letter, as no tokenizer has it, so that only what is remembered gives these ids.
    pieces = [said] if markers == "special" else said
    ids = [token for piece in pieces for token in chosen(piece, add_special_tokens=False)["input_ids"]]
    sampled = [*ids, STOP]
    answer = Answer(tools=True, formats=formats, schemas={"get_weather": SCHEMA})
    returned = message(answer.feed(chat.decode(sampled), final=True))
    assert [json.loads(call["function"]["arguments"]) for call in returned["tool_calls"]] == [
        ARGUMENTS,
        {"city": "Oslo"},
    ]
    chat.remember(text, prompt, sampled)
    result = {"role": "tool", "content": "sunny", "tool_call_id": returned["tool_calls"][0]["id"]}
    following = chat.encode(chat.render([*asked, returned, result], None, {}))
    assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
