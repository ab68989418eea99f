"""Which formats a model speaks: by its template, its type, its name, or as it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art_core.errors import ConfigError
from art_embedded import TINY
from art_embedded.parsers import (
    CALLS_OF_TYPES,
    NAMES,
    REASONING_PARSERS,
    THINKING_OF_TYPES,
    TOOL_PARSERS,
    WRITES_CALLS,
    reasoning_parser,
    tool_parser,
)

HYBRID = "{% if add_generation_prompt %}{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
SHOWN = "{{ '<think>' + message.reasoning_content + '</think>' }}{% if add_generation_prompt %}<|im_start|>{% endif %}"


@pytest.fixture
def model(tmp_path):
    """A function that writes a model's folder without weights."""

    def write(template: str | None, kind: str = "", *, beside: bool = False) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        if template is not None and beside:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        elif template is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return str(tmp_path)

    return write


def both(model: str) -> tuple[str | None, str | None]:
    return tool_parser(model), reasoning_parser(model)


@pytest.mark.parametrize(
    ("template", "kind", "tools", "thinking"),
    [
        ('<tool_call>\n{"name": ', "qwen2", "hermes", None),
        ("<tool_call>" + HYBRID, "qwen3", "hermes", "qwen3"),
        ("<tool_call>" + SHOWN, "qwen3", "hermes", None),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_moe", "qwen3_coder", None),
        ("<tool_call>\n<function=f>" + HYBRID, "qwen3_5", "qwen3_coder", "qwen3"),
        ("<tool_call>\n<arg_key>" + HYBRID, "glm4_moe", "glm45", "glm45"),
        ("{% if builtin_tools %}<|python_tag|>", "llama", "llama3_json", None),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama", "llama3_json", None),
        ("[func_name1(params_name1=params_value1...)]", "llama", "pythonic", None),
        ("<|python_start|><|python_end|>", "llama4", "llama4_pythonic", None),
        ("<|im_middle|><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2", None),
        ("<|im_middle|><|tool_calls_section_begin|>" + SHOWN, "kimi_k2", "kimi_k2", "kimi_k2"),
        ("<|im_middle|>{{ message.content }}", "deepseek_v3", "hermes", None),
        ("<｜Assistant｜><｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
        ("{% if not thinking %}</think><｜Assistant｜><｜tool▁calls▁begin｜>", "deepseek_v3", "deepseek_v31", "deepseek_v3"),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral", "mistral"),
        ("<tool_call>", "granite", "granite", None),
        ("<tool_call>", "granitemoeshared", "granite", None),
        ("<|channel|>analysis", "gpt_oss", "openai", "openai_gptoss"),
        ("{{ tools }}", "mistral", "mistral", None),
        ("{{ message.content }}", "qwen2", "hermes", None),
        (None, "qwen3", "hermes", "qwen3"),
        (None, "unheard_of", None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [True, False])
def test_the_template_says_which_formats_a_model_speaks(template, kind, tools, thinking, beside, model):
    assert both(model(template, kind, beside=beside)) == (tools, thinking)


def test_of_several_templates_each_counts(model):
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "<tool_call>"}]
    assert tool_parser(model(named)) == "hermes"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_object_is_named(name, model):
    for text in ("{", "[1]"):
        folder = Path(model("<tool_call>"))
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name} isn't (valid JSON|a JSON object)"):
            tool_parser(str(folder))


@pytest.mark.parametrize(
    ("name", "tools", "thinking"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen/Qwen3-8B", "hermes", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "hermes", None),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", None),
        ("Qwen/Qwen3.5-27B", "qwen3_coder", "qwen3"),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama3_json", None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic", None),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2", None),
        ("moonshotai/Kimi-K2-Thinking", "kimi_k2", "kimi_k2"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", None, None),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes", None),
        ("somebody/something", None, None),
    ],
)
def test_of_a_model_that_is_not_at_hand_the_name_says_it(name, tools, thinking):
    assert both(name) == (tools, thinking)


def test_the_tiny_model_calls_as_hermes_does_and_does_not_think():
    assert both(str(TINY)) == ("hermes", None)


def test_what_is_chosen_wins_and_a_name_that_nobody_knows_is_refused_with_the_nearest():
    assert tool_parser(str(TINY), "xlam") == "xlam"
    assert (tool_parser(str(TINY), "none"), reasoning_parser(str(TINY), "none")) == (None, None)
    with pytest.raises(ConfigError, match="did you mean 'llama3_json'"):
        tool_parser(str(TINY), "llama3json")
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        reasoning_parser(str(TINY), "qwen")


def test_every_name_that_is_guessed_is_one_of_vllm_s():
    tools = {*CALLS_OF_TYPES.values(), *dict(WRITES_CALLS).values(), *(spoken.tools for _, spoken in NAMES)}
    thinking = {*THINKING_OF_TYPES.values(), *(spoken.thinking for _, spoken in NAMES)}
    assert tools - {None} <= TOOL_PARSERS
    assert thinking - {None} <= REASONING_PARSERS
