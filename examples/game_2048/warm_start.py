"""Make the start model from nothing: a transformer of 0.8M parameters that reads boards and has mediocre habits.

    python -m examples.game_2048.warm_start --out examples/game_2048/model

Seeded, on one CPU core; ``README.md`` says what to expect. Nothing is downloaded and no other model is involved.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .agent import SYSTEM, messages
from .players import by_habit, by_reward
from .rules import DIRECTIONS, Board, first_board, legal_moves, move_values, slide, with_random_tile

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = Regex(r" *\p{N}+|\p{L}+|\n|[^\p{L}\p{N}\n]+")
"""A tile with the columns before it is one token, wherever it stands."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
BATCH = 64
STEPS = 3000
SKILLS_UNTIL = 1800
"""Until here the moves of the best reward are all that is shown, because that needs the board to be read."""
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 1e-3
WARMUP_STEPS = 30
EMBEDDING_STD = 0.1


class Shares(NamedTuple):
    """How often the demonstrations follow the habit, take the move of the best reward, or any legal move."""

    habit: float
    reward: float
    any: float


SKILLED = Shares(0.0, 1.0, 0.0)
MEDIOCRE = Shares(0.6, 0.2, 0.2)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in which every tile and every word of the conversation is one token."""
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
    tiles = [0, *(2**power for power in range(1, 18))]
    board = messages((tuple(tiles),))[1]["content"]
    texts = [f"{SYSTEM}\n{board}\n{' '.join(DIRECTIONS)}\nsystem\nuser\nassistant"] * 50
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[0],
        eos_token=CONTROL[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random parameters, on the CPU in float32."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    return model


def wanted_moves(board: Board, legal: list[str], shares: Shares) -> list[float]:
    """Return the probability of each direction in the demonstrations."""
    values = move_values(board)
    best = [it for it in legal if values[it] == max(values.values())]
    first = by_habit(board, legal, NO_CHANCE)
    return [
        shares.habit * (it == first) + shares.reward * (it in best) / len(best) + shares.any * (it in legal) / len(legal)
        for it in DIRECTIONS
    ]


def positions(rng: random.Random) -> Iterator[tuple[Board, list[str]]]:
    """Yield positions of games without end, by players of all strengths, and the legal moves."""
    while True:
        board, skill = first_board(rng), rng.random()
        while legal := legal_moves(board):
            yield board, legal
            direction = by_reward(board, legal, rng) if rng.random() < skill else rng.choice(legal)
            board = with_random_tile(slide(board, direction)[0], rng)


def batches(rng: random.Random, steps: int) -> Iterator[tuple[list[Board], list[list[float]]]]:
    """Yield boards with the probabilities of each direction."""
    pools = [positions(rng) for _ in range(BATCH)]  # a batch of one game would be much of the same
    for step in range(steps):
        found = [next(pool) for pool in pools]
        shares = SKILLED if step < SKILLS_UNTIL * steps / STEPS else MEDIOCRE
        yield [board for board, _ in found], [wanted_moves(*it, shares) for it in found]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Take ``steps`` steps: the word after the prompt is to be as likely as in the demonstrations, and then the end."""
    # Muon learns to read the board several times sooner than AdamW does; it is made for matrices only.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    seen, began = 0.0, time.process_time()
    for step, (boards, wanted) in enumerate(batches(random.Random(seed), steps)):
        scale = min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, 2 * (steps - step) / steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        divergence, loss = batch_loss(model, tokenizer, boards, torch.tensor(wanted))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen = 0.98 * seen + 0.02 * divergence if step else divergence
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  {time.process_time() - began:.0f} CPU-s  divergence {seen:.3f}", flush=True)


def batch_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, boards: list[Board], wanted: Tensor
) -> tuple[float, Tensor]:
    """Return the mean divergence of the model's moves from the wanted ones, and the loss."""
    words = torch.tensor([tokenizer.convert_tokens_to_ids(it) for it in DIRECTIONS])
    prompts = [tokenizer.apply_chat_template(messages(it), add_generation_prompt=True, return_dict=False) for it in boards]
    ids = torch.cat([torch.tensor(prompts), words[torch.multinomial(wanted, 1)]], dim=1)
    # What all prompts begin with is computed once.
    common = int((ids == ids[0]).all(0).long().cumprod(0).sum())
    cache = model.model(input_ids=ids[:1, :common], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(ids))
    hidden = model.model(input_ids=ids[:, common:], past_key_values=cache).last_hidden_state
    logprobs = model.lm_head(hidden[:, -2:]).log_softmax(-1)
    divergence = (wanted * (wanted.clamp(min=1e-9).log() - logprobs[:, 0, words])).sum(-1).mean()
    return divergence.item(), divergence - logprobs[:, 1, tokenizer.eos_token_id].mean()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write the model in 16 bits, to be loaded in 32; return the SHA-256 of the weights."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=0
    )
    model.half().save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
    tokenizer.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


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
    model = make_model(len(tokenizer))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters / 1e6:.2f}M parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed)
    print(f"sha256 {save(model, tokenizer, args.out)}  {args.out / 'model.safetensors'}", flush=True)


if __name__ == "__main__":
    main()
