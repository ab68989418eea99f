"""Made-up rollouts: as chats, because some peers require chats, or as random token ids of a given total."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from art_core.types import Call, JsonDict, Trajectory

TEXT = """
    about after again agree answer before board bring budget build call change check city clear close contract cost
    country course date day decide desk detail draft early east end even every fact fast few field file find first
    follow form found garden give good green group half hand head help home hour house idea inside item keep kind land
    large last late lead left letter light line list long look mail make map mark meet mind money month moon morning
    move name near need new next night north note number office often open order page paper part pay people place plan
    point price project question quiet rain reach read reason record reply report rest result river road room round
"""
WORDS = TEXT.split()
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Never rewrites the history, so that a later prompt extends the earlier ones."""
TOOLS: list[JsonDict] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for name, description in (("search", "Search the records"), ("read", "Read one record"), ("ask", "Ask a colleague"))
]


@dataclass(frozen=True)
class ChatCall:
    """A model call as the agent sees it."""

    messages: tuple[JsonDict, ...]
    reply: JsonDict


@dataclass(frozen=True)
class TokenCall:
    """The same call as a server sees it."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass
class Author:
    """Writes one rollout after the other.

    ``style`` is a set of: ``text`` (actions are plain text and results user messages; else tool calls), ``fork`` (side
    questions on the same history, discarded afterwards), ``subagent`` (a helper with its own prompt).
    """

    tokenizer: PreTrainedTokenizerBase
    rng: random.Random
    style: frozenset[str]
    tool_calls: int = 0

    def __post_init__(self) -> None:
        self.tokens_per_word = len(self.tokenizer.encode(" ".join(WORDS), add_special_tokens=False)) / len(WORDS)

    def words(self, least: int, most: int | None = None) -> str:
        """Return text of about ``least`` tokens, or up to ``most``."""
        tokens = self.rng.randint(least, most or least)
        return " ".join(self.rng.choice(WORDS) for _ in range(max(1, round(tokens / self.tokens_per_word))))

    def reply(self, *, acts: bool) -> JsonDict:
        if not acts:
            return {"role": "assistant", "content": self.words(40, 120)}
        thought, query = self.words(15, 60), self.words(5, 20)
        if "text" in self.style:
            return {"role": "assistant", "content": f"{thought} search {query}"}
        self.tool_calls += 1
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        tool_call = {"id": f"call{self.tool_calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": thought, "tool_calls": [tool_call]}

    def result(self, reply: JsonDict) -> JsonDict:
        if "tool_calls" not in reply:
            return {"role": "user", "content": self.words(40, 220)}
        return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": self.words(40, 220)}

    def run(self, system: str, task: str, turns: int) -> list[ChatCall]:
        """Return the calls of one rollout; the last of ``turns`` answers, the others act."""
        calls: list[ChatCall] = []
        history = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        for turn in range(turns):
            reply = self._ask(calls, history, acts=turn + 1 < turns)
            history.append(reply)
            if turn + 1 == turns:
                break
            history.append(self.result(reply))
            if "fork" in self.style and self.rng.random() < 0.3:
                self._aside(calls, [*history, {"role": "user", "content": self.words(20, 60)}])
            if "subagent" in self.style and self.rng.random() < 0.25:
                helper = {"role": "system", "content": "helper: " + system[: len(system) // 2]}
                self._aside(calls, [helper, {"role": "user", "content": self.words(30, 80)}])
        return calls

    def _ask(self, calls: list[ChatCall], history: Sequence[JsonDict], *, acts: bool) -> JsonDict:
        calls.append(ChatCall(tuple(history), self.reply(acts=acts)))
        return calls[-1].reply

    def _aside(self, calls: list[ChatCall], history: list[JsonDict]) -> None:
        for _ in range(self.rng.randint(1, 3)):
            reply = self._ask(calls, history, acts=True)
            history += [reply, self.result(reply)]
        self._ask(calls, history, acts=False)


def chat_group(
    tokenizer: PreTrainedTokenizerBase, *, seed: int, style: str, size: int, max_turns: int
) -> list[list[ChatCall]]:
    """Return ``size`` rollouts of 4 to ``max_turns`` turns that share a system prompt (400 tokens) and a task (100)."""
    author = Author(tokenizer, random.Random(seed), frozenset(style.split("+")))
    system, task = author.words(400), author.words(100)
    return [author.run(system, task, author.rng.randint(min(4, max_turns), max_turns)) for _ in range(size)]


def token_calls(tokenizer: PreTrainedTokenizerBase, calls: Sequence[ChatCall]) -> list[TokenCall]:
    """Render and encode calls as a server would: the prompt, and the sampled tokens."""

    def render(messages: Sequence[JsonDict], **options: Any) -> str:
        return tokenizer.apply_chat_template(list(messages), tools=TOOLS, tokenize=False, **options)

    encoded = []
    for call in calls:
        prompt = render(call.messages, add_generation_prompt=True)
        sampled = render([*call.messages, call.reply]).removeprefix(prompt).rstrip("\n")
        ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, sampled)]
        encoded.append(TokenCall(*ids))
    return encoded


def trajectories_of(
    runs: Sequence[Sequence[TokenCall]], rewards: Sequence[float], chats: Sequence[Sequence[ChatCall]] | None = None
) -> list[Trajectory]:
    """Return the rollouts as art_core's capture would record them."""
    trajectories = []
    for number, (run, reward) in enumerate(zip(runs, rewards, strict=True)):
        seen = chats[number] if chats else [None] * len(run)
        calls = tuple(_call(tokens, chat) for tokens, chat in zip(run, seen, strict=True))
        trajectories.append(Trajectory(task="synthetic", calls=calls, reward=reward, rollout_id=f"run{number}"))
    return trajectories


def _call(tokens: TokenCall, chat: ChatCall | None) -> Call:
    request = {"messages": list(chat.messages), "tools": TOOLS, "model": "policy"} if chat else {}
    return Call(
        prompt_ids=tokens.prompt, sampled_ids=tokens.sampled, logprobs=(-0.5,) * len(tokens.sampled), request=request,
        response=chat.reply if chat else {},
    )  # fmt: skip


def random_trajectories(
    tokens: int, vocabulary: int, *, runs: int = 8, turns: int = 4, seed: int = 0
) -> list[Trajectory]:
    """Return rollouts whose tree has ``tokens`` tokens: an eighth is the shared prompt, a third of the rest is sampled."""
    rng = np.random.default_rng(seed)
    prompt = tokens // 8
    shared = rng.integers(0, vocabulary, prompt).tolist()
    bounds = np.linspace(prompt, tokens, runs + 1).astype(int)
    trajectories = []
    for number, length in enumerate(np.diff(bounds)):
        own = rng.integers(0, vocabulary, length)
        own[0] = number  # all start differently, so that nothing more is shared by chance
        calls, ends = [], np.linspace(0, length, turns + 1).astype(int)
        for start, end in pairwise(ends):
            sampled = own[end - max(1, (end - start) // 3) : end].tolist()
            context = shared + own[: end - len(sampled)].tolist()
            calls.append(Call(prompt_ids=tuple(context), sampled_ids=tuple(sampled), logprobs=(-1.0,) * len(sampled)))
        trajectories.append(Trajectory(task="synthetic", calls=tuple(calls), reward=float(number)))
    return trajectories
