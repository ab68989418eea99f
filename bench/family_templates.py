"""Chat templates in the style of the model families, written for the tiny models of ``family_models.py``.

Each has the markers and the order of its family's template, and omits from earlier turns what that omits; it lacks its prose.
"""

from __future__ import annotations

ARGUMENTS = r"""{%- macro arguments(call) -%}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{%- endmacro %}"""
CHATML_TOOLS = r"""
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}"""
HERMES_CALLS = r"""
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + arguments(call) + '}\n</tool_call>' }}
{%- endfor %}"""

CHATML = (
    ARGUMENTS
    + CHATML_TOOLS
    + r"""
{%- for message in messages %}{{- '<|im_start|>' }}
{%- if message.role == 'tool' %}{{- 'user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}{{- message.role + '\n' + message.content }}"""
    + HERMES_CALLS
    + r"""
{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
"""Qwen2.5: tool results are shown as user messages."""

QWEN3 = (
    ARGUMENTS
    + CHATML_TOOLS
    + r"""
{%- set asked = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{{- '<|im_start|>' }}
{%- if message.role == 'tool' %}{{- 'user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}{{- message.role + '\n' }}
{%- if message.role == 'assistant' and loop.index0 > asked.last and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- message.content }}"""
    + HERMES_CALLS
    + r"""
{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)
"""Qwen3: thinking is shown only after the last question, and only if the agent sends it back."""

LLAMA3 = (
    ARGUMENTS
    + r"""
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}
{{- '{"name": function name, "parameters": its arguments}' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call in an answer') }}{%- endif %}
{%- set call = message.tool_calls[0] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + arguments(call) + '}' }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
)
"""Llama 3.1 and 3.2: one call is the whole answer, without markers."""

KIMI = (
    ARGUMENTS
    + r"""
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_' + ('system' if message.role == 'tool' else message.role) + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\n' }}{%- endif %}{{- message.content }}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + arguments(call) + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
)
"""Kimi K2: a call is shown by its id, which names the function."""

MOONLIGHT = r"""{%- for message in messages %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
"""Moonlight: no tools."""

MISTRAL = (
    ARGUMENTS
    + r"""
{{- '<s>' }}{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{%- if not loop.first %}{{- ', ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + arguments(call) + '}' }}{%- endfor %}{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
{%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}"""
)
"""Mistral 7B v0.3 and later: calls are a list after one marker."""

GEMMA = r"""{{- '<bos>' }}{%- for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + message.content + '<end_of_turn>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
"""Gemma 2 and 3: no tools."""

GRANITE = r"""{%- for message in messages %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
"""Granite 3, without its tools."""
