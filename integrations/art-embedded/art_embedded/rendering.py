"""Turns recorded conversations without token ids, such as another model's, into calls.

No policy sampled these calls, so their ``policy_version`` is -1 and their logprobs are 0. They can be judged and imitated
(``Run.learn_sft``); ``Run.learn`` rejects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art_core import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.plugin_api import model_folder
from art_core.types import Call, JsonDict

NO_POLICY = -1
"""``Call.policy_version`` of another model's answer."""


class Renderer:
    """Renders conversations with the chat template and tokenizer of the model to train.

    Later calls of a conversation continue the ids of earlier ones, as they do in the engine. ``tool_format`` is the run's
    setting. Raises ConfigError if ``model`` has no tokenizer.
    """

    def __init__(self, model: str, tool_format: str | None = None) -> None:
        from art_core.learner.pretrained import load_config, load_generation_config, load_tokenizer, positions
        from art_embedded.chat import Chat
        from art_embedded.formats import find_formats
        from art_embedded.loading import stop_ids
        from art_embedded.parsers import extend_template

        self.model, folder = model, model_folder(model)
        tokenizer = load_tokenizer(folder)
        extend_template(tokenizer, folder, tool_format)
        ends = stop_ids(load_generation_config(folder), tokenizer.eos_token_id)
        self._chat = Chat(tokenizer, ends, find_formats(folder, TrainConfig(model=model, tool_format=tool_format)))
        self._limit = positions(load_config(folder))

    def call(
        self,
        messages: Sequence[JsonDict],
        answer: JsonDict,
        *,
        tools: Sequence[JsonDict] | None = None,
        agent: str | None = None,
        request_id: str = "",
        **settings: Any,
    ) -> Call:
        """Return the call with the prompt ``messages`` and the answer ``answer``, both in OpenAI's format.

        ``settings`` are further fields of the request. The sampled ids include the end of the turn. Raises ConfigError if the
        template rejects the messages or renders the prompt differently once it has an answer, if the call exceeds the model's
        context, or if it contains one of the model's control tokens as text, which would end the turn or start another.
        """
        try:
            text = self._chat.render(list(messages), list(tools) if tools else None, {})
            answer_text = self._chat.render_answer(list(messages), answer, list(tools) if tools else None)
            control = self._chat.control_token([*messages, answer], tools)
        except UpstreamError as error:
            raise ConfigError(f"{self.model}: {error}") from error
        if control:
            raise ConfigError(f"{self.model}: the conversation contains the control token {control} as text; remove it")
        prompt, sampled = self._chat.encode(text), self._chat.answer_ids(answer_text)
        if self._limit and len(prompt) + len(sampled) > self._limit:
            raise ConfigError(
                f"{self.model}: the call has {len(prompt) + len(sampled)} tokens, but the context is limited to {self._limit}"
            )
        self._chat.remember(text, prompt, sampled)
        request = {**settings, "messages": list(messages), **({"tools": list(tools)} if tools else {})}
        return Call(
            prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=(0.0,) * len(sampled), policy_version=NO_POLICY,
            agent=agent, request_id=request_id, request=request, response=dict(answer),
            finish_reason="tool_calls" if answer.get("tool_calls") else "stop",
        )  # fmt: skip
