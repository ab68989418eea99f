"""Tools for chat templates that leave them out: what the prompt says, and that the next turn continues the sampled ids."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from art_core.errors import ConfigError
from art_embedded.parsers import extend_template, tool_parser
from art_embedded.rendering import Renderer
from art_embedded.tool_format import template_with_tools

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": NOTHING}}
ARGUMENTS = '{"city":  "Rome"}'
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
QUESTION = {"role": "user", "content": "Hi"}
HISTORY = [
    QUESTION,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
WRITTEN = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
def folder(save_with, tokenizer):
    """A function template -> folder of a model with that template."""

    def save(template: str) -> str:
        tokenizer.chat_template = template
        return save_with(tokenizer)

    own = tokenizer.chat_template
    yield save
    tokenizer.chat_template = own


async def prompt(engine, messages, **request) -> str:
    answer = await engine.chat({"messages": messages, "max_tokens": 1, "tools": [TOOL], **request})
    return engine._chat.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


async def test_tools_are_added_to_the_system_message_or_become_one(open_engine, folder):
    engine = await open_engine(folder=folder(CHATML))
    alone = await prompt(engine, [QUESTION])
    assert (
        alone.startswith("<|im_start|>system\nYou can call")
        and '{"type": "function", "function": {"name": "get_' in alone
    )
    added = await prompt(engine, [{"role": "system", "content": "Be kind."}, QUESTION])
    assert added.startswith("<|im_start|>system\nBe kind.\n\nYou can call") and added.count("<tools>") == 1
    assert await prompt(engine, [QUESTION], tools=None) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_lines_except_empty_ones_and_one_part_is_like_a_string():
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    said = [("Be kind.", "Hi"), (parts("Be kind."), parts("Hi"))]
    plain, one = [rendered(CHATML, [{"role": "system", "content": a}, {"role": "user", "content": b}]) for a, b in said]
    assert "system\nBe kind.\n\nYou can call" in plain and one == plain
    text = rendered(
        CHATML,
        [{"role": "system", "content": parts("A", "", "B")}, {"role": "user", "content": parts("", "C", "D", "")}],
    )
    assert "system\nA\nB\n\nYou can call" in text and "user\nC\nD<|im_end|>" in text


async def test_a_template_that_refuses_system_messages_has_the_tools_before_the_first_question(open_engine, folder):
    engine = await open_engine(folder=folder(STRICT))
    text = await prompt(engine, [QUESTION, {"role": "assistant", "content": "Yes?"}, QUESTION])
    assert text.startswith("<|im_start|>user\nYou can call") and text.count("<tools>") == 1
    assert text.index("</tools>") < text.index("\nHi<|im_end|>") < text.index("Yes?")


PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "degrees": {"type": "number"}, "dark": {"type": "boolean"},
    "years": {"type": "array", "items": {"type": "integer"}}, "names": {"type": "array"}, "unit": {"enum": ["C", "F"]},
    "either": {"type": ["string", "null"]}, "more": {"type": "object"}, "any": True,
}  # fmt: skip
ALL = (
    '"city": "some city"', '"days": 1', '"degrees": 1.5', '"dark": true', '"years": [1]', '"names": ["..."]', '"unit": "C"',
    '"either": "some either"', '"more": {}', '"any": "some any"',
)  # fmt: skip


def exchange(*arguments):
    """A question that states arguments of ``f``, and the call that answers it."""
    said = ", ".join(argument.replace('"', "", 2).replace(":", "", 1) for argument in arguments)
    question = f"Call f with {said}." if said else "Call f."
    call = f'<tool_call>\n{{"name": "f", "arguments": {{{", ".join(arguments)}}}}}\n</tool_call>'
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"


@pytest.mark.parametrize(
    ("parameters", "exchanges"),
    [
        ({"type": "object", "properties": PROPERTIES}, [ALL]),
        ({"properties": PROPERTIES, "required": ["days"]}, [ALL, ['"days": 1']]),
        ({"properties": {"days": {"type": "integer"}}, "required": ["days"]}, [['"days": 1']]),
        ({"properties": {}}, [()]),
        (None, [()]),
    ],
)
def test_calls_of_the_first_tool_are_shown_with_all_arguments_and_then_the_required_ones(parameters, exchanges):
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    text = rendered(CHATML, [QUESTION], tools=[{"type": "function", "function": function}, TOOL])
    shown = "".join(exchange(*arguments) for arguments in exchanges)
    assert text.count("Call f") == len(exchanges)
    assert f"</tool_call><|im_end|>\n{shown}<|im_start|>user\nHi<|im_end|>" in text


async def test_calls_are_written_letter_for_letter_and_their_results_are_one_message(open_engine, folder):
    engine = await open_engine(folder=folder(CHATML))
    text = await prompt(engine, HISTORY)
    assert f"<|im_start|>assistant\nI look.\n{WRITTEN}\n{WRITTEN}<|im_end|>" in text
    results = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")
    assert WRITTEN in await prompt(engine, HISTORY, tools=None), "calls of earlier turns are shown without tools too"


@pytest.mark.parametrize("template", [CHATML, STRICT])
async def test_the_turn_after_a_forced_call_continues_the_sampled_ids(open_engine, folder, template):
    engine = await open_engine(folder=folder(template))
    request = {"messages": [QUESTION], "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    first = await engine.chat({**request, "max_tokens": 200})
    message = first["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
    second = await engine.chat({"messages": [QUESTION, message, result], "tools": [TOOL], "max_tokens": 1})
    before = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before


async def test_tools_that_the_template_leaves_out_on_request_are_warned_of_once(open_engine, folder, caplog):
    model = folder(CHATML)
    engine = await open_engine(folder=model, tool_format="none")
    for _ in range(2):
        assert "get_weather" not in await prompt(engine, [QUESTION])
    assert caplog.text.count("requests have tools, but the model's chat template leaves them out") == 1
    assert (tool_parser(model), tool_parser(model, None, "none")) == ("hermes", None)


async def test_a_named_format_replaces_the_templates_own(open_engine):
    engine = await open_engine(tool_format="hermes")
    text = await prompt(engine, [QUESTION])
    assert "You can call these functions" in text and text.count('"type": "function"') == 1


def load_tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model)


def rendered(template: str, messages, tools=(TOOL,)) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    tokenizer.chat_template = template_with_tools(tokenizer)
    return tokenizer.apply_chat_template(messages, tools=list(tools) or None, tokenize=False)


ALTERNATING = STRICT.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}",
)
CALLS_IF_THERE = CHATML.replace(
    "{{ m['content'] }}", "{% if 'tool_calls' in m %}{{ m['tool_calls'] | length }}{% endif %}{{ m['content'] }}"
)
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}",
)


def test_what_the_user_says_after_results_is_in_their_message():
    text = rendered(ALTERNATING, [*HISTORY, {"role": "user", "content": "And?"}])
    assert "rain\n</tool_response>\nAnd?<|im_end|>" in text


def test_templates_that_ask_for_tool_calls_are_given_none():
    assert rendered(CALLS_IF_THERE, HISTORY).count(WRITTEN) == 2


def test_content_in_parts_is_text():
    parts = [
        {"role": message["role"], "content": [{"type": "text", "text": "Hi"}]} for message in [QUESTION, HISTORY[2]]
    ]
    assert "<|im_start|>user\nHi<|im_end|>" in rendered(PARTS, parts)
    assert "<tool_response>\nHi\n</tool_response>" in rendered(PARTS, parts)


@pytest.mark.parametrize(
    "arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}, {"arguments": "{}"}]
)
def test_a_call_without_arguments_is_written_with_none(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", **arguments}}
    text = rendered(CHATML, [QUESTION, {"role": "assistant", "tool_calls": [call]}], tools=())
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in text


@pytest.mark.parametrize("kind", ["granite", "llama", "mistral", "kimi_k2"])
def test_an_extended_template_is_read_in_the_format_that_it_writes_and_not_extended_again(kind, folder):
    model = folder(CHATML)
    (Path(model) / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer = load_tokenizer_of(model)
    assert extend_template(tokenizer, model, "hermes")
    (Path(model) / "chat_template.jinja").write_text(tokenizer.chat_template)
    assert tool_parser(model) == "hermes"
    assert not extend_template(tokenizer, model, "hermes")


def test_a_model_with_several_templates_keeps_them_and_cannot_be_given_another(folder, tokenizer):
    model = folder({"default": CHATML, "tool_use": CHATML + "{{ tools }}"})
    assert not extend_template(load_tokenizer_of(model), model, None)
    with pytest.raises(ConfigError, match="several chat templates, which tool_format can't extend"):
        extend_template(load_tokenizer_of(model), model, "hermes")


def test_recorded_conversations_are_rendered_the_same_way(folder):
    renderer = Renderer(folder(CHATML))
    first = renderer.call(HISTORY[:1], HISTORY[1], tools=[TOOL])
    second = renderer.call(HISTORY, {"role": "assistant", "content": "Sun."}, tools=[TOOL])
    whole = first.prompt_ids + first.sampled_ids
    assert second.prompt_ids[: len(whole)] == whole
