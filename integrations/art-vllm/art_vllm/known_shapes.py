"""Finds a model's shape without downloads: in its folder, in the local hub cache, or in a table of well-known models."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from art_core.errors import ConfigError
from art_core.plugin_api import model_folder, shipped_model
from art_vllm.shapes import Experts, Latent, Shape, refuse_non_text, shape_of

QWEN2_5 = {
    # size: hidden, layers, heads, kv heads, feed-forward, vocabulary, tied
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
    "72B": (8192, 80, 64, 8, 29568, 152064, False),
}
QWEN3 = {
    # size: hidden, layers, heads, feed-forward, tied; 8 kv heads of 128
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "14B": (5120, 40, 40, 17408, False),
    "32B": (5120, 64, 64, 25600, False),
}
QWEN3_MOE = {
    # size: hidden, layers, heads, feed-forward, expert width; 128 experts, 8 per token, 4 kv heads of 128
    "30B-A3B": (2048, 48, 32, 6144, 768),
    "235B-A22B": (4096, 94, 64, 12288, 1536),
}
LLAMA_3 = {
    # version and size: hidden, layers, heads, feed-forward, tied; 8 kv heads
    "3.1-8B": (4096, 32, 32, 14336, False),
    "3.1-70B": (8192, 80, 64, 28672, False),
    "3.1-405B": (16384, 126, 128, 53248, False),
    "3.2-1B": (2048, 16, 32, 8192, True),
    "3.2-3B": (3072, 28, 24, 8192, True),
    "3.3-70B": (8192, 80, 64, 28672, False),
}
LLAMA_LIKE = {
    # name: hidden, layers, heads, kv heads, feed-forward, vocabulary, positions; heads of 128
    "openbmb/MiniCPM5-1B": (1536, 24, 16, 2, 4608, 130560, 131072),
    "openbmb/MiniCPM5-2B": (2048, 42, 16, 2, 6144, 130560, 131072),
    "Nanbeige/Nanbeige4.1-3B": (2560, 32, 20, 4, 10496, 166144, 262144),
}
GRANITE_4_2 = {
    # size: hidden, layers, heads, feed-forward; 8 kv heads
    "3b": (2560, 40, 40, 8192),
    "8b": (4096, 40, 32, 12800),
    "30b": (4096, 64, 32, 32768),
}
MISTRAL = {
    # name: hidden, head size, layers, vocabulary, positions; 32 heads, 8 kv heads, feed-forward 14336
    "Mistral-7B-v0.3": (4096, 128, 32, 32768, 32768),
    "Mistral-7B-Instruct-v0.3": (4096, 128, 32, 32768, 32768),
    "Mistral-Nemo-Base-2407": (5120, 128, 40, 131072, 131072),
    "Mistral-Nemo-Instruct-2407": (5120, 128, 40, 131072, 131072),
}
LATENT = {
    # name: hidden, layers, heads, feed-forward, vocabulary, positions, query rank, experts (count, per token, width,
    # dense layers, shared); latent attention of 512 + 64, heads of 128
    "Moonlight-16B-A3B": (2048, 27, 16, 11264, 163840, 8192, None, (64, 6, 1408, 1, 2)),
    "Kimi-K2-Base": (7168, 61, 64, 18432, 163840, 131072, 1536, (384, 8, 2048, 1, 1)),
    "Kimi-K2-Instruct": (7168, 61, 64, 18432, 163840, 131072, 1536, (384, 8, 2048, 1, 1)),
    "Kimi-K2-Instruct-0905": (7168, 61, 64, 18432, 163840, 262144, 1536, (384, 8, 2048, 1, 1)),
    "Kimi-K2-Thinking": (7168, 61, 64, 18432, 163840, 262144, 1536, (384, 8, 2048, 1, 1)),
    "DeepSeek-V3": (7168, 61, 128, 18432, 129280, 163840, 1536, (256, 8, 2048, 3, 1)),
    "DeepSeek-R1": (7168, 61, 128, 18432, 129280, 163840, 1536, (256, 8, 2048, 3, 1)),
}
SUFFIXES = re.compile(r"-(unsloth-bnb-4bit|bnb-4bit|gguf|awq|fp8|gptq|gptq-int[48])$")
"""Suffixes of repositories with the same model in another number format."""
TYPO_SIMILARITY = 0.85
"""Similarity (0 to 1) above which a known name is suggested: a typo, not another model."""
MORE_THAN_TEXT = re.compile(r"(^|[-_.])(vl|vision|omni|audio|llava|k2\.5)($|[-_.])")


def find_shape(model: str) -> Shape:
    """Return the shape of ``model``: ``"tiny"``, a folder, or a hub name that is cached or well known.

    Raises ConfigError if it is none of these, with similar names, or if it isn't a text model.
    """
    folder = shipped_model(model) or Path(model).expanduser()
    if folder.is_file():
        folder = Path(model_folder(model))
    if model and folder.is_dir():
        return _from_folder(folder, model)
    if model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model folder {model} doesn't exist; pass a model folder, or a name such as Qwen/Qwen2.5-7B-Instruct"
        )
    if file := _cached(model):
        return _from_folder(file.parent, model)
    wanted = _plain(model)
    if shape := _KNOWN.get(wanted):
        return shape
    if MORE_THAN_TEXT.search(wanted):
        refuse_non_text({"vision_config": model}, model)
    near = [name for name in _KNOWN if wanted and name.startswith(wanted)][:3]
    near = near or difflib.get_close_matches(wanted, _KNOWN, n=3, cutoff=TYPO_SIMILARITY)
    hint = f" Did you mean {' or '.join(_KNOWN[name].name for name in near)}?" if near else ""
    fetch = f"fetch its config (hf download {model} config.json) or " if model.count("/") == 1 else ""
    raise ConfigError(
        f"the shape of {model!r} is unknown: it isn't in the table of well-known models, and its config isn't in the local "
        f"Hugging Face cache.{hint} To plan for another model, {fetch}pass a folder with its config.json (no weights needed)"
    )


def known_shapes() -> tuple[Shape, ...]:
    """Return the table of well-known models."""
    return tuple(_KNOWN.values())


def _from_folder(folder: Path, name: str) -> Shape:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no config.json, so it isn't a model folder; pass one that save_pretrained wrote, or one with the "
            "model's config.json alone"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} can't be read: {error}; download it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} isn't a JSON object; use the model's own config.json")
    return shape_of(config, name)


def _cached(model: str) -> Path | None:
    """Return the model's ``config.json`` in the local hub cache, or None."""
    if model.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # installed with transformers, which a plan doesn't need
        return None
    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # not a valid hub name
        return None
    return Path(file) if isinstance(file, str) else None


