"""Seconds of an optimizer step of the learner and of plain transformers with PEFT, on the same groups, and beside a busy process.

    python -m bench.learner_speed [MODEL] [--groups 4] [--prompt 400] [--answer 50] [--rounds 3]

A group has 8 rollouts of one call: a shared prompt, and an answer each. The plain side computes every rollout as a row, a group
per batch, with full logits and the same adapter. Sides take turns, once on the quiet machine and once beside a process that
keeps a core busy; the medians are printed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from art_core import losses
from art_core.config import TrainConfig, model_folder
from art_core.learner.pretrained import load_causal_lm
from art_core.learner.torch_learner import TorchLearner
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory
from bench.plain import Row, rows_backward
from bench.tables import table

BUSY = "while True: sum(range(100_000))"
ROLLOUTS = 8


def group(number: int, prompt: int, answer: int, vocabulary: int = 800) -> tuple[TokenTree, list[Row]]:
    """Return a made-up group as a tree and as rows; the second half of the rollouts is worse than the first."""
    draw = np.random.default_rng(number)
    shared = tuple(draw.integers(5, vocabulary, prompt).tolist())
    answers = [tuple(draw.integers(5, vocabulary, answer).tolist()) for _ in range(ROLLOUTS)]
    advantages = [1.0 if place < ROLLOUTS / 2 else -1.0 for place in range(ROLLOUTS)]
    trajectories = [
        Trajectory(task=None, calls=(Call(shared, sampled, (-5.0,) * answer, finish_reason="stop"),))
        for sampled in answers
    ]
    trained = np.arange(prompt + answer) >= prompt
    rows = [Row(shared + sampled, trained, a) for sampled, a in zip(answers, advantages, strict=True)]
    return build_tree(trajectories, advantages), rows


def plain_step(folder: str, groups: list[list[Row]], learner: TorchLearner) -> Callable[[], None]:
    """Return a step of transformers with PEFT and AdamW, with as many trained weights as ``learner`` has."""
    from peft import LoraConfig, get_peft_model

    rank = max((p.shape[0] for n, p in learner.model.named_parameters() if "lora_A" in n), default=16)
    model = get_peft_model(
        load_causal_lm(folder), LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    trained = sum(int(row.trained.sum()) for rows in groups for row in rows)

    def step() -> None:
        for rows in groups:
            rows_backward(model, rows, ROLLOUTS, trained)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main(
    model: Annotated[str, typer.Argument(help="A name, a folder, or a name on the hub.")] = "smollm2-135m",
    groups: Annotated[int, typer.Option(help="Groups per step.")] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of a group's prompt.")] = 400,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 50,
    rounds: Annotated[int, typer.Option(help="Timed steps of each side.")] = 3,
) -> None:
    """Measure and print."""
    folder = model_folder(model)
    trees, rows = zip(*(group(number, prompt, answer) for number in range(groups)), strict=True)
    learner = TorchLearner(folder, TrainConfig(model=model), losses.grpo)
    plain, took = plain_step(folder, list(rows), learner), dict[str, list[float]]()
    for round_number in range(rounds + 1):
        timed = {"learner": seconds(lambda: learner.step(list(trees))), "plain": seconds(plain)}
        with busy_process():
            timed["learner, busy"] = seconds(lambda: learner.step(list(trees)))
        if round_number:  # the first warms up
            for name, value in timed.items():
                took.setdefault(name, []).append(value)
    medians = {name: median(values) for name, values in took.items()}
    tokens = sum(tree.num_tokens for tree in trees), sum(len(row.ids) for each in rows for row in each)
    print(f"{groups} groups, {tokens[0]} tree tokens, {tokens[1]} tokens in rows; {torch.get_num_threads()} threads\n")
    print(table(["side", "seconds", "of the learner's"], [
        [name, f"{value:.1f}", f"{value / medians['learner']:.2f}"] for name, value in medians.items()
    ]))  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
