"""A tokenizer in which a word is the same token in every position.

Byte-level tokenizers usually merge a word with the space before it (`` budget`` and ``"budget`` are different tokens), which
makes copying a word from a message into a tool call needlessly hard for a small model. This one splits text into words, single
digits, single newlines and runs of other characters. Newlines are separate tokens so that sampled text never merges with the
prompt's last newline when the conversation is rendered again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0, 1 and 2: padding, start of turn, end of turn."""
POSITIONS = 16_384
"""More than the lessons have, so that prompts of any framework fit. What the model says after 1,000 tokens has no quality."""
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single tokens that remain when text is decoded without special tokens."""
PIECES = Regex(r"\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+")
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()


def make_tokenizer(
    texts: Iterable[str], words: Iterable[str], vocab_size: int, pieces: Regex = PIECES
) -> PreTrainedTokenizerFast:
    """Learn byte-pair merges from ``texts`` (rendered conversations); each of ``words`` becomes a single token.

    ``pieces`` matches the units that are never merged with their neighbours.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    often = [" ".join(words)] * 50
    tokenizer.train_from_iterator([*map(_without_marks, texts), *often], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[0],
        eos_token=CONTROL[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
    )


def _without_marks(text: str) -> str:
    for mark in CONTROL + MARKS:
        text = text.replace(mark, "\n")
    return text
