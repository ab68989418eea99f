"""Which families of transformers compute a token tree, how, and how exactly: ``python -m bench.families [names]``.

Compares every causal LM of transformers that can be made tiny, with random weights, with its calls in rows of their own under
eager attention. Windows and other lengths in a config are longer than the tree of the check at first use and shorter than the
tree here, so this shows what that check cannot see.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from art_core.errors import ConfigError
from art_core.learner.tree_forward import tree_outputs
from art_core.learner.tree_support import PATHS, Support, support
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory
from bench.plain import call_logprobs
from bench.tables import table

VOCABULARY = 64
LENGTH = 32
"""Of every window: more than the tokens of ``tree_support.probe_tree``, less than the depth of ``forked_tree``."""
MOST_PARAMETERS = 3_000_000
PIECE = 20
"""Tokens per piece when pieces are compared."""
EQUAL = 2e-5
"""Largest difference, relative to the largest logprob, that counts as float32 rounding."""


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_named(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    **_named(32, "hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim dim"),
    **_named(
        48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_inner ffn_hidden_size dim_ff dff"
    ),
    **_named(48, "intermediate_size_mlp shared_intermediate_size dense_intermediate_size ffn_config_hidden_size"),
    **_named(2, "num_layers n_layer n_layers num_blocks encoder_layers decoder_layers num_decoder_layers"),
    **_named(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads num_global_key_value_heads"),
    **_named(4, "swa_num_attention_heads rotary_dim"),
    **_named(
        8, "head_dim swa_head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim swa_v_head_dim d_kv"
    ),
    **_named(16, "qk_head_dim mamba_d_head"),
    **_named(8, "attention_head_size index_head_dim swa_qk_rope_head_dim"),
    **_named(
        8,
        "q_lora_rank kv_lora_rank o_lora_rank moe_intermediate_size expert_hidden_size shared_expert_intermediate_size",
    ),
    **_named(8, "moe_shared_expert_intermediate_size hidden_size_per_layer_input expert_ffn_hidden_size"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    **_named(2, "num_experts_per_tok moe_k moe_topk top_k_experts num_experts_per_token n_group"),
    **_named(1, "n_shared_experts num_shared_experts topk_group first_k_dense_replace moe_num_shared_experts"),
    **_named(0, "num_nextn_predict_layers"),
    **_named(4, "state_size mamba_d_state ssm_state_size linear_key_head_dim linear_value_head_dim"),
    **_named(2, "linear_num_key_heads mamba_n_groups n_groups mamba_ngroups"),
    **_named(4, "linear_num_value_heads mamba_n_heads n_mamba_heads"),
    "index_n_heads": 32,  # with few, whole scores are cut to zero, and the choice among equals is arbitrary
    **_named(
        LENGTH, "sliding_window sliding_window_size window_size attention_window local_attention keep_window_size"
    ),
    **_named(LENGTH, "attention_chunk_size index_topk floor_scale original_max_position_embeddings local_attn_window"),
    **_named(256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    **_named(0.4, "initializer_range init_std initializer_factor"),
    **_named(0, "pad_token_id unk_token_id"),
    **_named(1, "bos_token_id decoder_start_token_id"),
    **_named(2, "eos_token_id sep_token_id"),
    **_named(0.0, "dropout attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop layerdrop"),
    **_named(True, "is_decoder"),
}
"""Sizes that replace a config's, if it has the name and a value."""
REQUIRED = {"head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}
"""Set even if they are None in the family's default config."""

EXTRAS: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in ("megatron-bert", "rembert", "roformer")},
    "big_bird": {"is_decoder": True, "attention_type": "block_sparse", "block_size": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4, "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": LENGTH},
}  # fmt: skip
"""Further settings that a family needs."""
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": LENGTH,
    "layer_types": ["full_attention", "sliding_attention"],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, window": ("qwen2", WINDOWED),
    "qwen3, window": ("qwen3", WINDOWED),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4, "original_max_position_embeddings": LENGTH, "factor": 8.0,
        }},
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": LENGTH},
    ),
}  # fmt: skip
"""Other settings of a family that change how a tree can be computed."""


