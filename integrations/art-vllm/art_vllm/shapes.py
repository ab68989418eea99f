"""The shape of a transformer, read from its config: linear layers, parameters, cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from art_core.errors import ConfigError

COUNTED = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "granite", "deepseek_v3", "kimi_k2", "glm4_moe_lite",
})  # fmt: skip
"""``model_type`` of the models whose parameters are counted exactly; others are counted as a Llama of their config's sizes."""
QK_NORM = frozenset({"qwen3", "qwen3_moe"})
TEXT_INSIDE = frozenset({"gemma3", "qwen3_5"})
"""``model_type`` of the multimodal models whose language model transformers loads on its own; that one is trained."""
MODALITY_KEYS = ("vision_config", "audio_config", "thinker_config", "image_token_id", "vision_tower")
"""Config keys of models that accept more than text."""


@dataclass(frozen=True)
class Linear:
    """A kind of linear layer with all its copies in the model."""

    name: str
    inputs: int
    outputs: int
    copies: int
    used: float
    """Copies that are active for one token: fewer than ``copies`` for experts."""
    bias: bool = False
    fused: int = 1
    """Layers that transformers fuses into one weight: PEFT multiplies the rank by this number."""
    expert: bool = False
    adapted: bool = True
    """Whether PEFT's ``target_modules="all-linear"`` adapts it. In a mixture of experts it skips dense feed-forward layers,
    because PEFT looks for the fused experts under the same names."""

    @property
    def weights(self) -> int:
        """Weights of one copy, without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: feed-forward layers of which each token uses some."""

    count: int
    per_token: int
    width: int
    layers: int
    """Layers with experts; the others are dense."""
    shared: int = 0
    """Width of the shared expert, which every token uses; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one short vector per token."""

    query: int | None
    """Rank of the query compression; None: queries are not compressed."""
    key_value: int
    """Length of the cached vector."""
    plain: int
    """Size of a head's key without the rotary part."""
    rotary: int
    """Size of the rotary part, which all heads share; cached with the vector."""
    value: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a decoder-only transformer that memory and arithmetic depend on."""

    name: str
    family: str
    """The config's ``model_type``."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    positions: int
    tied: bool
    """Whether LM head and embedding share their weights."""
    biased: tuple[str, ...] = ()
    """Attention projections with a bias."""
    window: int | None = None
    """Size of the sliding window in tokens."""
    windowed: int = 0
    """Layers with a sliding window."""
    stateful: int = 0
    """Layers that keep a fixed-size state instead of keys and values (linear attention)."""
    experts: Experts | None = None
    latent: Latent | None = None
    packed: bool = False
    """Whether the published files have fewer than 16 bits per weight."""

    def linears(self) -> Iterator[Linear]:
        """Yield all linear layers except the LM head."""
        for name, inputs, outputs in self._attention():
            yield Linear(name, inputs, outputs, self.layers, self.layers, bias=name in self.biased)
        mixed, hidden = self.experts, self.hidden
        if dense := self.layers - (mixed.layers if mixed else 0):
            yield from _feed_forward(hidden, self.feed_forward, dense, adapted=not mixed)
        if mixed:
            yield Linear("router", hidden, mixed.count, mixed.layers, mixed.layers)
            copies, used = mixed.layers * mixed.count, mixed.layers * mixed.per_token
            yield Linear("experts.gate_up_proj", hidden, 2 * mixed.width, copies, used, fused=2, expert=True)
            yield Linear("experts.down_proj", mixed.width, hidden, copies, used, expert=True)
            if mixed.shared:
                yield from _feed_forward(hidden, mixed.shared, mixed.layers, adapted=False)

    def _attention(self) -> Iterator[tuple[str, int, int]]:
        hidden, heads, latent = self.hidden, self.heads, self.latent
        if latent is None:
            yield "q_proj", hidden, heads * self.head_size
            yield "k_proj", hidden, self.kv_heads * self.head_size
            yield "v_proj", hidden, self.kv_heads * self.head_size
            yield "o_proj", heads * self.head_size, hidden
            return
        queries = heads * (latent.plain + latent.rotary)
        if latent.query is None:
            yield "q_proj", hidden, queries
        else:
            yield "q_a_proj", hidden, latent.query
            yield "q_b_proj", latent.query, queries
        yield "kv_a_proj_with_mqa", hidden, latent.key_value + latent.rotary
        yield "kv_b_proj", latent.key_value, heads * (latent.plain + latent.value)
        yield "o_proj", heads * latent.value, hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.linear_weights + self.head_weights * (1 if self.tied else 2) + self._vectors()

    @property
    def active(self) -> int:
        """Number of parameters that are active for one token: inactive experts don't count."""
        return self.parameters - sum(round((linear.copies - linear.used) * linear.weights) for linear in self.linears())

    @property
    def linear_weights(self) -> int:
        """Weights of the linear layers, without biases and LM head."""
        return sum(linear.copies * linear.weights for linear in self.linears())

    @property
    def active_linear_weights(self) -> int:
        """Linear weights that are active for one token, without the LM head."""
        return round(sum(linear.used * linear.weights for linear in self.linears()))

    @property
    def expert_weights(self) -> int:
        return sum(linear.copies * linear.weights for linear in self.linears() if linear.expert)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    def _vectors(self) -> int:
        """Return the number of norm weights and biases."""
        norms = 2 * self.hidden
        if self.family in QK_NORM:
            norms += 2 * self.head_size
        if self.latent:
            norms += self.latent.key_value + (self.latent.query or 0)
        biases = sum(linear.copies * linear.outputs for linear in self.linears() if linear.bias)
        return self.layers * norms + self.hidden + biases

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter with ``target_modules="all-linear"``: rank * (inputs + outputs) per layer."""
        adapted = (linear for linear in self.linears() if linear.adapted)
        return sum(each.copies * each.fused * rank * (each.inputs + each.outputs) for each in adapted)

    def cached_numbers(self, *, compressed: bool = True) -> int:
        """Return how many numbers a layer caches per token.

        With ``compressed``, latent attention caches its vector, as in vLLM; else the keys and values computed from it, as in
        transformers and the embedded engine.
        """
        if self.latent is None:
            return 2 * self.kv_heads * self.head_size
        if compressed:
            return self.latent.key_value + self.latent.rotary
        return self.heads * (self.latent.plain + self.latent.rotary + self.latent.value)

    def cached_tokens(self, context: int) -> int:
        """Return how many tokens a sequence of ``context`` tokens caches, summed over the layers."""
        full = self.layers - self.windowed - self.stateful
        return full * context + self.windowed * min(context, self.window or context)


def _feed_forward(hidden: int, width: int, copies: int, *, adapted: bool) -> Iterator[Linear]:
    for name, inputs, outputs in (
        ("gate_proj", hidden, width),
        ("up_proj", hidden, width),
        ("down_proj", width, hidden),
    ):
        yield Linear(name, inputs, outputs, copies, copies, adapted=adapted)


GEMMA_3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip
"""transformers' defaults, which the files of Gemma 3 leave out."""


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """Return the shape that a ``config.json`` describes.

    Raises ConfigError if it isn't a decoder-only text model, or a number is missing.
    """
    if config.get("model_type") in TEXT_INSIDE and isinstance(config.get("text_config"), Mapping):
        config = {"model_type": config["model_type"], **config["text_config"]}
    refuse_non_text(config, name)
    family = config.get("model_type") or "llama"
    if family == "gemma3_text":
        config = {**GEMMA_3, **config}
    hidden, heads = _number(config, "hidden_size", name), _number(config, "num_attention_heads", name)
    layers = _number(config, "num_hidden_layers", name)
    kinds = config.get("layer_types") or _kinds(config, family, layers)
    head_size = hidden // heads or None  # with more heads than hidden units, the config must set head_dim
    return Shape(
        name=name,
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", name, heads),
        head_size=_number(config, "head_dim", name, head_size),
        feed_forward=_number(config, "intermediate_size", name, 4 * hidden),
        vocabulary=_number(config, "vocab_size", name),
        positions=_positions(config, name),
        tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
        biased=_biased(config, family),
        window=config.get("sliding_window"),
        windowed=sum(kind == "sliding_attention" for kind in kinds),
        stateful=sum(kind not in ("sliding_attention", "full_attention") for kind in kinds),
        experts=_experts(config, layers, name),
        latent=_latent(config, name),
        packed=bool(config.get("quantization_config")),
    )


