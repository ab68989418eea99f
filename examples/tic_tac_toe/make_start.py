"""Make the start model: python -m examples.tic_tac_toe.make_start

The model "tiny" imitates random legal moves (SFT), so it knows the rules and nothing else. Written in 16 bits.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art
from art_core.types import Call, Trajectory

from .agent import prompt
from .game import opening, random_move

START = Path(__file__).parent / "start"


def lessons(tokenizer: Any, n: int, seed: int) -> list[Trajectory]:
    """Return ``n`` boards, each with a random legal move as the answer."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        board = opening(rng.randint(0, 8), rng)
        shown = tokenizer.apply_chat_template(prompt(board), add_generation_prompt=True, return_dict=False)
        said = [*tokenizer.encode(random_move(board, rng)), tokenizer.eos_token_id]
        found.append(Trajectory("a legal move", (Call(tuple(shown), tuple(said), (0.0,) * len(said)),)))
    return found


async def imitate(run_dir: Path, boards: int, batch: int, rate: float, seed: int) -> None:
    from transformers import AutoTokenizer

    async with art.open_run(
        run_dir, model="tiny", learning_rate=rate, seed=seed, checkpoint_every=10_000, warmup_steps=20
    ) as run:
        metrics = await run.learn_sft(
            lessons(AutoTokenizer.from_pretrained(run.folder), boards, seed), batch_size=batch
        )
    for step in range(0, len(metrics), 25):
        print(f"step {step + 1}/{len(metrics)}: -logprob {metrics[step]['nll']:.3f}", flush=True)
    print(f"-logprob {metrics[-1]['nll']:.3f} at the end")


def save(checkpoint: Path, out: Path) -> None:
    """Write the model of ``checkpoint`` in 16 bits, to be loaded in 32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint).half().save_pretrained(out)
    config = out / "config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(out)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = START,
    boards: Annotated[int, typer.Option(help="Boards to imitate a move on.")] = 60_000,
    batch: Annotated[int, typer.Option(help="Boards of a step.")] = 128,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: int = 0,
) -> None:
    """Make the start model: some minutes on one core."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(imitate(Path(folder) / "run", boards, batch, rate, seed))
        (checkpoint,) = (Path(folder) / "run" / "checkpoints").iterdir()
        save(checkpoint, out)


if __name__ == "__main__":
    typer.run(main)
