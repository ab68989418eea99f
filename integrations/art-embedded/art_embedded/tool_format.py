"""Tools for models whose chat template leaves them out: a Jinja prelude that writes them into the messages.

The prelude rewrites ``messages`` and is followed by the model's own template. So any template works, every engine renders
the same prompt, and an exported model keeps it. The format is that of Hermes: JSON between ``<tool_call>`` marks.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING

from art_core.errors import ConfigError
from art_embedded.overtime import interrupted_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_SECONDS = 10.0
"""Time limit of the template when it is asked whether it accepts a system message."""
SHOWN = re.compile(r"\btools\b")
"""In a template that shows tools."""
BEFORE = "You can call these functions:\n<tools>\n"
AFTER = (
    "</tools>\nTo call one, write its name and its arguments as JSON:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"the parameter": "its value"}}\n</tool_call>'
)
VALUES = {"integer": "1", "number": "1.5", "boolean": "true", "object": "{}", "null": "null"}
"""By JSON type, what stands for an argument in the demonstration; ``"some NAME"`` for every other."""
MARK = "{#- tools in the format of Hermes, written by art -#}"
"""At the start of an extended template."""
# Two example calls: a question that states all arguments, then, if some are optional, one that states the required ones. So a
# model learns to pass an optional argument if the question asks for it (docs/results.md).
PRELUDE = """\
{%- set art = namespace(messages=[], content='', joins=false) -%}
{%- if tools -%}
{%- set function = tools[0]['function'] or tools[0] -%}
{%- set shown = namespace(tools=BEFORE, pairs=[], said=[], exchange=[]) -%}
{%- for tool in tools -%}{%- set shown.tools = shown.tools + (tool | tojson) + '\\n' -%}{%- endfor -%}
{%- set shown.tools = shown.tools + AFTER -%}
{%- set parameters = function['parameters'] or {} -%}
{%- set schemas = parameters['properties'] or {} -%}
{%- set required = parameters['required'] or [] -%}
{%- set some_optional = required and (required | length) < (schemas | length) -%}
{%- for names in ([schemas, required] if some_optional else [schemas]) -%}
{%- set shown.pairs = [] -%}{%- set shown.said = [] -%}
{%- for name in names -%}
{%- set schema = schemas[name] or {} -%}
{%- set kind = schema['type'] | string -%}
{%- set value = VALUES[kind] or ('some ' ~ name) | tojson -%}
{%- if schema['enum'] -%}{%- set value = schema['enum'][0] | tojson -%}
{%- elif kind == 'array' -%}{%- set value = '[' + (VALUES[(schema['items'] or {})['type'] | string] or '"..."') + ']' -%}
{%- endif -%}
{%- set shown.pairs = shown.pairs + [(name | tojson) + ': ' + value] -%}
{%- set shown.said = shown.said + [name ~ ' ' ~ value] -%}
{%- endfor -%}
{%- set call = {'function': {'name': function['name'], 'arguments': '{' + shown.pairs | join(', ') + '}'}} -%}
{%- set question = 'Call ' + (function['name'] | string) + (' with ' if shown.said else '') + shown.said | join(', ') + '.' -%}
{%- if ROLE == 'user' and not shown.exchange -%}
{%- set question = shown.tools + '\\n\\n' + question -%}
{%- endif -%}
{%- set asked, answered = {'role': 'user', 'content': question}, {'role': 'assistant', 'content': '', 'tool_calls': [call]} -%}
{%- set shown.exchange = shown.exchange + [asked, answered] -%}
{%- endfor -%}
{%- if ROLE == 'user' -%}
{%- set messages = shown.exchange + messages -%}
{%- elif messages[0]['role'] == 'system' -%}
{%- set content = messages[0]['content'] or '' -%}
{%- if content is not string -%}{%- set content = content | map(attribute='text') | select | join('\\n') -%}{%- endif -%}
{%- set content = content + '\\n\\n' + shown.tools -%}
{%- set messages = [dict(messages[0], content=content)] + shown.exchange + messages[1:] -%}
{%- else -%}
{%- set messages = [{'role': 'system', 'content': shown.tools}] + shown.exchange + messages -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- set art.content = message['content'] or '' -%}
{%- if art.content is not string -%}
{%- set art.content = art.content | map(attribute='text') | select | join('\\n') -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set name, arguments = call['function']['name'] | tojson, call['function']['arguments'] or {} -%}
{%- set call = '{"name": ' + name + ', "arguments": ' + (arguments if arguments is string else arguments | tojson) + '}' -%}
{%- set art.content = art.content + ('\\n' if art.content else '') + '<tool_call>\\n' + call + '\\n</tool_call>' -%}
{%- endfor -%}
{%- set result = message['role'] == 'tool' -%}
{%- if result -%}
{%- set art.content = '<tool_response>\\n' + art.content + '\\n</tool_response>' -%}
{%- endif -%}
{%- if art.joins and message['role'] in ('tool', 'user') -%}
{%- set art.content = art.messages[-1]['content'] + '\\n' + art.content -%}{%- set art.messages = art.messages[:-1] -%}
{%- endif -%}
{%- set art.joins = result or (art.joins and message['role'] == 'user') -%}
{%- set kept = dict(message.items() | rejectattr(0, 'equalto', 'tool_calls')) -%}
{%- set art.messages = art.messages + [dict(kept, role='user' if result else message['role'], content=art.content)] -%}
{%- endfor -%}
{%- set messages = art.messages -%}{%- set tools = none -%}
"""
"""Results, and what the user says after them, become one message, because many templates require that roles alternate."""


def shows_tools(template: str) -> bool:
    """Whether a chat template writes the tools of a request into the prompt."""
    return SHOWN.search(template) is not None


def template_with_tools(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat template with the prelude: tools are in the system message, or, if the template refuses one, in
    the first user message. Raises ConfigError if the tokenizer has no single template."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        has = "several chat templates" if template else "no chat template"
        raise ConfigError(
            f"{tokenizer.name_or_path} has {has}, which tool_format can't extend; drop tool_format=, or save one chat template "
            "with the tokenizer"
        )
    probe, role = "A system message?", "user"
    try:
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "Hi"}]
        render = functools.partial(tokenizer.apply_chat_template, messages, tokenize=False)
        if probe in interrupted_after(PROBE_SECONDS, render):
            role = "system"
    except Exception:  # noqa: BLE001 - the template is the model's own code; many raise for a system message
        pass
    prelude = PRELUDE
    for name, value in (("BEFORE", BEFORE), ("AFTER", AFTER), ("ROLE", role), ("VALUES", VALUES)):
        prelude = prelude.replace(name, json.dumps(value))
    return MARK + prelude + template
