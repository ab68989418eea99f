"""Tokens to compute for groups of rollouts, compared with the peers' packing, and the time from stored calls to tensors."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from art_core.store import Store
from art_core.token_tree import build_tree
from art_core.types import TokenTree, Trajectory
from bench import tree as ours
from bench.peers import areal_side, art_side, tree_row
from bench.peers.batch import history_rows, load_tokenizer, trie_size
from bench.synthetic import ChatCall, TokenCall, chat_group, token_calls, trajectories_of
from bench.tables import table, unless_left_out

STYLES = ("text", "tools", "tools/sdk", "text+fork", "tools+fork", "tools+fork+subagent", "tools+fork+subagent/sdk")
"""``/sdk``: assistant messages are sent back as the OpenAI client's objects; this matters only for ART."""

TREE_ROW, ART_ROWS, ART_PACKED, AREAL = "TRL TreeRow", "ART one history per row", "ART packed", "AReaL tree"
NAN = float("nan")


@dataclass(frozen=True)
class Groups:
    """Groups of rollouts in one style."""

    chats: list[list[list[ChatCall]]]
    runs: list[list[list[TokenCall]]]
    rewards: list[list[float]]

    @property
    def calls(self) -> list[list[tuple[int, ...]]]:
        """Per group: the tokens of every call."""
        return [[call.prompt + call.sampled for run in group for call in run] for group in self.runs]


def run(options: Namespace) -> None:
    """Print the tables of tokens and times."""
    tokenizer = load_tokenizer()
    tokens, live, times = [], [], []
    styles = options.styles.split(",") if options.styles else STYLES
    for style in styles:
        groups = make_groups(tokenizer, style.split("/")[0], options.groups, options.group_size, options.max_turns)
        calls = [call for group in groups.calls for call in group]
        skip, sdk = options.skip, style.endswith("/sdk")
        art = unless_left_out(ART_PACKED, skip, measure_art, tokenizer, groups, options, sdk) or ArtFigures()
        row_tokens = unless_left_out(TREE_ROW, skip, tree_row_tokens, groups, options.row) or NAN
        areal = unless_left_out(AREAL, skip, areal_side.count, calls, options.row) or (NAN, NAN)
        trees, seconds = measure_ours(groups, options.repeats)
        unique = sum(trie_size(group) for group in groups.calls)
        called = sum(map(len, calls))
        histories = sum(len(row.ids) for group in groups.runs for run in group for row in history_rows(run))
        computed = [
            called, histories, row_tokens, *art.areas, areal[1], ours.computed_tokens(trees),
            ours.packed_tokens(trees, options.row),
        ]  # fmt: skip
        tokens.append([style, unique, *(it / unique for it in computed)])
        live.append([style, art.live / unique, areal[0] / unique])
        micro = [1e6 * it for it in (art.seconds, sum(seconds))]
        times.append([
            style, micro[0] / called, *(1e6 * it / called for it in seconds), micro[1] / called, micro[0] / art.live,
            micro[1] / unique,
        ])  # fmt: skip
        print(f"measured {style}", file=sys.stderr, flush=True)
    print_tables(options, tokens, live, times)


def print_tables(options: Namespace, tokens: list[list], live: list[list], times: list[list]) -> None:
    print(
        f"\n## Tokens to compute, per unique token\n\n{options.groups} groups of {options.group_size} rollouts; padding "
        f"included; packed rows of {options.row} tokens\n"
    )
    head = [
        "style",
        "unique tokens",
        "calls",
        "histories",
        TREE_ROW,
        ART_ROWS,
        ART_PACKED,
        AREAL,
        "ours",
        "ours packed",
    ]
    print(table(head, tokens))
    print(f"\nWithout padding\n\n{table(['style', ART_PACKED, AREAL], live)}")
    print(
        f"\n## Microseconds from stored calls to tensors\n\nBest of {options.repeats}. ART: tokenizing and packing what it "
        "has in memory. Ours: run.sqlite from the disk cache (read), tree (build), torch tensors.\n"
    )
    head = ["style", "ART / call token", "ours read", "ours build", "ours tensors", "ours / call token"]
    print(table([*head, "ART / its live token", "ours / unique token"], times), flush=True)