def refuse_non_text(config: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for a model that accepts images or sound, or has an encoder."""
    if keys := [key for key in MODALITY_KEYS if config.get(key) is not None]:
        raise ConfigError(
            f"{name} accepts more than text (its config has {', '.join(keys)}), and art trains text models only: token trees "
            "can't contain images or sound. Pass a text model, such as Qwen/Qwen2.5-7B-Instruct"
        )
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{name} has an encoder, and art trains decoder-only models; pass a causal language model")


def _number(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"the config of {name} has {key}={value!r}, so its memory can't be computed; pass a config.json that sets {key}: "
            "that of a causal language model with Llama's key names"
        )
    return value


def _positions(config: Mapping[str, Any], name: str) -> int:
    """Return the longest context in tokens; with YaRN, at least the original length times the factor, as in a run."""
    limit = _number(config, "max_position_embeddings", name, 4096)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "yarn":
        return limit
    return max(limit, int((rope.get("original_max_position_embeddings") or limit) * (rope.get("factor") or 1)))


def _kinds(config: Mapping[str, Any], family: str, layers: int) -> list[str]:
    """Return the layers' attention types for a config that doesn't list them."""
    first = layers
    if config.get("sliding_window") and family.startswith("qwen"):
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else layers
    elif config.get("sliding_window") and not family.startswith("gemma"):  # Gemma uses them in some layers only
        first = 0
    return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]


def _biased(config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    if family == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    if not config.get("attention_bias"):
        return ()
    return ("q_proj", "k_proj", "v_proj", "o_proj") if "kv_lora_rank" not in config else (
        "q_a_proj", "kv_a_proj_with_mqa", "o_proj",
    )  # fmt: skip


def _experts(config: Mapping[str, Any], layers: int, name: str) -> Experts | None:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    key = next((key for key in names if config.get(key)), None)
    if key is None:
        return None
    has_own = config.get("moe_intermediate_size") is not None
    width = _number(config, "moe_intermediate_size" if has_own else "intermediate_size", name)
    return Experts(
        count=_number(config, key, name),
        per_token=config.get("num_experts_per_tok") or 2,
        width=width,
        layers=_expert_layers(config, layers),
        shared=config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0),
    )


def _expert_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have experts."""
    if kinds := config.get("mlp_layer_types"):
        return kinds.count("sparse")
    first, every = config.get("first_k_dense_replace", 0), config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    return sum(layer >= first and (layer + 1) % every == 0 and layer not in dense for layer in range(layers))


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query=config.get("q_lora_rank"),
        key_value=_number(config, "kv_lora_rank", name),
        plain=_number(config, "qk_nope_head_dim", name),
        rotary=_number(config, "qk_rope_head_dim", name),
        value=_number(config, "v_head_dim", name),
    )
