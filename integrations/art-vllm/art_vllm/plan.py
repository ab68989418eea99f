"""Plans the GPU memory of a run from the model's shape, the GPU and the run's settings.

All sizes are bytes on one GPU: the first, which the learner uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from art_core import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.sizes import LORA_FROM, LORA_RANK
from art_vllm.command_line import RANKS
from art_vllm.gpus import GIB, GPUS, Gpu
from art_vllm.shapes import Shape

Phase = Literal["rollouts", "learning"]
UNSLOTH = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"})
"""``model_type`` of the models that ``learner="auto"`` trains with Unsloth on a GPU."""
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in bitsandbytes' NF4 with double quantization: one byte for the scale of 64 weights, 4 bytes for 256 scales
(QLoRA, arXiv 2305.14314, section 3)."""
MAX_PASS_TOKENS, MIN_PASS_TOKENS, PASS_MEMORY_SHARE = 65536, 256, 0.25
"""Bounds of a pass and its share of the memory if ``max_tokens_per_pass`` is not set: the learner's own values."""
SHORT_PASS = 2048
"""Tokens per pass to which the learner is limited if the engine lacks memory: shorter passes waste compute."""
HEAD = 3 * 2**24 * 4
"""Bytes of a chunk of logits: the logits, their exponentials and their gradient, 2^24 float32 numbers each."""
CUDA_CONTEXT = GIB // 2
"""Bytes that CUDA and its libraries use in every process."""
CUDA_GRAPHS = GIB
"""Bytes of vLLM's compiled graphs and communication buffers."""
MARGIN = 0.04
"""Share of the memory that stays free, for fragmentation and other users of the GPU."""
BFLOAT16_FROM = 1_000_000_000
"""Parameters from which the embedded engine serves in bfloat16 on a GPU: its own value; smaller models are in float32."""
SHORTEST_CONTEXT = 1024
"""Tokens; shorter contexts are not suggested."""
WORTHWHILE_GAIN = 1.25
"""Factor by which taking turns, or a suggested change, must increase the number of sequences."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The inputs of a plan."""

    shape: Shape
    gpu: Gpu
    gpus: int = 1
    """The engine is split over all; the learner uses the first."""
    lora_rank: int | None = None
    """0: all weights are trained; None: as ``TrainConfig.lora_rank``."""
    load_in_4bit: bool | None = None
    """None: as ``TrainConfig.load_in_4bit``."""
    learner: Literal["auto", "unsloth", "torch"] = "auto"
    """``auto``: as if Unsloth is installed."""
    engine: Literal["vllm", "embedded"] = "vllm"
    serve_in_8bit: bool = False
    """Whether vLLM quantizes the linear layers to 8 bits on loading: ``engine_args={"quantization": "fp8"}``."""
    context: int = 8192
    """Prompt plus answer, in tokens: ``max_context``."""
    group_size: int = 8
    tasks_per_step: int = 8
    staleness: int = 0
    """``max_staleness``: above 0 the engine serves while the learner works."""
    tree: int = 0
    """Unique tokens of the largest group; 0: unknown."""

    def __post_init__(self) -> None:
        if self.learner == "unsloth" and self.lora_rank == 0:
            raise ConfigError(
                "learner='unsloth' trains LoRA adapters only; pass a rank, or learner='torch' to train all weights"
            )
        if self.load_in_4bit and self.trainer == "torch":
            raise ConfigError("4-bit weights need learner='unsloth' and LoRA; the torch learner doesn't support them")
        if self.engine == "vllm" and self.rank > RANKS[-1]:
            raise ConfigError(f"vLLM serves adapters up to rank {RANKS[-1]}, got {self.rank}; lower lora_rank")
        if self.serve_in_8bit and self.engine != "vllm":
            raise ConfigError("only vLLM serves in 8 bits; pass engine='vllm', or omit serve_in_8bit")
        if self.context > self.shape.positions:
            raise ConfigError(
                f"context={self.context} exceeds the {self.shape.positions} positions of {self.shape.name}; pass at most "
                f"{self.shape.positions}"
            )
        heads, gpus = self.shape.heads, self.gpus
        if self.engine == "vllm" and heads % gpus:
            raise ConfigError(
                f"vLLM can't split {heads} attention heads over {gpus} GPUs; pass a number of GPUs that divides {heads}"
            )

    @property
    def trainer(self) -> Literal["unsloth", "torch"]:
        """The learner that the run uses."""
        if self.learner != "auto":
            return self.learner
        small = self.lora_rank is None and self.shape.parameters < LORA_FROM
        return "unsloth" if self.shape.family in UNSLOTH and self.lora_rank != 0 and not small else "torch"

    @property
    def rank(self) -> int:
        """Rank of the adapter; 0: all weights are trained."""
        if self.lora_rank is not None:
            return self.lora_rank
        return LORA_RANK if self.trainer == "unsloth" or self.shape.parameters >= LORA_FROM else 0

    @property
    def in_4bit(self) -> bool:
        """Whether the learner's frozen weights are quantized to 4 bits."""
        if self.trainer == "torch":
            return False
        if self.load_in_4bit is not None:
            return self.load_in_4bit
        return 2 * self.shape.parameters > self.gpu.memory / 2

    @property
    def bytes_served(self) -> int:
        """Bytes per weight and cached number of the engine, unless it serves in 8 bits."""
        return 4 if self.engine == "embedded" and self.shape.parameters < BFLOAT16_FROM else 2

    @property
    def at_once(self) -> int:
        """Most concurrent rollouts, if memory allows: vLLM's ``max-num-seqs``."""
        return min(TrainConfig.max_concurrent, self.group_size * self.tasks_per_step * (1 + self.staleness))


