"""Token ids -> the texts that they stand for, by the tokenizer file alone. Knows nothing about runs; no model is loaded, and
nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from art_core.config import shipped_model
from art_core.store.run_folder import checkpoints

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
LONGEST = 6
"""Tokens that may be needed for one character: bytes of a character that the tokenizer has no token for."""
HALF = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Remembers the tokenizers that were used last."""

    def __init__(self) -> None:
        self._loaded = lru_cache(maxsize=4)(_loaded)

    def texts(self, file: Path | None, ids: Sequence[int]) -> list[str | None]:
        """Return the text of every token, None for all where there is no tokenizer. Joined, they are the text of all.

        A character that several tokens make up stands at the last of them.
        """
        tokenizer = None if file is None else self._loaded(file)
        if tokenizer is None:
            return [None] * len(ids)
        found: list[str | None] = []
        held: list[int] = []
        before: list[int] = []
        for token in ids:
            held.append(token)
            text = _continued(tokenizer, before, held)
            if text.endswith(HALF) and len(held) < LONGEST:
                found.append("")
                continue
            found.append(text)
            before, held = held, []
        if held:
            found[-1] = _continued(tokenizer, before, held)
        return found


def tokenizer_file(run_dir: Path, model: str | None) -> Path | None:
    """Return the file of a run's tokenizer: in the model's folder, in the hub's cache, or beside a checkpoint; else None."""
    folders = [shipped_model(model) or Path(model).expanduser()] if model else []
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    named = model and model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if named and (cached := _cached(model)):
        return cached
    return next((it / FILE for it in reversed(checkpoints(run_dir)) if (it / FILE).is_file()), None)


def _continued(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> str:
    """Return the text of ``ids`` after other tokens: at the beginning of a text some tokenizers leave a space out."""
    start = tokenizer.decode(before, skip_special_tokens=False)
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=False)
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(ids, skip_special_tokens=False)


def _loaded(file: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - tokenizers raises plain Exceptions for files that it cannot read
        return None


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
