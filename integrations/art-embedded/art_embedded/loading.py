"""Loads transformers models for serving, and new weights into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from art_core.errors import ConfigError
from art_core.learner import pretrained
from art_core.plugin_api import memory
from art_embedded.few_rows import FewRows
from art_embedded.kv import ATTENTION, Batch, KeyValues, PackedKeyValues
from art_embedded.plain import PlainKeyValues

BFLOAT16_FROM = 1_000_000_000
"""Weights from which a GPU serves a model in bfloat16."""

log = logging.getLogger("art_core.engine.loading")


# The decode thread runs in inference mode. Tensors created in that mode have no version counter, which the experts' kernels
# need, so they can't be replaced by live weights.
@torch.inference_mode(False)
def load_model(folder: str) -> PreTrainedModel:
    """Load a causal LM for inference on the CPU: in float32, but for a GPU in bfloat16 from a billion weights on.

    The learner computes in float32. A smaller model is fast enough in it, and then the two agree as closely as on a CPU.
    Raises ConfigError if ``folder`` has no causal LM.
    """
    cuda = torch.cuda.is_available()
    model = pretrained.load_causal_lm(folder, torch.bfloat16 if cuda else torch.float32)
    if cuda and model.num_parameters() < BFLOAT16_FROM:
        # Loaded again, because a conversion would keep the rounded weights; one to bfloat16 would round rotary frequencies.
        model = pretrained.load_causal_lm(folder)
    return model.requires_grad_(False).eval()


@torch.inference_mode(False)
def place(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model to the GPU if there is one. What was there before should be gone, because there may be no room for both."""
    torch.cuda.empty_cache()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def stop_ids(generation: GenerationConfig | None, tokenizer_eos: int | None) -> frozenset[int]:
    """Return the tokens that end an answer."""
    configured = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*ids, tokenizer_eos] if token is not None)


def load_adapter(base: str, folder: Path) -> PreTrainedModel:
    """Load ``base`` and merge the PEFT adapter in ``folder`` into it."""
    return pretrained.load_adapter(load_model(base), folder).merge_and_unload().requires_grad_(False).eval()


def bind(model: PreTrainedModel, live: Mapping[str, Tensor]) -> None:
    """Use the tensors in ``live`` as ``model``'s parameters, without copying if device and dtype match.

    Parameters that ``live`` omits stay unchanged, because training an adapter changes only some. A tied weight may have any
    of its names. Raises ConfigError if ``live`` is empty, or if a name or shape doesn't match the model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = [aliases[0] for aliases in names.values() if not any(name in live for name in aliases)]
    unknown = sorted(set(live) - set(model.state_dict()) - {name for aliases in names.values() for name in aliases})
    if unknown or len(missing) == len(names):
        raise ConfigError(
            f"the live weights don't match {model.name_or_path}: {len(missing)} parameters are missing (first: {missing[:3]}) "
            f"and {len(unknown)} are unknown (first: {unknown[:3]}); pass parameters of the same model, with adapters merged in"
        )
    for parameter in model.parameters():
        name = next((name for name in names[id(parameter)] if name in live), None)
        if name is None:
            continue
        tensor = live[name].detach()
        if tensor.shape != parameter.shape:
            raise ConfigError(
                f"the live weight {name} has shape {tuple(tensor.shape)}, the model's has {tuple(parameter.shape)}; "
                "pass the parameters of the same model"
            )
        if tensor.device == parameter.device and tensor.dtype == parameter.dtype:
            parameter.data = tensor
        else:
            parameter.data.copy_(tensor)


def memory_budget() -> int:
    """Return the bytes that keys and values may use: a share of the memory, because agents and learner need some too.

    That is a share of the GPU's free memory, else of the machine's memory or the container's limit, if that is smaller.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(0.4 * free)
    return memory.machine_memory() // 4


@torch.inference_mode()
def make_key_values(model: PreTrainedModel) -> KeyValues:
    """Return the fast cache if the model computes the same logits with it, else the plain cache."""
    original = model.config._attn_implementation
    # Eager attention is the reference; other kernels omit what they don't support (Gemma 2's soft cap).
    model.set_attn_implementation("eager")
    ids = [(7 * position + 3) % model.config.get_text_config().vocab_size for position in range(24)]
    expected = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
    few_rows = FewRows(model)
    reason = _problem(lambda: _packed_differs(model, few_rows, ids, expected))
    if reason is None:
        packed = PackedKeyValues(model, few_rows)
        packed.resize(1, 1)
        packed.forward(Batch(ids=[ids[0]], positions=[0], rows=[0], runs=[(0, 1)], outputs=[0]))
        return packed
    few_rows.remove()
    model.set_attn_implementation(original)
    log.warning("serving %s one sequence at a time, which is slow: %s", model.name_or_path, reason)
    argument = pretrained.cache_argument(model)
    if argument and (reason := _problem(lambda: _continued_differs(model, argument, ids))):
        log.warning("every token recomputes its whole row, because the cache can't be continued: %s", reason)
        argument = None
    return PlainKeyValues(model, argument)


def _problem(check: Callable[[], str | None]) -> str | None:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - models may fail here in any way; a slower way can still serve them
        return f"{type(error).__name__}: {error}"


def _continued_differs(model: PreTrainedModel, argument: str, ids: list[int]) -> str | None:
    """Append several tokens to a row in transformers' cache, as some models can't (Mamba); return why not, or None."""
    rows = torch.tensor([ids], device=model.device)
    expected = model(input_ids=rows, use_cache=False).logits[0].float()
    cached = {argument: DynamicCache(config=model.config), "use_cache": True}
    head = len(ids) // 2
    model(input_ids=rows[:, :head], **cached)
    logits = model(input_ids=rows[:, head:], **cached).logits[0].float()
    tolerance = (1e-4 if model.dtype == torch.float32 else 0.1) * float(expected.abs().max())
    difference = float((logits - expected[head:]).abs().max())
    return None if difference <= tolerance else f"its logits differ by {difference:.3g}"


def _packed_differs(model: PreTrainedModel, few_rows: FewRows, ids: list[int], expected: Tensor) -> str | None:
    """Run a prompt through the packed cache, as two rows in three pieces; return why it can't be used, or None."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of type {', '.join(sorted(other))}"
    if not model._supports_attention_backend:
        return "its attention cannot be replaced"
    model.set_attn_implementation(ATTENTION)
    packed = PackedKeyValues(model, few_rows)
    packed.resize(2, len(ids))
    head, last = len(ids) // 2, len(ids) - 1
    positions = list(range(head))
    packed.forward(
        Batch(ids[:head] * 2, positions * 2, [0] * head + [1] * head, 0, [(0, head), (head, 2 * head)], [head])
    )
    positions = list(range(head, last))
    middle = len(positions)
    rows = [0] * middle + [1] * middle
    packed.forward(Batch(ids[head:last] * 2, positions * 2, rows, 0, [(0, middle), (middle, 2 * middle)], [0]))
    logits = packed.forward(Batch(ids[last:] * 2, [last] * 2, [0, 1], decoding=2, outputs=[0, 1]))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if windowed and kinds != {"full_attention"} and not packed.seen_windows:
        return "its attention doesn't report its sliding window"
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * max(1.0, float(expected.abs().max()))
    difference = float((logits - expected[-1]).abs().max())
    return None if difference <= tolerance else f"its logits differ by {difference:.3g}"
