"""What comes with a model: its chat template, and the files that say which formats it speaks (``engine.chat``, ``formats``)."""

from __future__ import annotations

import copy
import json
import re
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import art_embedded.chat
from art_core.config import model_folder
from art_core.errors import ConfigError, UpstreamError
from art_core.learner.pretrained import load_generation_config, load_tokenizer
from art_embedded.chat import Chat
from art_embedded.formats import THINKING
from art_embedded.loading import stop_ids
from art_embedded.parsers import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser, tool_parser
from fuzz.choices import Choices, changed, spell, spelled, written

SECONDS = 0.1
"""What a template may take here, in place of ``RENDER_SECONDS``."""
art_embedded.chat.RENDER_SECONDS = SECONDS
IN_ONE_STEP = re.compile(r"\*\s*\*|\*[^%}]*\d{5}|\d{5}[^%}]*\*")
"""Arithmetic of one step that may take for ever, which cannot be interrupted (docs/quality.md): not searched."""
LONGEST = 20_000
"""Letters of a prompt whose tokens are looked at."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECES = (
    "{% for m in messages %}", "{% endfor %}", "{{ m['role'] }}", "{{ m['content'] }}", "{{ m.content }}",
    "{% if add_generation_prompt %}",
    "{% endif %}", "{{ '<|im_start|>' }}", "{{ '<|im_end|>\\n' }}", "assistant", "{% for c in m.tool_calls %}",
    "{{ c.function | tojson }}",
    "{{ c.function.arguments }}", "{{ tools | tojson }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}",
    "{{ {}['a'] }}", "{{ 'a' + 1 }}",
    "{{ messages[99].content }}", "{{ nothing.at.all }}", "{% set ns = namespace(a=1) %}",
    "{% set ns.a = ns.a * 99 %}", "{% for i in range(99999) %}",
    "{% for i in range(9) %}", "{% macro f() %}", "{{ f() }}", "{% endmacro %}", "{% if ", " %}", "{{ ", " }}",
    "{% else %}", "| length", "| trim",
    "| join(',')", ".split('<')", "[1:]", "'a' * 9", "'%d' % 'a'", "''.__class__", "{% include 'x' %}",
    "{% generation %}", "{% break %}", "\n",
    "<tool_call>", "<think>", "</think>", "{{ strftime_now('%Y') }}", "\ud83d", "é", "{{ '\\ud800' }}",
    "{% set messages = messages[1:] %}",
    "{{ 10 * 9999 }}", "is defined", "is string", "loop.index0", "messages", "and", "not ",
    "[TOOL_CALLS]", "<function=", "<|channel|>", "<|tool_call|>", "tools", "thinking",
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
MESSAGES = [
    {"role": "system", "content": "s"}, {"role": "user", "content": "a <b>"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"}, {"role": "tool",
    "tool_call_id": "c", "content": "1"},
]  # fmt: skip
ANSWER = {"role": "assistant", "content": "b"}
FILES: dict[str, Any] = {
    "config.json": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "tokenizer_config.json": {
        "chat_template": [{"name": "default", "template": "{{ messages }}<tool_call>"}],
        "eos_token": "</s>",
    },
    "chat_template.json": {"chat_template": "<think>{% if not thinking %}</think>"},
}

SEEDS = [
    b"\x00" + spell(CHATML, PIECES),
    b"\x00" + spell("{% for m in messages %}{{ m['content'] }}{{ raise_exception('no') }}{% endfor %}", PIECES),
    b"\x00" + spell("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", PIECES),
    b"\x00" + spell("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", PIECES),
    b"\x01\x00\x00",
    b"\x01\x01\x00" + spell("{% if tools %}<tool_call><think>", PIECES),
    b"\x02\x00\x00\x00",
]


def one_input(data: bytes) -> None:
    choices = Choices(data)
    way = choices.byte() % 3
    if way:
        _check_formats(choices, beside=way == 2)
    else:
        _check_template(spelled(choices.rest(), PIECES))


def _check_template(template: str) -> None:
    if IN_ONE_STEP.search(template):
        return
    began = time.monotonic()
    tokenizer, ends = _tiny()
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    chat = Chat(tokenizer, ends)
    text = _render(chat, MESSAGES)
    if text == "late":
        return
    if isinstance(text, str) and len(text) < LONGEST:
        assert text.encode() is not None
        ids = chat.encode(text)
        assert ids == chat.encode(text) and all(0 <= it < len(tokenizer) for it in ids)
        if "strftime_now" not in template:
            again = _render(chat, MESSAGES)
            assert again in (text, "late"), "the same messages are the same prompt"
    try:
        said = chat.render_answer(MESSAGES, ANSWER, TOOLS)
    except UpstreamError as error:
        assert error.status == 400
    else:
        assert said.strip()
    assert time.monotonic() - began < 5 * SECONDS + 3, "a template ends"


def _render(chat: Chat, messages: list[dict[str, Any]]) -> str | None:
    """Return the prompt, None where it is refused, "late" where its time was up."""
    before = json.dumps(messages)
    try:
        return chat.render(copy.deepcopy(messages), TOOLS, {"enable_thinking": False})
    except UpstreamError as error:
        assert error.status == 400 and str(error)
        return "late" if "took longer than" in str(error) else None
    finally:
        assert json.dumps(messages) == before


def _check_formats(choices: Choices, *, beside: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, good in FILES.items():
            if choices.byte() % 4 != 3:
                content = written(changed(good, choices))
                (Path(folder) / name).write_bytes(content if choices.byte() % 8 != 7 else choices.some())
        if beside:
            template = spelled(choices.rest(), PIECES).encode(errors="surrogatepass")
            (Path(folder) / "chat_template.jinja").write_bytes(template)
        for ask, known in ((tool_parser, TOOL_PARSERS), (reasoning_parser, REASONING_PARSERS | THINKING.keys())):
            try:
                found = ask(folder)
            except ConfigError as error:
                assert folder in str(error), "which file it is"
            else:
                assert found is None or found in known


@cache
def _tiny() -> Any:
    folder = model_folder("tiny")
    tokenizer = load_tokenizer(folder)
    return tokenizer, stop_ids(load_generation_config(folder), tokenizer.eos_token_id)