@dataclass(frozen=True)
class Part:
    """One item of the memory plan."""

    name: str
    size: int
    phases: tuple[Phase, ...]
    """When it is allocated if engine and learner take turns; side by side, it always is."""
    engine: bool
    """Whether the engine's process allocates it."""
    why: str
    """How the size was computed."""


@dataclass(frozen=True)
class Plan:
    """The memory that a setup needs, and what fits."""

    setup: Setup
    turns: bool
    """Whether the engine frees the GPU while the learner works: vLLM's sleep mode."""
    parts: tuple[Part, ...]
    """Includes the key-value cache."""
    pass_tokens: int
    """Tokens of one pass of the learner."""
    default_pass: int
    """The learner's own default for ``pass_tokens``."""
    sequences: int
    """Full-context sequences that the engine's cache holds, at most ``setup.at_once``; 0: the plan doesn't fit."""
    learns: bool
    """Whether a training step fits, even without the engine's cache."""

    @property
    def fits(self) -> bool:
        return self.learns and self.sequences >= 1

    @property
    def comfortable(self) -> bool:
        """Whether all rollouts of a step can run concurrently, each with a full context."""
        return self.learns and self.sequences >= self.setup.at_once

    def held(self, phase: Phase) -> int:
        """Return the bytes allocated in a phase."""
        return sum(part.size for part in self.parts if not self.turns or phase in part.phases)

    @property
    def peak(self) -> int:
        return max(self.held("rollouts"), self.held("learning"))

    @property
    def missing(self) -> int:
        """Bytes by which the plan exceeds the GPU, with room for one sequence; 0 if it fits."""
        each = 0 if self.sequences else sequence_bytes(self.setup)
        needed = max(self.held("rollouts") + each, self.held("learning") + (0 if self.turns else each))
        return max(0, needed - self.usable)

    @property
    def usable(self) -> int:
        return usable(self.setup.gpu)

    @property
    def utilization(self) -> float:
        """vLLM's ``gpu-memory-utilization``: its share of the whole GPU."""
        own = sum(part.size for part in self.parts if part.engine)
        return math.ceil(100 * own / self.setup.gpu.memory) / 100


def usable(gpu: Gpu) -> int:
    return int((1 - MARGIN) * gpu.memory)


def plan(setup: Setup, *, turns: bool | None = None) -> Plan:
    """Return the best plan: side by side, or taking turns if that leaves the engine much more memory.

    ``turns`` restricts the search to one of the two.
    """
    can_turn = setup.engine == "vllm" and setup.staleness == 0
    modes = [mode for mode in (False, True) if (mode is turns or turns is None) and (can_turn or not mode)]
    default = default_pass(setup)
    # Unsloth recomputes activations layer by layer, so a tree can't be split over passes.
    passes = [max(default, setup.tree)] if setup.trainer == "unsloth" else _passes(default)
    plans = [_with_pass(setup, mode, tokens, default) for tokens in passes for mode in modes]
    return next((candidate for candidate in plans if candidate.comfortable), max(plans, key=_merit))


def _merit(planned: Plan) -> tuple[bool, float, int]:
    # Sleeping and waking take seconds in every step, so a few more sequences aren't worth it.
    weight = WORTHWHILE_GAIN if planned.turns else 1
    return planned.fits, planned.sequences / weight, planned.usable - planned.peak


def _passes(default: int) -> list[int]:
    return sorted({default, min(default, SHORT_PASS), MIN_PASS_TOKENS}, reverse=True)


