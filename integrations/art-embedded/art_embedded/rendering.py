"""Recorded conversations -> calls with token ids, for those whose tokens nobody kept: another model led them.

Knows nothing about where conversations come from. What is made here was sampled by no policy, and says so: its
``policy_version`` is -1 and its logprobs are 0. It can be judged and imitated (``Run.learn_sft``); ``Run.learn`` refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError, UpstreamError
from art_core.types import Call, JsonDict

NO_POLICY = -1
"""``Call.policy_version`` where another model answered."""


class Renderer:
    """The chat template and tokenizer of the model that shall be trained; a later call of a conversation continues the ids of
    the earlier ones, as it does where the engine serves it. Raises ConfigError where ``model`` has none."""

    def __init__(self, model: str) -> None:
        from art_core.learner.pretrained import load_config, load_generation_config, load_tokenizer, positions
        from art_embedded.chat import Chat
        from art_embedded.formats import find_formats
        from art_embedded.loading import stop_ids

        self.model, folder = model, model_folder(model)
        tokenizer = load_tokenizer(folder)
        ends = stop_ids(load_generation_config(folder), tokenizer.eos_token_id)
        self._chat = Chat(tokenizer, ends, find_formats(folder, TrainConfig(model=model)))
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
        """Return the call in which a model was shown ``messages`` and answered ``answer``, all in OpenAI's form. ``settings`` are
        what else was in the request.

        The end of the turn is part of what was answered. Raises ConfigError for what the model cannot be shown: the template
        refuses it, writes it otherwise as an answer than after its own prompt, it is longer than the model's context, or one of
        the model's control tokens stands in it as text, which would end the turn there, or begin another's.
        """
        try:
            text = self._chat.render(list(messages), list(tools) if tools else None, {})
            said = self._chat.render_answer(list(messages), answer, list(tools) if tools else None)
            control = self._chat.control_token([*messages, answer], tools)
        except UpstreamError as error:
            raise ConfigError(f"{self.model}: {error}") from error
        if control:
            raise ConfigError(f"{self.model}: its control token {control} stands in the conversation as text")
        prompt, sampled = self._chat.encode(text), self._chat.answer_ids(said)
        if self._limit and len(prompt) + len(sampled) > self._limit:
            raise ConfigError(f"{self.model}: {len(prompt) + len(sampled)} tokens are more than its {self._limit}")
        self._chat.remember(text, prompt, sampled)
        request = {**settings, "messages": list(messages), **({"tools": list(tools)} if tools else {})}
        return Call(
            prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=(0.0,) * len(sampled), policy_version=NO_POLICY,
            agent=agent, request_id=request_id, request=request, response=dict(answer),
            finish_reason="tool_calls" if answer.get("tool_calls") else "stop",
        )  # fmt: skip
