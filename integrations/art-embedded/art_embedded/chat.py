"""Renders messages to prompt ids with the tokenizer's chat template, and decodes sampled ids to text.

Remembers the ids that a text was sampled as: when a conversation comes back with its answer, the prompt continues those
ids, because tokenizing the text again may give others.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from art_core.types import JsonDict
from art_embedded.formats import HERMES, Formats
from art_embedded.overtime import Overtime, interrupted_after
from art_embedded.requests import refuse
from art_embedded.tool_format import shows_tools

log = logging.getLogger("art_core.engine")

RENDER_SECONDS = 10.0
"""Time limit of a chat template, which runs in the event loop that answers all calls."""
REMEMBERED = 1024
"""Number of texts whose ids are kept."""
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Part of the text even if the tokenizer marks them as special and they aren't in the formats that the engine parses."""
REPLACEMENT = "�"


class Chat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], formats: Formats = HERMES) -> None:
        self.tokenizer = tokenizer
        known = tokenizer.get_vocab()
        markers = {known[marker] for marker in (*MARKERS, *formats.markers) if marker in known}
        self._markers = markers
        self._hidden = (set(tokenizer.all_special_ids) | stop_ids) - markers
        ends = [tokenizer.convert_ids_to_tokens(stop_id) for stop_id in sorted(stop_ids)]
        self._ends = {end for end in ends if end is not None and self._splits_at(end)}
        self._texts: OrderedDict[str, list[int]] = OrderedDict()
        template = tokenizer.chat_template
        self._drops_tools = isinstance(template, str) and not shows_tools(template)
        """Whether to warn of tools that the model isn't shown; once."""
        self._takes_text_arguments = bool(tokenizer.chat_template) and self._accepts_text_arguments()
        self._joins_parts_of = {role for role in ("system", "user", "assistant") if self._joins_parts(role)}

    def render(
        self, messages: list[JsonDict], tools: list[JsonDict] | None, arguments: JsonDict, *, answered: bool = False
    ) -> str:
        """Return the prompt's text; with ``answered``, the text of a conversation that ends with the answer.

        Raises UpstreamError 400 if the template can't render the messages.
        """
        if not self.tokenizer.chat_template:
            raise refuse(
                f"{self.tokenizer.name_or_path} has no chat template, so messages can't be rendered; "
                "use an instruction-tuned model, or save a chat template with its tokenizer"
            )
        if tools and self._drops_tools:
            self._drops_tools = False
            log.warning(
                "requests have tools, but the model's chat template leaves them out, so the model doesn't see them; pass "
                "tool_format='hermes', or send no tools"
            )
        plain = [self._plain(message) for message in messages]
        try:
            text = interrupted_after(RENDER_SECONDS, lambda: self._apply(plain, tools, arguments, answered))
        except Overtime as error:
            raise refuse(
                f"the model's chat template took longer than {RENDER_SECONDS:g} s for these messages; send fewer or shorter ones"
            ) from error
        except Exception as error:  # the template is the model's own code
            raise refuse(f"the model's chat template can't render these messages: {error}") from error
        # Models sometimes write a lone UTF-16 surrogate into a call's JSON, which can't be tokenized.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def render_answer(self, messages: list[JsonDict], answer: JsonDict, tools: list[JsonDict] | None) -> str:
        """Return the text that the template adds for ``answer`` to the prompt of ``messages``, up to the end of the turn.

        Raises UpstreamError 400 if that is empty, or if the template changes the prompt once it has an answer.
        """
        prompt = self.render(messages, tools, {})
        answered_text = self.render([*messages, answer], tools, {}, answered=True)
        if not answered_text.startswith(prompt):
            raise refuse(
                "the model's chat template renders the prompt differently once it has an answer, so the answer can't be isolated"
            )
        text = answered_text[len(prompt) :]
        end = max((text.rfind(end) + len(end) for end in self._ends if end in text), default=len(text))
        if not text[:end].strip():
            raise refuse("the model's chat template renders nothing for this answer")
        return text[:end]

    def control_token(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] | None) -> str | None:
        """Return a control token, such as the end of a turn, that the messages or tools contain as text, or None.

        Rendered, that text would become the token.
        """
        joined = ["".join(_texts(message.get("content"))) for message in messages]  # as some templates join parts
        text = "\0".join(_strings([*map(self._plain, messages), joined, tools]))
        return next((token for token in self._control_tokens if token in text), None)

    @functools.cached_property
    def _control_tokens(self) -> list[str]:
        special = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        tokens = self.tokenizer.convert_ids_to_tokens(sorted(self._hidden | special - self._markers))
        return [token for token in tokens if token]

    def _apply(
        self,
        messages: list[JsonDict],
        tools: list[JsonDict] | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        answered: bool = False,
    ) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=not answered, tokenize=False, **arguments
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered prompt; they continue those of the longest remembered conversation in it."""
        known, start = self._texts.get(text), len(text)
        if known is None:
            known, start = self._remembered_prefix(text)
            known = known + self._tokenize(text[start:])
            self._remember(text, known)
        return known

    def answer_ids(self, text: str) -> list[int]:
        """Return the ids of a rendered answer, tokenized separately: a sampled answer begins with a new token."""
        return self._tokenize(text)

    def raw_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the ids of a raw completion's prompt, with the tokens that the tokenizer puts before a text."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return prompt

    def _remembered_prefix(self, text: str) -> tuple[list[int], int]:
        cuts = []
        for end in self._ends:
            position = text.find(end)
            while position >= 0:
                cuts.append(position + len(end))
                position = text.find(end, position + 1)
        for cut in sorted(cuts, reverse=True):
            known = self._texts.get(text[:cut])
            if known is not None:
                return known, cut
        return [], 0

    def remember(self, text: str, prompt: list[int], sampled: Sequence[int]) -> None:
        """Remember the ids of a conversation with its answer, if the answer ended by itself."""
        answer = self.tokenizer.decode(list(sampled), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if REPLACEMENT not in answer and any(answer.endswith(end) for end in self._ends):
            self._remember(text + answer, [*prompt, *sampled])

    def _remember(self, text: str, ids: list[int]) -> None:
        if self._texts.get(text, ids) != ids:
            # The same text was sampled as other tokens before: forget its continuations, which would be found first.
            for longer in [known for known in self._texts if known.startswith(text)]:
                del self._texts[longer]
        self._texts[text] = ids
        self._texts.move_to_end(text)
        if len(self._texts) > REMEMBERED:
            self._texts.popitem(last=False)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for the client: without the end of turn and other special tokens."""
        visible = [token for token in ids if token not in self._hidden]
        return self.tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _splits_at(self, end: str) -> bool:
        """Return whether text after ``end`` has the same ids on its own as after ``end``."""
        return all(
            self._tokenize("a" + end) + self._tokenize(rest) == self._tokenize("a" + end + rest)
            for rest in ("\n", "\nb", "b", " b", f"\n{end}b")
        )

    def _plain(self, message: JsonDict) -> JsonDict:
        """Return the message as templates expect it.

        Content is a string, or several text parts if the template joins them; tool arguments are a mapping if the template needs
        one, and thinking is in ``reasoning_content``.
        """
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse(f"a message must be an object with a role, got {message!r}")
        role = "system" if message["role"] == "developer" else message["role"]
        plain = {**message, "role": role, "content": self._plain_content(role, message.get("content"))}
        if message.get("reasoning") and not message.get("reasoning_content"):
            plain["reasoning_content"] = message["reasoning"]
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise refuse(f"a message's tool_calls must be a list, got {calls!r:.200}")
            plain["tool_calls"] = [self._plain_call(call) for call in calls]
        return plain

    def _plain_content(self, role: str, content: Any) -> str | list[JsonDict]:
        """Return several text parts as they are if the template joins them, else those with text as lines, as vLLM does."""
        texts = _texts(content)
        return _parts(texts) if len(texts) > 1 and role in self._joins_parts_of else "\n".join(filter(None, texts))

    def _plain_call(self, call: Any) -> JsonDict:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict | None):
            raise refuse(f"a message's tool call must be an object with a function, got {call!r:.200}")
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._takes_text_arguments:
            with suppress(
                ValueError, RecursionError
            ):  # malformed, an integer too long for Python, or nested too deeply
                function["arguments"] = json.loads(arguments)
        return {**call, "function": function}

    def _accepts_text_arguments(self) -> bool:
        """Return whether the template accepts arguments as JSON text, without quoting them again."""
        function = {"name": "f", "arguments": '{"a":  1}'}
        call = {"id": "call_1", "type": "function", "function": function}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return function["arguments"] in self._tried(messages)

    def _joins_parts(self, role: str) -> bool:
        """Return whether the template shows all text parts of a message, and not as JSON."""
        message, user = {"role": role, "content": _parts(["Hello", "there"])}, {"role": "user", "content": "Hi"}
        text = self._tried({"system": [message, user], "user": [message], "assistant": [user, message, user]}[role])
        return all(shown in text for shown in ("Hello", "there")) and not any(
            key in text for key in ("'text'", '"text"')
        )

    def _tried(self, messages: list[JsonDict]) -> str:
        """Return what the template renders, or nothing if it can't."""
        try:
            return interrupted_after(RENDER_SECONDS, lambda: self._apply(messages))
        except Exception:  # noqa: BLE001 - ``render`` will report the error
            return ""


def _parts(texts: Sequence[str]) -> list[JsonDict]:
    return [{"type": "text", "text": text} for text in texts]


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise refuse(f"message content must be a string or a list of text parts, got {content!r}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise refuse(
                f"a message has a part of type {kind!r}, but the embedded engine serves text models only; send text parts"
            )
        if not isinstance(part.get(kind), str):
            raise refuse(f"{kind!r} of a message part must be a string, got the part {part!r:.200}")
        texts.append(part[kind])
    return texts


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item


class Detokenizer:
    """Decodes ids to text as soon as it is certain, never half a character."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._context = 0
        """Where decoding starts: before new ids, because some tokenizers decode a token differently at the start of a text."""
        self._read = 0
        """Number of ids whose text was already returned."""

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that ``ids`` complete; with ``final``, all remaining text."""
        self._ids += ids
        before = self._chat.decode(self._ids[self._context : self._read])
        text = self._chat.decode(self._ids[self._context :])
        if text.endswith(REPLACEMENT) and not final:
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]
