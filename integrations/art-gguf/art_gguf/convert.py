"""Converts a GGUF file into a model folder in the user's cache, once per content of the file."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from art_core.errors import ConfigError
from art_core.plugin_api import cache_folder

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

MODELS = "models"
"""The folder for converted models, in the cache."""
FORMAT = 1
"""Part of the folder's name: a number for each way of converting."""
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
WORDS = ("smollm", "qwen2")
"""Rules by which a tokenizer splits texts into words, by llama.cpp's names: those that ``_words`` knows."""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are never split."""
SAMPLE = "It costs 1,234.50 in 2026 (naïve),  isn't it?\n\tdef f(x): return x**2  # 日本 😀"


def folder_of(name: str, sha256: str) -> Path:
    """Return the folder that a file's model is converted into."""
    return cache_folder(MODELS) / f"{name}-{sha256[:12]}-{FORMAT}"


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert(path: Path, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the model in a GGUF file, or in the one GGUF file of a folder; converts it if that isn't done yet.

    All weights become float32: what quantization lost stays lost. Raises ConfigError for a file that can't be converted, and if
    the cache can't be written.
    """
    file = _the_file(path)
    folder = folder_of(file.stem, file_hash(file))
    if (folder / "config.json").is_file():
        return folder
    if say:
        say(f"converting {file} to float32 in {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".unfinished-{folder.name}-", dir=folder.parent) as temporary:
            written = Path(temporary, "model")
            _write(file, written)
            _publish(written, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} can't be written: {error}; check disk space and permissions, or set ART_CACHE"
        ) from error
    return folder


def _publish(written: Path, folder: Path) -> None:
    try:
        written.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise


def _the_file(path: Path) -> Path:
    if path.is_file():
        file = path
    else:
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ConfigError(
                f"{path} has {len(files)} GGUF files: {', '.join(it.name for it in files)}; pass one of them"
            )
        [file] = files
    if SPLIT.search(file.stem):
        raise ConfigError(
            f"{file} is one part of a split model; join the parts with llama-gguf-split --merge, and pass the result"
        )
    return file


def _write(file: Path, folder: Path) -> None:
    """Write model and tokenizer. Raises ConfigError."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from art_core.learner.pretrained import no_progress_bars

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with _reading(file):
        fields = _fields(GGUFReader(file))
    _check_tokenizer(file, fields)
    with _reading(file), no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    for quantized in ("hf_quantizer", "quantization_method"):
        setattr(model, quantized, None)
    model.is_quantized = False
    del model.config.quantization_config
    _correct(tokenizer, fields)
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_round_trip(file, folder)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn the libraries' errors inside the block into a ConfigError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, NotImplementedError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{file} cannot be converted: {reason}; pass a model folder written by save_pretrained"
        ) from error


def _fields(reader: GGUFReader) -> dict[str, Any]:
    """Return the file's metadata; of its lists, only the tokens and their types."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if len(field.data) == 1 or name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    }


def _check_tokenizer(file: Path, fields: Mapping[str, Any]) -> None:
    kind, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in WORDS:
        raise ConfigError(
            f"{file} has a tokenizer of kind {kind!r} that splits texts by the rules {rule!r}; only "
            f"{' and '.join(map(repr, WORDS))} of kind 'gpt2' are converted exactly. Pass the original model, by name or as a "
            "folder written by save_pretrained"
        )


def _correct(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> None:
    """Set what transformers reads from a GGUF file differently than the model was trained with."""
    from tokenizers import AddedToken, decoders

    # transformers only adds the control tokens that it knows; the text of the others would be split.
    kinds = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    whole = [(token, kind == CONTROL) for token, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in whole])
    tokenizer.backend_tokenizer.pre_tokenizer = _words(fields["tokenizer.ggml.pre"])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        setattr(tokenizer, f"{role}_token", None if number is None else tokenizer.convert_ids_to_tokens(int(number)))


def _words(rule: str) -> PreTokenizer:
    """Return what splits a text into words; as in llama.cpp's ``llm_tokenizer_bpe``."""
    from tokenizers import Regex, pre_tokenizers

    if rule == "smollm":
        first, last = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        first = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([first, last])


def _check_round_trip(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (decoded := tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False))) != SAMPLE:
        raise ConfigError(
            f"{file}: its tokenizer turns {json.dumps(SAMPLE)} into {json.dumps(decoded)}, so it was read wrongly"
        )
