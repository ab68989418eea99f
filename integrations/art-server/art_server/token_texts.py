"""Token ids -> texts, from the tokenizer file alone: no model is loaded, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from art_core.errors import ConfigError
from art_core.plugin_api import model_folder
from art_core.store.run_folder import checkpoints

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
MAX_TOKENS_PER_CHARACTER = 6
"""Byte tokens that may be needed for one character that has no token."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Decodes token ids; caches the last tokenizers."""

    def __init__(self) -> None:
        self._loaded = lru_cache(maxsize=4)(_loaded)

    def texts(self, file: Path | None, ids: Sequence[int]) -> list[str | None]:
        """Return the text of every token; joined, they are the whole text. All are None if there is no tokenizer.

        A character that consists of several tokens is in the text of the last one.
        """
        tokenizer = None if file is None else self._loaded(file)
        if tokenizer is None:
            return [None] * len(ids)
        texts: list[str | None] = []
        pending: list[int] = []
        before: list[int] = []
        for token in ids:
            pending.append(token)
            text = _continued(tokenizer, before, pending)
            if text.endswith(INCOMPLETE) and len(pending) < MAX_TOKENS_PER_CHARACTER:
                texts.append("")
                continue
            texts.append(text)
            before, pending = pending, []
        if pending:
            texts[-1] = _continued(tokenizer, before, pending)
        return texts


def tokenizer_file(run_dir: Path, model: str | None) -> Path | None:
    """Return a run's tokenizer file: from the model's folder, the hub's cache, or a checkpoint; else None."""
    if model:
        with suppress(ConfigError):  # the model is gone; the checkpoints have a tokenizer too
            if (file := Path(model_folder(model), FILE)).is_file():
                return file
    is_hub_name = model and model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if is_hub_name and (cached := _cached(model)):
        return cached
    return next((folder / FILE for folder in reversed(checkpoints(run_dir)) if (folder / FILE).is_file()), None)


def _continued(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> str:
    """Return the text of ``ids`` after ``before``; at the beginning of a text, some tokenizers drop a space."""
    start = tokenizer.decode(before, skip_special_tokens=False)
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=False)
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(ids, skip_special_tokens=False)


def _loaded(file: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - tokenizers raises plain Exceptions for files that it can't read
        return None


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, FILE)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
