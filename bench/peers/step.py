"""Seconds of one optimizer step on one group of rollouts for each side, interleaved; with a check of the gradients.

The learning rate is 0, so every step of every side starts from the same weights.
"""

from __future__ import annotations

import functools
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from transformers import PreTrainedModel

from bench import tree as ours
from bench.peers.areal_side import areal_side
from bench.peers.art_side import art_side
from bench.peers.batch import Batch, load_tokenizer, make_batch
from bench.peers.tree_row import tree_row_side
from bench.peers.trl_side import trl_side
from bench.plain import dense_tree_logprobs, padded_area, rows_backward
from bench.shapes import random_model
from bench.tables import table, unless_left_out

CALLS = "each call alone, unpadded"
HISTORIES = "full histories, unpadded"
PADDED = "full histories, padded"
TRL = "TRL GRPOTrainer.compute_loss"
TREE_ROW = "TRL TreeRow (AsyncGRPOTrainer)"
ART_ROWS = "ART, one history per row (LocalBackend)"
ART_PACKED = "ART, packed (Megatron)"
AREAL = "AReaL, tree"
DENSE = "naive tree, dense mask"
PATHS = "ours, by paths"
OURS = "ours"
TREE_ROW_BUDGET = 40_960
"""TRL takes the server's longest context for it; that of ``random_model`` is this."""


@dataclass
class Side:
    """One way to compute the step."""

    name: str
    run: Callable[[torch.nn.Module], None]
    """Forward and backward."""
    model: PreTrainedModel
    tokens: int
    """Computed tokens, without padding."""
    area: int
    """Computed tokens, padding included."""
    seconds: list[float] = field(default_factory=list)
    gradient: torch.Tensor | None = None
    """Gradient of the first, unmeasured step: all parameters in one float64 vector."""


def run(options: Namespace) -> None:
    """Print the table of the optimizer step."""
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer()
    dtype = torch.float64 if options.float64 else torch.float32
    model = random_model(options.size, options.vocabulary, dtype)
    batch = make_batch(tokenizer, style=options.style, group_size=options.group_size, max_turns=options.max_turns)
    sides = make_sides(tokenizer, model, batch, options.micro_batch, options.skip)
    measure(sides, options.repeats, time.process_time if options.cpu_time else time.perf_counter)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"\n## One optimizer step\n\n{options.size}: {parameters / 1e6:.1f}M parameters, vocabulary {options.vocabulary}, "
        f"{dtype}; one group of {options.group_size} rollouts ({options.style}, at most {options.max_turns} turns): "
        f"{len(batch.calls)} calls, {len(batch.histories)} histories, {batch.trained} trained tokens; "
        f"{torch.get_num_threads()} thread(s), median of {options.repeats} interleaved"
        f"{'; seconds of processor time' if options.cpu_time else ''}\n"
    )
    print(table(*rows_of(sides, batch)))
    print("\n" + "\n".join(verdicts(sides, batch)), flush=True)


def make_sides(tokenizer: object, model: PreTrainedModel, batch: Batch, size: int, skip: str) -> list[Side]:
    """Return the sides whose names contain none of the words ``skip``; peers that are not installed are left out."""
    makers = makers_of(tokenizer, model, batch, size)
    made = {name: unless_left_out(name, skip, make) for name, make in makers.items()}
    return [Side(name, *it) for name, it in made.items() if it is not None]


Made = tuple[Callable[[torch.nn.Module], None], PreTrainedModel, int, int]
"""A side's pass, its model, and its tokens without and with padding."""