class NotTiny(Exception):
    """A family that cannot be made small enough to be measured."""


@dataclass(frozen=True)
class Result:
    """How one family computes a tree."""

    how: Support
    logprobs: float
    """Largest absolute difference from calls in rows of their own; infinite if it is NaN."""
    scale: float
    """The largest logprob."""
    gradients: float
    """Norm of the difference divided by the norm."""
    in_pieces: float | None
    """Largest difference of logprobs if the tree is computed in pieces."""
    own: float
    """Largest difference of logprobs from calls in rows of their own under the attention with which it was loaded."""
    reason: str
    """Why segments are not used."""

    @property
    def wrong(self) -> bool:
        return max(self.logprobs, self.in_pieces or 0.0) > EQUAL * max(1.0, self.scale)

    @property
    def verdict(self) -> str:
        if not self.wrong:
            return ""
        return "WRONG" if self.own > EQUAL * max(1.0, self.scale) else "not as eager"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of families, then those refused and left out; failures go to stderr at once."""
    names = parse(arguments).names or [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *VARIANTS]
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    rows, refused, left_out = [], [], Counter[str]()
    for name in names:
        try:
            rows.append([name, *cells(measure(name))])
        except ConfigError as error:
            refused.append(f"{name}: {first_line(error)}")
        except Exception as error:  # noqa: BLE001 - a foreign config or model may fail in any way; the others continue
            reason = f"{type(error).__name__}: {first_line(error)[:90]}"
            print(f"{name}: {reason}", file=sys.stderr)
            left_out[reason] += 1
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, a CPU, float32\n")
    print(table(HEAD, rows))
    print(f"\n{len(rows)} measured; {len(refused)} refused:")
    for reason in refused:
        print(f"- {reason}")
    print(f"\n{left_out.total()} not made:")
    for reason, count in left_out.most_common():
        print(f"- {count}: {reason}")


HEAD = [
    *("family", "backend", "head in chunks", "pieces", "rows left out"),
    *("logprobs", "gradients", "in pieces", "", "why not segments"),
]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("names", nargs="*", help="families by their names in transformers; default: all")
    return parser.parse_args(arguments)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def cells(result: Result) -> list[object]:
    """Return a row's cells after the name."""
    how, yes = result.how, {True: "yes", False: "no"}
    numbers = [f"{it:.1e}" if it is not None else "-" for it in (result.logprobs, result.gradients, result.in_pieces)]
    return [how.backend, yes[how.head], yes[how.pieces], yes[how.trims], *numbers, result.verdict, result.reason]


def measure(name: str) -> Result:
    """Compare the tree of a tiny random model of the family with its calls in rows. Raises what transformers raises."""
    model_type, extras = VARIANTS.get(name, (name, EXTRAS.get(name, {})))
    config = tiny_config(model_type, extras)
    gc.collect()
    model, plain = random_models(config)
    tree = forked_tree()
    coefficients = torch.from_numpy(np.random.default_rng(1).standard_normal(tree.num_targets)).float()
    expected, expected_gradient = _with_gradient(plain, call_logprobs(plain, tree), coefficients)
    got, gradient = _with_gradient(model, tree_outputs(model, tree).logprobs, coefficients)
    how = support(model, None, _never)
    reason = _reason(model, tree, how)
    if how.positions and tree.depths.max() >= how.positions:
        how, reason = PATHS, f"beyond {how.positions} positions it depends on a row's length"  # as tree_outputs does
    in_pieces = None
    if how.pieces:
        in_pieces = _gap(tree_outputs(model, tree, max_tokens=PIECE).logprobs, expected)
    gradients = float((gradient - expected_gradient).norm() / expected_gradient.norm().clamp_min(1e-30))
    scale = float(expected.abs().max())
    with torch.no_grad():
        own = _gap(got, call_logprobs(model, tree))
    return Result(how, _gap(got, expected), scale, gradients, in_pieces, own, reason)


