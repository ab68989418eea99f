"""Evaluates a model on held-out questions in-process, without a server or agent framework.

Tools, call limit and prompts are those of the real agent, so its results are the same up to noise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.email_search.mailbox import format_message, format_results, open_mailbox
from examples.email_search.tasks import MAX_MODEL_CALLS, SYSTEM_PROMPT, held_out_tasks
from tiny.demonstrations import OPENAI_TOOLS, ChatMessage, call, result

MAX_NEW_TOKENS = 64


@dataclass
class Run:
    """An attempt at one question."""

    task: dict[str, Any]
    messages: list[ChatMessage]
    answer: str | None = None
    malformed: bool = False
    read: bool = False
    calls: int = 0

    def unfinished(self) -> bool:
        return self.answer is None and not self.malformed and self.calls < MAX_MODEL_CALLS

    def act(self, text: str) -> None:
        """Execute the call in the model's answer."""
        number, self.calls = self.calls, self.calls + 1
        mailbox = open_mailbox(self.task["input"]["mailbox"])
        try:
            tool_call = json.loads(text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))
            name, arguments = tool_call["name"], tool_call["arguments"]
            match name:
                case "search_inbox":
                    output = format_results(mailbox.search(**arguments))
                case "read_email":
                    output = format_message(mailbox.read(int(arguments["id"])))
                    self.read |= int(arguments["id"]) == self.task["message_id"]
                case _:
                    self.answer = arguments["answer"].strip()
                    return
        except (ValueError, TypeError, KeyError, AttributeError):
            self.malformed = True
            return
        self.messages += [call(number, name, **arguments), result(number, output)]


def try_out(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: int, *, greedy: bool, seed: int = 0
) -> dict[str, float]:
    """Return the rates of ``success``, ``read`` (read the right message) and ``malformed`` on held-out questions."""
    torch.manual_seed(seed)
    model.eval()
    start = {"role": "system", "content": SYSTEM_PROMPT}
    runs = [Run(task, [start, *task["input"]["messages"]]) for task in held_out_tasks(questions, seed)]
    while live := [run for run in runs if run.unfinished()]:
        for run, text in zip(live, _generate(model, tokenizer, live, greedy), strict=True):
            run.act(text)
    return {
        "success": sum(run.answer == run.task["answer"] for run in runs) / questions,
        "read": sum(run.read for run in runs) / questions,
        "malformed": sum(run.malformed for run in runs) / questions,
    }


def _generate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, runs: list[Run], greedy: bool) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(run.messages, tools=OPENAI_TOOLS, add_generation_prompt=True, tokenize=False)
        for run in runs
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **sampling)[:, batch["input_ids"].shape[1] :]
    ended = tokenizer.eos_token
    return [text.split(ended)[0] for text in tokenizer.batch_decode(ids, skip_special_tokens=False)]
