"""Make the start model from scratch: a transformer with 0.5M parameters that reads boards and has mediocre habits.

    python -m examples.game_2048.warm_start --out examples/game_2048/model

Seeded, on one CPU core; see ``README.md`` for what to expect. Nothing is downloaded and no other model is involved.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from art_core.learner.pretrained import cache_argument
from tiny.make import save
from tiny.training import WARMUP_STEPS, make_model, make_optimizers

from .agent import SYSTEM, messages
from .players import HABIT
from .rules import DIRECTIONS, Board, first_board, move_values, slide, with_random_tile

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = Regex(r" *\p{N}+|\p{L}+|\n|[^\p{L}\p{N}\n]+")
"""A tile with the spaces before it is one token, wherever it is."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
BATCH = 128
STEPS = 2400
HABITS_FROM, HABITS_AT = 1600, 1900
"""Until the first step the demonstrations make good moves, which requires reading the board; from the second on they are
mediocre."""
SHARES = {"habit": 0.6, "value": 0.2, "any": 0.2}
"""How often mediocre demonstrations follow the habit, make a good move, or make any legal move."""
SHARPNESS = 6.0
"""In good demonstrations, the best move is this many nats likelier than the worst."""
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 256,
}
SIGHTS = 6
"""Questions about every cell while the model learns to read."""
TILES = [0, *(2**power for power in range(1, 18))]
"""Those above 4096 are several tokens each: no game of a model this small gets there."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with one token per tile and per word of the conversation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    board = "".join(f"{tile:>5}" for tile in TILES)
    texts = [f"{SYSTEM}\n{board}\n{' '.join(DIRECTIONS)}\nsystem\nuser\nassistant"] * 50
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[0],
        eos_token=CONTROL[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


@dataclass(frozen=True)
class Lesson:
    """Boards and what to learn about them."""

    ids: Tensor
    """(boards, tokens): the prompts."""
    cells: Tensor
    """(16,): the positions of the board's cells in every prompt."""
    moves: Tensor
    """(boards, 4): the probabilities of the directions."""
    sights: Tensor
    """(boards, 16, SIGHTS): the answers to the questions about every cell."""


def lessons(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[Lesson]:
    """Yield a batch per step."""
    rng = random.Random(seed)
    games = [positions(rng) for _ in range(BATCH)]  # positions of one game are too similar for a batch
    tile_ids = {tile: tokenizer(f"{tile:>5}")["input_ids"][0] for tile in TILES}
    prompt = torch.tensor(
        tokenizer.apply_chat_template(messages([[0] * 4] * 4), add_generation_prompt=True, return_dict=False)
    )
    cells = (prompt == tile_ids[0]).nonzero()[:, 0]
    for step in range(steps):
        boards, values = zip(*map(next, games), strict=True)
        mediocre = min(1.0, max(0.0, (step - HABITS_FROM) / (HABITS_AT - HABITS_FROM)))
        ids = prompt.repeat(BATCH, 1)
        ids[:, cells] = torch.tensor([[tile_ids[tile] for row in board for tile in row] for board in boards])
        moves = torch.tensor([demonstrated(*it, mediocre) for it in zip(boards, values, strict=True)])
        yield Lesson(ids, cells, moves, torch.tensor([sights(board) for board in boards]))


def positions(rng: random.Random) -> Iterator[tuple[Board, dict[str, float]]]:
    """Yield positions without end, of games by players of all strengths, and the values of the legal moves."""
    while True:
        board, skill = first_board(rng), rng.random()
        while values := move_values(board):
            yield board, values
            legal = list(values)
            direction = max(legal, key=values.__getitem__) if rng.random() < skill else rng.choice(legal)
            board = with_random_tile(slide(board, direction)[0], rng)


def demonstrated(board: Board, values: dict[str, float], mediocre: float) -> list[float]:
    """Return the probability of each direction in the demonstrations."""
    low, span = min(values.values()), max(values.values()) - min(values.values())
    good = {it: math.exp(SHARPNESS * (value - low) / (span or 1.0)) for it, value in values.items()}
    shares = {name: share * mediocre for name, share in SHARES.items()}
    shares["value"] += 1 - mediocre
    chances = dict.fromkeys(DIRECTIONS, 0.0)
    chances[next(it for it in HABIT if it in values)] += shares["habit"]
    for it in values:
        chances[it] += shares["value"] * good[it] / sum(good.values()) + shares["any"] / len(values)
    return list(chances.values())


def sights(board: Board) -> list[list[float]]:
    """Return for every cell, along its row and then its column: whether it merges with the tile before it, whether a gap before
    it lets it move, and whether it is a gap for a tile before it."""
    columns = list(zip(*board, strict=True))
    answers = []
    for i, row in enumerate(board):
        for j, tile in enumerate(row):
            for before in (row[:j], columns[j][:i]):
                last = next((it for it in reversed(before) if it), None)
                answers.append([bool(tile) and tile == last, bool(tile) and 0 in before, not tile and last is not None])
    return [[*map(float, a + b)] for a, b in zip(answers[::2], answers[1::2], strict=True)]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Take ``steps`` steps towards the demonstrations' distribution of the word after the prompt, and the end after it."""
    # Discarded afterwards: with moves alone, learning to read a board takes many times longer.
    eye = torch.nn.Linear(model.config.hidden_size, SIGHTS)
    optimizers = make_optimizers(model, beside=eye.parameters())
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    words = torch.tensor([tokenizer.convert_tokens_to_ids(it) for it in DIRECTIONS])
    means, began = torch.zeros(3), time.process_time()
    for step, lesson in enumerate(lessons(tokenizer, steps, seed)):
        scale = min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, 2 * (steps - step) / steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        losses = lesson_losses(model, eye, lesson, words)
        losses.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means += (losses.detach() - means) * max(0.02, 1 / (step + 1))
        if (step + 1) % 100 == 0:
            shown = ", ".join(f"{name} {it:.3f}" for name, it in zip(("moves", "end", "sights"), means, strict=True))
            print(f"step {step + 1}/{steps}  {time.process_time() - began:.0f} CPU-s  {shown}", flush=True)


def lesson_losses(model: Qwen3ForCausalLM, eye: torch.nn.Module, lesson: Lesson, words: Tensor) -> Tensor:
    """Return the divergence of the moves from the demonstrated ones, -logprob of the end, and the loss of the questions about
    the cells."""
    ids = torch.cat([lesson.ids, words[torch.multinomial(lesson.moves, 1)]], dim=1)
    # The tokens before the board are the same in all prompts, and computed once.
    first = int(lesson.cells[0])
    cache = DynamicCache(config=model.config)
    with_cache = {cache_argument(model.model): cache, "use_cache": True}
    model.model(input_ids=ids[:1, :first], **with_cache)
    cache.batch_repeat_interleave(len(ids))
    hidden = model.model(input_ids=ids[:, first:], **with_cache).last_hidden_state
    logprobs = model.lm_head(hidden[:, -2:]).log_softmax(-1)
    wanted = lesson.moves
    moves = (wanted * (wanted.clamp(min=1e-9).log() - logprobs[:, 0, words])).sum(-1).mean()
    seen = binary_cross_entropy_with_logits(eye(hidden[:, lesson.cells - first]), lesson.sights)
    return torch.stack([moves, -logprobs[:, 1, model.config.eos_token_id].mean(), seen])


def main() -> None:
    """Make the model and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), **SHAPE)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters / 1e6:.2f}M parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed)
    print(f"sha256 {save(model, tokenizer, args.out)}  {args.out / 'model.safetensors'}", flush=True)


if __name__ == "__main__":
    main()