def tiny_config(model_type: str, extras: dict[str, Any]) -> PreTrainedConfig:
    """Return the family's config with every size in ``SIZES`` shrunk, also in a nested text config."""
    kind = CONFIG_MAPPING[model_type]
    values = _shrunk(kind().to_dict())
    inner = values.get("text_config")
    (inner if isinstance(inner, dict) else values).update(extras)
    return kind.from_dict(values)


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    depth = values.get("num_hidden_layers")
    kept = _kept_layers(values.get("layer_types") or values.get("layers_block_type") or [], depth or 0)
    out = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _shrunk(value)
        elif isinstance(value, list) and len(value) == depth:
            value = [SIZES.get(name, value[layer]) for layer in kept]
        elif name in SIZES and (value is not None or name in REQUIRED):
            value = SIZES[name]
        out[name] = value
    if depth:
        out["num_hidden_layers"] = len(kept)
    if "kv_lora_rank" in values:  # every head has keys of its own
        out["num_key_value_heads"] = SIZES["num_attention_heads"]
    out.pop("per_layer_config", None)  # what differs in some layers, by layer number
    return out


def _kept_layers(kinds: Sequence[str], depth: int) -> list[int]:
    """Return the first layer of every kind, and at least two."""
    firsts = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    return sorted({*firsts.values(), *range(min(depth, 2) if len(firsts) < 2 else 0)})


def random_models(config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model as it is loaded, and one with the same weights and eager attention."""
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise NotTiny(f"more than {MOST_PARAMETERS:,} parameters")
    torch.manual_seed(0)
    made = []
    for attention in (None, "eager"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
        )
        made.append(model.eval())
    with torch.no_grad():
        for weight in made[0].parameters():
            if weight.ndim < 2:  # most start as zeros or ones, which hides errors
                weight += 0.1 * torch.randn_like(weight)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def forked_tree() -> TokenTree:
    """Return a tree with two roots, forks at several depths, turns that extend others, and a second temperature.

    The first call ends below ``LENGTH``, the turns that extend it above.
    """
    ids = np.random.default_rng(0).integers(3, VOCABULARY, 400).tolist()
    long, short = ids[:100], ids[200:240]
    shapes = [
        (long[:20], long[20:26], 1.0), (long[:30], long[30:36], 1.0), (long[:60], long[60:68], 1.0),
        (long[:90], long[90:100], 1.0),
        (long[:36] + ids[100:110], ids[110:118], 0.7), (long[:75] + ids[120:130], ids[130:138], 1.0),
        (long[:75] + ids[120:124], ids[140:150], 1.0), (short[:20], short[20:26], 1.0), (short[:24], ids[150:190], 1.0),
    ]  # fmt: skip
    calls = [Call(tuple(it), tuple(sampled), (0.0,) * len(sampled), temperature=at) for it, sampled, at in shapes]
    return build_tree([Trajectory(task=None, calls=tuple(calls[:4])), Trajectory(task=None, calls=tuple(calls[4:]))])


def _with_gradient(model: PreTrainedModel, logprobs: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs and the gradient of their sum weighted by ``coefficients``, flattened."""
    (logprobs.float() * coefficients).sum().backward()
    parts = [
        (torch.zeros_like(it) if it.grad is None else it.grad).flatten()
        for it in model.parameters()
        if it.requires_grad
    ]
    return logprobs.detach(), torch.cat(parts)


def _gap(got: Tensor, expected: Tensor) -> float:
    gap = float((got.detach() - expected).abs().max())
    return gap if gap == gap else float("inf")


def _reason(model: PreTrainedModel, tree: TokenTree, how: Support) -> str:
    """Return why the tree is not computed by segments, in the words of the check at first use."""
    if how.backend == "segments":
        return ""
    try:
        tree_outputs(model, tree, backend="segments")
    except ConfigError as error:
        return first_line(error).rpartition("backend='segments': ")[2][:100]
    return ""


def _never(*_: object) -> NoReturn:
    raise AssertionError("the way was chosen before")


if __name__ == "__main__":
    main()