def _plain(model: str) -> str:
    """Return a model's name without organization, number format and the prefix ``meta-``."""
    name = model.rsplit("/", 1)[-1].lower()
    return SUFFIXES.sub("", name).removeprefix("meta-")


def _table() -> Iterator[Shape]:
    for size, (hidden, layers, heads, kv_heads, width, vocabulary, tied) in QWEN2_5.items():
        for name in ("{}", "{}-Instruct", "Coder-{}", "Coder-{}-Instruct"):
            if size != "72B" or "Coder" not in name:
                yield Shape(
                    name="Qwen/Qwen2.5-" + name.format(size), family="qwen2", hidden=hidden, layers=layers, heads=heads,
                    kv_heads=kv_heads, head_size=hidden // heads, feed_forward=width, vocabulary=vocabulary, tied=tied,
                    positions=131072 if name == "{}" and size not in ("0.5B", "3B") else 32768,
                    biased=("q_proj", "k_proj", "v_proj"),
                )  # fmt: skip
    for size, (hidden, layers, heads, width, tied) in QWEN3.items():
        for name, positions in _qwen3_names(size, tied or size in ("8B", "14B")):
            yield Shape(
                name=name, family="qwen3", hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_size=128,
                feed_forward=width, vocabulary=151936, tied=tied, positions=positions,
            )  # fmt: skip
    for size, (hidden, layers, heads, width, expert) in QWEN3_MOE.items():
        for name, positions in _qwen3_names(size, size == "30B-A3B"):
            yield Shape(
                name=name, family="qwen3_moe", hidden=hidden, layers=layers, heads=heads, kv_heads=4, head_size=128,
                feed_forward=width, vocabulary=151936, tied=False, positions=positions,
                experts=Experts(count=128, per_token=8, width=expert, layers=layers),
            )  # fmt: skip
    yield from _llamas()
    yield from _granites()
    yield from _latents()
    yield _glm_flash()


