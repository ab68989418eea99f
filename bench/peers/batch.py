"""One group of rollouts in every form that a side needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from art_core.token_tree import build_tree
from art_core.types import TokenTree
from art_embedded import TINY
from bench.plain import Row
from bench.synthetic import TEMPLATE, ChatCall, TokenCall, chat_group, token_calls, trajectories_of


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tiny model's tokenizer with a template that never rewrites the history."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 10**9
    return tokenizer


@dataclass(frozen=True)
class Batch:
    """One batch. Every side has the same objective: the mean over all sampled tokens of -advantage * ratio, with ratio 1."""

    chats: list[list[ChatCall]]
    runs: list[list[TokenCall]]
    rewards: list[float]
    advantages: list[float]
    """Per rollout: (reward - mean) / (standard deviation + 1e-6), as in ART."""
    calls: list[Row]
    """One per call."""
    histories: list[Row]
    """One per conversation that no other one of its rollout continues; every sampled token is trained in one of them."""
    tree: TokenTree

    @property
    def trained(self) -> int:
        return sum(int(row.trained.sum()) for row in self.calls)


def make_batch(
    tokenizer: PreTrainedTokenizerBase, *, style: str, group_size: int, max_turns: int, seed: int = 3
) -> Batch:
    chats = chat_group(tokenizer, seed=seed, style=style, size=group_size, max_turns=max_turns)
    runs = [token_calls(tokenizer, run) for run in chats]
    rng = random.Random(seed)
    rewards = [rng.random() for _ in runs]
    advantages = ((np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)).tolist()
    rated = list(zip(runs, advantages, strict=True))
    histories = [row for run, advantage in rated for row in history_rows(run, advantage)]
    rng.shuffle(histories)  # sorted rows would have less padding than in practice
    return Batch(
        chats, runs, rewards, advantages, [call_row(call, advantage) for run, advantage in rated for call in run],
        histories, build_tree(trajectories_of(runs, rewards), token_mean(runs, advantages)),
    )  # fmt: skip


def token_mean(runs: Sequence[Sequence[TokenCall]], advantages: Sequence[float]) -> list[float]:
    """Return advantages for which GRPO's mean over rollouts of means over tokens is the mean over all tokens."""
    sizes = [sum(len(call.sampled) for call in run) for run in runs]
    return [advantage * size * len(runs) / sum(sizes) for advantage, size in zip(advantages, sizes, strict=True)]


def call_row(call: TokenCall, advantage: float = 1.0) -> Row:
    trained = np.zeros(len(call.prompt) + len(call.sampled), dtype=bool)
    trained[len(call.prompt) :] = True
    return Row(call.prompt + call.sampled, trained, advantage)


def history_rows(run: Sequence[TokenCall], advantage: float = 1.0) -> list[Row]:
    """Return one row per token sequence that is not a prefix of another one of the rollout."""
    ordered = sorted({call.prompt + call.sampled for call in run})
    following = [*ordered[1:], ()]
    leaves = [row for row, later in zip(ordered, following, strict=True) if later[: len(row)] != row]
    masks = [np.zeros(len(leaf), dtype=bool) for leaf in leaves]
    for call in run:
        whole = call.prompt + call.sampled
        home = next(number for number, leaf in enumerate(leaves) if leaf[: len(whole)] == whole)
        masks[home][len(call.prompt) : len(whole)] = True
    return [Row(leaf, mask, advantage) for leaf, mask in zip(leaves, masks, strict=True) if mask.any()]


def trie_size(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens with every shared prefix counted once; computed without art_core's tree."""
    total, before = 0, ()
    for row in sorted(map(tuple, rows)):
        limit = min(len(before), len(row))
        shared = next((place for place in range(limit) if before[place] != row[place]), limit)
        total += len(row) - shared
        before = row
    return total
