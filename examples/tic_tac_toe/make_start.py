"""Make the start model: python -m examples.tic_tac_toe.make_start

Supervised fine-tuning teaches the model "tiny" to read the board, by imitating a player who sees every win and every threat, and
then the habits of a careless one: legal moves, mostly at random, that notice a win or a threat now and then. So the policy plays
badly, but has what it needs to play better.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from art_embedded import TINY

from .agent import prompt
from .game import free_cells, opening, side_to_move, winner

START = Path(__file__).parent / "start"
CARELESS = (0.2, 0.15)
"""How often a player takes a win, and otherwise how often it blocks; else it takes any free cell."""
ATTENTIVE = (0.95, 0.95)
UNTIL = 0.6
"""The share of steps that imitate an attentive player."""
REPORT_EVERY = 50


def habit(board: str, often: tuple[float, float] = CARELESS) -> dict[str, float]:
    """Return how often a player makes each legal move."""
    free, side = free_cells(board), side_to_move(board)
    shares = dict.fromkeys(free, 0.0)
    remaining = 1.0
    for noticed, whose in zip(often, (side, "XO".replace(side, "")), strict=True):
        if seen := [cell for cell in free if winner(board.replace(cell, whose))]:
            for cell in seen:
                shares[cell] += noticed * remaining / len(seen)
            remaining *= 1 - noticed
    return {cell: share + remaining / len(free) for cell, share in shares.items()}


def imitate(model: Any, tokenizer: Any, steps: int, batch: int, seed: int) -> None:
    """Teach the habits: minimise the cross-entropy to their shares at the move, and to the end of the answer after it."""
    import torch

    rng = random.Random(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0), torch.optim.AdamW(others, lr=5e-4)]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    digits = {cell: tokenizer.encode(cell)[0] for cell in "123456789"}
    for step in range(steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 10, 3 * (steps - step) / steps)
        boards = [opening(rng.randint(0, 8), rng) for _ in range(batch)]
        answers = [digits[rng.choice(free_cells(board))] for board in boards]
        rows = [[*shown(tokenizer, board), answer] for board, answer in zip(boards, answers, strict=True)]
        batched = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        wanted = torch.zeros(batch, 2, model.config.vocab_size)
        wanted[:, 1, tokenizer.eos_token_id] = 1.0
        for row, board in enumerate(boards):
            for cell, share in habit(board, ATTENTIVE if step < UNTIL * steps else CARELESS).items():
                wanted[row, 0, digits[cell]] = share
        logprobs = torch.log_softmax(model(**batched, logits_to_keep=2).logits, -1)
        loss = (torch.special.entr(wanted).neg() - wanted * logprobs).sum(-1).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % REPORT_EVERY == 0:
            print(f"step {step + 1}/{steps}: {loss.item():.4f} nats from the habits", flush=True)


def shown(tokenizer: Any, board: str) -> list[int]:
    """Return the prompt's tokens."""
    return tokenizer.apply_chat_template(prompt(board), add_generation_prompt=True, return_dict=False)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = START,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    batch: Annotated[int, typer.Option(help="Boards per step.")] = 32,
    seed: int = 0,
) -> None:
    """Make the start model: some minutes on one core."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tiny.make import save

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    imitate(model, tokenizer, steps, batch, seed)
    save(model, tokenizer, out)


if __name__ == "__main__":
    typer.run(main)