def _qwen3_names(size: str, base: bool) -> Iterator[tuple[str, int]]:
    yield f"Qwen/Qwen3-{size}", 40960
    if base:
        yield f"Qwen/Qwen3-{size}-Base", 32768
    if size in ("4B", "30B-A3B", "235B-A22B"):
        yield f"Qwen/Qwen3-{size}-Instruct-2507", 262144
        yield f"Qwen/Qwen3-{size}-Thinking-2507", 262144
    if size == "30B-A3B":
        yield "Qwen/Qwen3-Coder-30B-A3B-Instruct", 262144


def _llamas() -> Iterator[Shape]:
    for version, (hidden, layers, heads, width, tied) in LLAMA_3.items():
        for name in ("Instruct",) if version == "3.3-70B" else ("", "Instruct"):
            yield Shape(
                name=f"meta-llama/Llama-{version}-{name}".removesuffix("-"), family="llama", hidden=hidden, layers=layers,
                heads=heads, kv_heads=8, head_size=hidden // heads, feed_forward=width, vocabulary=128256, tied=tied,
                positions=131072,
            )  # fmt: skip
    for name, (hidden, layers, heads, kv_heads, width, vocabulary, positions) in LLAMA_LIKE.items():
        yield Shape(
            name=name, family="llama", hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_size=128,
            feed_forward=width, vocabulary=vocabulary, tied=False, positions=positions,
        )  # fmt: skip
    for name, (hidden, head_size, layers, vocabulary, positions) in MISTRAL.items():
        yield Shape(
            name=f"mistralai/{name}", family="mistral", hidden=hidden, layers=layers, heads=32, kv_heads=8,
            head_size=head_size, feed_forward=14336, vocabulary=vocabulary, tied=False, positions=positions,
        )  # fmt: skip


def _granites() -> Iterator[Shape]:
    for size, (hidden, layers, heads, width) in GRANITE_4_2.items():
        yield Shape(
            name=f"ibm-granite/granite-4.2-{size}", family="granite", hidden=hidden, layers=layers, heads=heads, kv_heads=8,
            head_size=hidden // heads, feed_forward=width, vocabulary=100352, tied=False, positions=131072,
        )  # fmt: skip


def _glm_flash() -> Shape:
    return Shape(
        name="zai-org/GLM-4.7-Flash", family="glm4_moe_lite", hidden=2048, layers=47, heads=20, kv_heads=20, head_size=64,
        feed_forward=10240, vocabulary=154880, tied=False, positions=202752,
        experts=Experts(count=64, per_token=4, width=1536, layers=46, shared=1536),
        latent=Latent(query=768, key_value=512, plain=192, rotary=64, value=256),
    )  # fmt: skip


def _latents() -> Iterator[Shape]:
    rows = {**LATENT, "Moonlight-16B-A3B-Instruct": LATENT["Moonlight-16B-A3B"]}
    for name, (hidden, layers, heads, width, vocabulary, positions, query, experts) in rows.items():
        count, per_token, expert, dense, shared = experts
        yield Shape(
            name=f"{'deepseek-ai' if name.startswith('Deep') else 'moonshotai'}/{name}",
            family="kimi_k2" if name.startswith("Kimi") else "deepseek_v3", hidden=hidden, layers=layers, heads=heads,
            kv_heads=heads, head_size=64, feed_forward=width, vocabulary=vocabulary, tied=False, positions=positions,
            experts=Experts(count=count, per_token=per_token, width=expert, layers=layers - dense, shared=shared * expert),
            latent=Latent(query=query, key_value=512, plain=128, rotary=64, value=128),
            packed=not name.startswith("Moonlight"),
        )  # fmt: skip


_KNOWN = {_plain(shape.name): shape for shape in _table()}