def _with_pass(setup: Setup, turns: bool, tokens: int, default: int) -> Plan:
    parts = (*_learner_parts(setup, tokens), *_engine_parts(setup))
    cacheless = Plan(setup, turns, parts, tokens, default, 0, learns=False)
    free = usable(setup.gpu) - (cacheless.held("rollouts") if turns else cacheless.peak)
    if setup.engine == "embedded":  # its cache is limited to this share of the memory that is free at its start
        free = min(free, int(0.4 * (setup.gpu.memory - sum(part.size for part in parts if part.engine))))
    learns = cacheless.held("learning") <= usable(setup.gpu)
    each = sequence_bytes(setup)
    sequences = min(setup.at_once, max(0, free // each))
    why = f"{sequences} sequences of {setup.context} tokens, {each // setup.context:,} bytes per token"
    cache = Part("keys and values", sequences * each, ("rollouts",), True, why)
    return replace(cacheless, parts=(*parts, cache), sequences=sequences, learns=learns)


def sequence_bytes(setup: Setup) -> int:
    """Return the cache bytes of a full-context sequence on one GPU."""
    shape, vllm = setup.shape, setup.engine == "vllm"
    numbers = shape.cached_numbers(compressed=vllm)
    # The embedded engine keeps full rows in every layer, even in layers with a sliding window.
    tokens = shape.cached_tokens(setup.context) if vllm else shape.layers * setup.context
    # Key-value heads are split over the GPUs, at least one per GPU; the vector of latent attention isn't split.
    split = 1 if shape.latent or not vllm else min(setup.gpus, shape.kv_heads)
    return math.ceil(setup.bytes_served * tokens * numbers / split)


def default_pass(setup: Setup) -> int:
    """Return the learner's default for ``max_tokens_per_pass``: what fits in a quarter of the memory, without recomputation."""
    token = setup.shape.layers * layer_activations(setup.shape) * (4 if setup.trainer == "torch" else 2)
    return min(MAX_PASS_TOKENS, max(MIN_PASS_TOKENS, int(PASS_MEMORY_SHARE * setup.gpu.memory / token)))


def layer_activations(shape: Shape) -> int:
    """Return how many numbers a layer keeps per token for its backward pass."""
    return 18 * shape.hidden + 6 * shape.feed_forward


def _learner_parts(setup: Setup, tokens: int) -> Iterator[Part]:
    shape, rank, both = setup.shape, setup.rank, ("rollouts", "learning")
    trained = shape.adapter_parameters(rank) if rank else shape.parameters
    yield Part("learner: CUDA", CUDA_CONTEXT, both, False, "an estimate")
    weights, why = _learner_weights(setup)
    yield Part("learner: weights", weights, both, False, why)
    if rank:
        yield Part("learner: adapter", 4 * trained, both, False, f"rank {rank}, {trained:,} parameters in float32")
    yield Part("learner: AdamW", 8 * trained, both, False, "two moments in float32")
    yield Part("learner: gradients", 4 * trained, ("learning",), False, "float32")
    head = HEAD + (0 if rank else 4 * shape.head_weights)
    yield Part("learner: LM head", head, ("learning",), False, "one chunk of logits at a time")
    activations, why = _activations(setup, tokens)
    if 4 * trained > activations:  # allocated when the activations are already freed
        activations, why = 4 * trained, "AdamW's temporaries, which exceed the activations"
    yield Part("learner: activations", activations, ("learning",), False, why)


def _learner_weights(setup: Setup) -> tuple[int, str]:
    shape = setup.shape
    if setup.trainer == "torch":
        return 4 * shape.parameters, "float32, the learner's own copy"
    if not setup.in_4bit:
        return 2 * shape.parameters, "16-bit, the learner's own copy"
    packed = shape.linear_weights - shape.expert_weights
    unpacked = 2 * max(linear.weights for linear in shape.linears() if not linear.expert)
    size = math.ceil(packed * FOUR_BITS) + 2 * (shape.parameters - packed) + unpacked
    others = "embeddings, LM head and experts" if shape.experts else "embeddings and LM head"
    return size, f"4-bit, {others} in 16; one layer dequantized"


def _activations(setup: Setup, tokens: int) -> tuple[int, str]:
    width = layer_activations(setup.shape)
    if setup.trainer == "torch":
        return tokens * setup.shape.layers * width * 4, f"{tokens:,} tokens per pass, all layers"
    # One layer is recomputed at a time, with its gradients; the layers' inputs wait in main memory.
    return tokens * width * 2 * 2, f"{tokens:,} tokens per pass, one layer at a time (recomputed)"


def _engine_parts(setup: Setup) -> Iterator[Part]:
    shape, rank, both = setup.shape, setup.rank, ("rollouts", "learning")
    name = setup.engine
    if name == "embedded":
        yield Part("embedded: CUDA", CUDA_CONTEXT, both, True, "an estimate")
        number = "bfloat16" if setup.bytes_served == 2 else "float32"
        size = setup.bytes_served * shape.parameters
        yield Part("embedded: weights", size, both, True, f"{number}, adapters merged in")
        return
    split = f", over {setup.gpus} GPUs" if setup.gpus > 1 else ""
    yield Part("vllm: CUDA and graphs", CUDA_CONTEXT + CUDA_GRAPHS, both, True, "an estimate; stays during sleep")
    eighth = shape.linear_weights if setup.serve_in_8bit else 0
    bits = "8-bit, embeddings and LM head in 16" if eighth else "16-bit"
    size = (2 * shape.parameters - eighth) // setup.gpus
    yield Part("vllm: weights", size, ("rollouts",), True, f"{bits}{split}")
    if rank:
        versions = setup.staleness + 2
        size = 2 * versions * shape.adapter_parameters(rank) // setup.gpus
        yield Part("vllm: adapters", size, ("rollouts",), True, f"{versions} versions in 16-bit{split}")
    tokens = batched_tokens(setup.gpu)
    batch = 2 * tokens * (4 * shape.hidden + 2 * shape.feed_forward) // setup.gpus
    logits = 3 * 4 * setup.at_once * shape.vocabulary
    yield Part("vllm: activations", batch + logits, ("rollouts",), True, f"{tokens} prompt tokens per batch")


def machine_parts(planned: Plan) -> dict[str, int]:
    """Return the main memory in bytes that a run needs because of how it shares the GPU."""
    setup, shape = planned.setup, planned.setup.shape
    parts = {}
    if planned.turns:
        own = sum(part.size for part in planned.parts if part.name == "vllm: weights")
        parts["the weights of a sleeping vLLM"] = own * setup.gpus
    if setup.engine == "embedded":
        parts["the float32 weights that learner and engine share"] = 4 * (
            shape.linear_weights if setup.rank else shape.parameters
        )
    if setup.trainer == "unsloth":
        parts["offloaded activations"] = 2 * planned.pass_tokens * shape.hidden * shape.layers
    return parts


def batched_tokens(gpu: Gpu) -> int:
    """Return vLLM 0.32's default for ``max-num-batched-tokens``."""
    if gpu.memory < 70 * GIB or gpu.name.startswith("A100"):
        return 2048
    return 8192 if gpu.memory < 160 * GIB else 16384


def remedies(planned: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield changes, with their plans, that fit and give the engine clearly more memory.

    Single changes, or pairs if no single one is enough.
    """
    least = max(1, WORTHWHILE_GAIN * planned.sequences)
    single = [(change, setup, plan(setup)) for change, setup in _changes(planned.setup)]
    enough = [(change, better) for change, _, better in single if better.fits and better.sequences >= least]
    yield from enough
    seen = set()
    for first, changed, _ in [] if enough or planned.fits else single:
        for second, both in _changes(changed):
            same_field = _changed(planned.setup, both) == _changed(planned.setup, changed)
            if not same_field and both not in seen and (better := plan(both)).fits:
                seen.add(both)
                yield f"{first}, and {second}", better


def _changed(setup: Setup, other: Setup) -> set[str]:
    return {field.name for field in fields(Setup) if getattr(setup, field.name) != getattr(other, field.name)}


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    if setup.rank == 0:
        yield f"lora_rank={LORA_RANK}: train an adapter", replace(setup, lora_rank=LORA_RANK, learner="auto")
    if setup.trainer == "torch" and setup.rank:
        yield 'learner="unsloth": weights in 16 or 4 bits', replace(setup, learner="unsloth")
    if setup.trainer == "unsloth" and not setup.in_4bit:
        yield "load_in_4bit=True", replace(setup, load_in_4bit=True)
    if setup.engine == "vllm" and not setup.serve_in_8bit:
        yield "--serve-in-8bit: vLLM keeps the weights in 8 bits", replace(setup, serve_in_8bit=True)
    if setup.staleness:
        yield "max_staleness=0: learner and vLLM take turns", replace(setup, staleness=0)
    yield from _size_changes(setup)


def _size_changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for context in (setup.context // 2, setup.context // 4):
        if context >= SHORTEST_CONTEXT:
            yield f"max_context={context}", replace(setup, context=context)
    for gpus in (2, 4, 8):
        if gpus > setup.gpus and setup.engine == "vllm" and setup.shape.heads % gpus == 0:
            yield f"{gpus} GPUs", replace(setup, gpus=gpus)
    least = max(1, WORTHWHILE_GAIN * plan(setup).sequences)
    larger = [replace(setup, gpu=gpu) for gpu in GPUS if gpu.memory > setup.gpu.memory]
    if better := next((changed for changed in larger if plan(changed).sequences >= least), None):
        yield f"another GPU: {better.gpu.name}", better