def makers_of(tokenizer: object, model: PreTrainedModel, batch: Batch, size: int) -> dict[str, Callable[[], Made]]:
    """Return how each side is made, in the order of the table; a peer's raises ImportError if its library is missing."""
    calls, histories = sum(len(row.ids) for row in batch.calls), sum(len(row.ids) for row in batch.histories)
    area, trained = padded_area(batch.histories, size), batch.trained
    unique = batch.tree.num_tokens
    by_paths = functools.partial(ours.logprobs, backend="paths")

    def shared(run: Callable[[torch.nn.Module], None], tokens: int, area: int) -> Made:
        return run, model, tokens, area

    def trl() -> Made:
        run, copied = trl_side(tokenizer, model, batch, size)
        return run, copied, histories, area

    def tree_row() -> Made:
        run, copied, tokens = tree_row_side(model, batch, TREE_ROW_BUDGET)
        return run, copied, tokens, tokens

    return {
        CALLS: lambda: shared(lambda m: rows_backward(m, batch.calls, 1, trained), calls, calls),
        HISTORIES: lambda: shared(lambda m: rows_backward(m, batch.histories, 1, trained), histories, histories),
        PADDED: lambda: shared(lambda m: rows_backward(m, batch.histories, size, trained), histories, area),
        TRL: trl,
        TREE_ROW: tree_row,
        ART_ROWS: lambda: shared(*art_side(tokenizer, batch, share=False)),
        ART_PACKED: lambda: shared(*art_side(tokenizer, batch, share=True)),
        AREAL: lambda: shared(*areal_side(batch)),
        DENSE: lambda: shared(lambda m: ours.backward(m, [batch.tree], dense_tree_logprobs), unique, unique),
        PATHS: lambda: shared(lambda m: ours.backward(m, [batch.tree], by_paths), histories, histories),
        OURS: lambda: shared(lambda m: ours.backward(m, [batch.tree]), unique, ours.computed_tokens([batch.tree])),
    }


def measure(sides: list[Side], repeats: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """Set ``seconds`` and ``gradient``; every round runs all sides, every other round in reverse order."""
    optimizers = {
        id(side.model): torch.optim.AdamW(side.model.parameters(), lr=0.0, weight_decay=0.0) for side in sides
    }

    def step(side: Side) -> float:
        optimizer = optimizers[id(side.model)]
        started = clock()
        optimizer.zero_grad()
        side.run(side.model)
        optimizer.step()
        return clock() - started

    for side in sides:
        seconds = step(side)
        side.gradient = torch.cat([parameter.grad.flatten() for parameter in side.model.parameters()]).double()
        print(f"  first step, {side.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    for round in range(repeats):
        for side in sides if round % 2 == 0 else reversed(sides):
            side.seconds.append(step(side))


def rows_of(sides: list[Side], batch: Batch) -> tuple[list[str], list[list[object]]]:
    """Return the table's head and rows."""
    by_name = {side.name: side for side in sides}
    reference = by_name.get(HISTORIES, sides[0]).gradient
    head = [
        "side", "s/step", "least s", "ours is faster by", "trained tokens/s", "tokens", "with padding",
        "relative gradient error",
    ]  # fmt: skip
    rows = []
    for side in sides:
        seconds = median(side.seconds)
        error = float((side.gradient - reference).norm() / reference.norm())
        faster = speed_up(by_name.get(OURS), side)
        rows.append([
            side.name, seconds, min(side.seconds), faster, batch.trained / seconds, side.tokens, side.area, f"{error:.1e}",
        ])  # fmt: skip
    return head, rows


def speed_up(ours: Side | None, side: Side) -> float | None:
    """Return the median over the rounds of the side's seconds divided by ours."""
    if ours is None:
        return None
    return median(theirs / mine for theirs, mine in zip(side.seconds, ours.seconds, strict=True))


def verdicts(sides: list[Side], batch: Batch) -> list[str]:
    """Return one line per target: what the tree saves, and how much of that the time shows."""
    by_name = {side.name: side for side in sides}
    mine = by_name.get(OURS)
    if mine is None:
        return []
    unique = batch.tree.num_tokens
    lines = [f"- tree: {unique} unique tokens, {mine.area} computed ({mine.area / unique:.3f})"]
    for name, target in ((HISTORIES, 0.85), (CALLS, 0.8)):
        if name in by_name:
            ratio, faster = by_name[name].tokens / unique, speed_up(mine, by_name[name])
            lines.append(
                f"- {name}: {ratio:.2f} x the tree's tokens, ours {faster:.2f} x faster = {faster / ratio:.2f} of that "
                f"(target: {target})"
            )
    if TRL in by_name:
        lines.append(f"- {TRL}: ours {speed_up(mine, by_name[TRL]):.2f} x faster (target: 2)")
    return lines