def make_groups(tokenizer: Any, style: str, groups: int, size: int, max_turns: int) -> Groups:
    chats = [chat_group(tokenizer, seed=seed, style=style, size=size, max_turns=max_turns) for seed in range(groups)]
    runs = [[token_calls(tokenizer, run) for run in group] for group in chats]
    rng = random.Random(0)
    return Groups(chats, runs, [[rng.random() for _ in group] for group in chats])


@dataclass(frozen=True)
class ArtFigures:
    """ART's figures for the groups; NaN without ART."""

    areas: tuple[float, float] = (NAN, NAN)
    """Tokens with padding: one history per row, and packed."""
    live: float = NAN
    seconds: float = NAN
    """Tokenizing and packing; the best of the repeats."""


def measure_art(tokenizer: Any, groups: Groups, options: Namespace, sdk: bool) -> ArtFigures:
    """Measure ART. Raises ImportError without it."""
    captured = art_side.capture(list(zip(groups.chats, groups.runs, groups.rewards, strict=True)), sdk=sdk)
    seconds = []
    for _ in range(options.repeats):
        gc.collect()
        started = time.perf_counter()
        histories = art_side.tokenize(tokenizer, captured)
        tensors = art_side.pack(tokenizer, histories, options.row)
        seconds.append(time.perf_counter() - started)
    trained = [history for history in histories if sum(history.assistant_mask)]
    longest = max(len(history.token_ids) for history in histories)
    rows = float(len(trained) * -(-longest // 2048) * 2048)
    live = float((tensors["group_ids"] != -1).sum())
    return ArtFigures((rows, float(tensors["tokens"].numel())), live, min(seconds))


def tree_row_tokens(groups: Groups, budget: int) -> int:
    """Return the tokens of TRL's rows, which have no padding. Raises ImportError without TRL."""
    samples = [
        sample
        for number, group in enumerate(groups.runs)
        for sample in tree_row.samples_of(group, [0.0] * len(group), number)
    ]
    return sum(len(row.tokens) for row in tree_row.tree_rows(samples, budget))


def measure_ours(groups: Groups, repeats: int) -> tuple[list[TokenTree], tuple[float, float, float]]:
    """Return the groups' trees, and the least seconds of reading calls, building trees and making tensors."""
    with tempfile.TemporaryDirectory(prefix="art-bench-store") as folder:
        path = Path(folder) / "run.sqlite"
        write(path, groups)
        results = [read_and_build(path, len(groups.runs)) for _ in range(repeats)]
    trees = results[0][0]
    return trees, tuple(min(seconds[part] for _, seconds in results) for part in range(3))


def write(path: Path, groups: Groups) -> None:
    """Store the calls as a run would, group after group."""
    with Store(path) as store:
        for number, (runs, rewards, chats) in enumerate(zip(groups.runs, groups.rewards, groups.chats, strict=True)):
            for trajectory in trajectories_of(runs, rewards, chats):
                rollout_id = f"{number}-{trajectory.rollout_id}"
                store.add_rollout(rollout_id, task=trajectory.task, step=number, group=str(number))
                for call in trajectory.calls:
                    store.record(rollout_id, call)
                store.finish_rollout(rollout_id)
                store.add_scores([rollout_id], [trajectory.reward])


def read_and_build(path: Path, groups: int) -> tuple[list[TokenTree], tuple[float, float, float]]:
    """Go from the file to tensors once; return the trees, and the seconds of the three parts."""
    gc.collect()
    with Store(path) as store:
        stored, reading = timed(lambda: [store.trajectories(step=number) for number in range(groups)])
    trees, building = timed(lambda: [build_tree(runs, advantages_of(runs)) for runs in stored])
    _, converting = timed(lambda: [as_tensors(tree) for tree in trees])
    return trees, (reading, building, converting)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def advantages_of(runs: Sequence[Trajectory]) -> list[float]:
    middle = median(run.reward or 0.0 for run in runs)
    return [(run.reward or 0.0) - middle for run in runs]


def as_tensors(tree: TokenTree) -> list[torch.Tensor]:
    """Return a tensor copy of every array of the tree."""
    return [torch.from_numpy(array).clone() for array in vars(tree).values()]
