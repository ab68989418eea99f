"""A model, a GPU and how a run is to go -> the memory it takes and what fits. Knows nothing about names, time or printing.

All sizes are bytes of one GPU: the first, on which the learner works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.sizes import LORA_FROM, LORA_RANK
from art_vllm.command_line import RANKS
from art_vllm.gpus import GIB, GPUS, Gpu
from art_vllm.shapes import Shape

Phase = Literal["rollouts", "learning"]
UNSLOTH = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"})
"""``model_type`` of the models for which ``learner="auto"`` takes Unsloth on a GPU."""
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in bitsandbytes' NF4 with double quantisation: a byte for 64 weights' scale, 4 for 256 scales (QLoRA,
arXiv 2305.14314, section 3)."""
MOST_TOKENS, LEAST_TOKENS, MEMORY_SHARE = 65536, 256, 0.25
"""Of a pass, where ``max_tokens_per_pass`` does not say; and the share of the memory that it may take. The learner's own."""
SHORT_PASS = 2048
"""Tokens of a pass to which the learner is held where the engine lacks memory: shorter ones waste arithmetic."""
HEAD = 3 * 2**24 * 4
"""The LM head's chunks of logits: scores, their exponentials and their gradient, 2^24 float32 numbers each."""
CONTEXT = GIB // 2
"""What CUDA and its libraries take in every process."""
GRAPHS = GIB
"""What vLLM takes besides: compiled graphs and communication buffers."""
MARGIN = 0.04
"""Of the memory, left alone: fragments, and whatever else draws on the card."""
SHORT_CONTEXT = 1024
"""Tokens; a shorter one is not proposed."""
WORTH = 1.25
"""Times the sequences that a change must give: to take turns, or to be proposed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is to be planned."""

    shape: Shape
    gpu: Gpu
    gpus: int = 1
    """The engine is split over all; the learner works on the first."""
    lora_rank: int | None = None
    """0 trains all weights; None: as ``TrainConfig.lora_rank``."""
    load_in_4bit: bool | None = None
    """None: as ``TrainConfig.load_in_4bit``."""
    learner: Literal["auto", "unsloth", "torch"] = "auto"
    """``auto``: as on a GPU with Unsloth installed."""
    engine: Literal["vllm", "embedded"] = "vllm"
    serve_in_8bit: bool = False
    """Whether vLLM keeps the linear layers in 8 bits, made as it loads them: ``engine_args={"quantization": "fp8"}``."""
    context: int = 8192
    """Prompt plus answer, in tokens: ``max_context``."""
    group_size: int = 8
    tasks_per_step: int = 8
    staleness: int = 0
    """``max_staleness``: above 0 the engine serves while the learner works."""
    tree: int = 0
    """Unique tokens of the largest group; 0: not known."""

    def __post_init__(self) -> None:
        if self.learner == "unsloth" and self.lora_rank == 0:
            raise ConfigError(
                "learner='unsloth' trains LoRA adapters; give a rank, or learner='torch' to train all weights"
            )
        if self.load_in_4bit and self.trainer == "torch":
            raise ConfigError("4-bit weights need learner='unsloth' and LoRA; leave them out for the torch learner")
        if self.engine == "vllm" and self.rank > RANKS[-1]:
            raise ConfigError(f"an adapter of rank {self.rank} is more than vLLM serves; give at most {RANKS[-1]}")
        if self.serve_in_8bit and self.engine != "vllm":
            raise ConfigError("only vLLM serves in 8 bits; give engine='vllm', or leave it out")
        if self.context > self.shape.positions:
            raise ConfigError(
                f"a context of {self.context} is more than the {self.shape.positions} positions of {self.shape.name}; give "
                "at most that"
            )
        heads, gpus = self.shape.heads, self.gpus
        if self.engine == "vllm" and heads % gpus:
            raise ConfigError(
                f"vLLM cannot split {heads} attention heads over {gpus} GPUs; give a number that divides them"
            )

    @property
    def trainer(self) -> Literal["unsloth", "torch"]:
        """The learner that the run takes."""
        if self.learner != "auto":
            return self.learner
        small = self.lora_rank is None and self.shape.parameters < LORA_FROM
        return "unsloth" if self.shape.family in UNSLOTH and self.lora_rank != 0 and not small else "torch"

    @property
    def rank(self) -> int:
        """Of the adapter; 0: all weights are trained."""
        if self.lora_rank is not None:
            return self.lora_rank
        return LORA_RANK if self.trainer == "unsloth" or self.shape.parameters >= LORA_FROM else 0

    @property
    def in_4bit(self) -> bool:
        """Whether the learner's frozen weights are in 4 bits."""
        if self.trainer == "torch":
            return False
        if self.load_in_4bit is not None:
            return self.load_in_4bit
        return 2 * self.shape.parameters > self.gpu.memory / 2

    @property
    def at_once(self) -> int:
        """Rollouts that run at the same time, where memory allows it: as many as vLLM is started for."""
        return min(TrainConfig.max_concurrent, self.group_size * self.tasks_per_step * (1 + self.staleness))


@dataclass(frozen=True)
class Part:
    """A piece of memory."""

    name: str
    size: int
    phases: tuple[Phase, ...]
    """When it is held where engine and learner take turns; else it always is."""
    engine: bool
    """Whether the engine's process holds it."""
    why: str
    """How it was counted."""


@dataclass(frozen=True)
class Plan:
    """What a setup takes, and what fits."""

    setup: Setup
    turns: bool
    """Whether the engine leaves the GPU to the learner during a step: vLLM's sleep mode."""
    parts: tuple[Part, ...]
    """Keys and values included."""
    pass_tokens: int
    """Of a pass of the learner."""
    default_pass: int
    """What the learner would take by itself."""
    sequences: int
    """Of the whole context, that the engine's cache holds; 0: it does not fit."""
    learns: bool
    """Whether a step fits, with nothing left for the engine's cache."""

    @property
    def fits(self) -> bool:
        return self.learns and self.sequences >= 1

    @property
    def comfortable(self) -> bool:
        """Whether all rollouts of a step can run at a time, each with its whole context."""
        return self.learns and self.sequences >= self.setup.at_once

    def held(self, phase: Phase) -> int:
        """Return the bytes that are taken in a phase."""
        return sum(it.size for it in self.parts if not self.turns or phase in it.phases)

    @property
    def peak(self) -> int:
        return max(self.held("rollouts"), self.held("learning"))

    @property
    def missing(self) -> int:
        """Bytes that are over, with room for one sequence; 0 where it fits."""
        each = 0 if self.sequences else sequence_bytes(self.setup)
        needed = max(self.held("rollouts") + each, self.held("learning") + (0 if self.turns else each))
        return max(0, needed - self.usable)

    @property
    def usable(self) -> int:
        return usable(self.setup.gpu)

    @property
    def utilization(self) -> float:
        """vLLM's ``gpu-memory-utilization``: the share of the whole GPU that it may take for itself."""
        own = sum(it.size for it in self.parts if it.engine)
        return math.ceil(100 * own / self.setup.gpu.memory) / 100


def usable(gpu: Gpu) -> int:
    return int((1 - MARGIN) * gpu.memory)


def plan(setup: Setup, *, turns: bool | None = None) -> Plan:
    """Return the way that suits the setup best: side by side, or by turns where that leaves the engine much more room.

    ``turns`` looks at that way only.
    """
    can_turn = setup.engine == "vllm" and setup.staleness == 0
    ways = [way for way in (False, True) if (way is turns or turns is None) and (can_turn or not way)]
    default = default_pass(setup)
    # Where activations are recomputed layer by layer, a tree cannot be cut.
    passes = [max(default, setup.tree)] if setup.trainer == "unsloth" else _passes(default)
    found = [_with_pass(setup, way, tokens, default) for tokens in passes for way in ways]
    return next((it for it in found if it.comfortable), max(found, key=_merit))


def _merit(found: Plan) -> tuple[bool, float, int]:
    # Sleeping and waking take seconds of every step, so a few sequences more are not worth it.
    return found.fits, found.sequences / (WORTH if found.turns else 1), found.usable - found.peak


def _passes(default: int) -> list[int]:
    return sorted({default, min(default, SHORT_PASS), LEAST_TOKENS}, reverse=True)


def _with_pass(setup: Setup, turns: bool, tokens: int, default: int) -> Plan:
    parts = (*_learner_parts(setup, tokens), *_engine_parts(setup))
    without = Plan(setup, turns, parts, tokens, default, 0, learns=False)
    room = usable(setup.gpu) - (without.held("rollouts") if turns else without.peak)
    if setup.engine == "embedded":  # its cache takes at most this share of what is free when it starts
        room = min(room, int(0.4 * (setup.gpu.memory - sum(it.size for it in parts if it.engine))))
    learns = without.held("learning") <= usable(setup.gpu)
    each = sequence_bytes(setup)
    sequences = max(0, room // each)
    kept = min(sequences, setup.at_once) * each
    why = (
        f"{min(sequences, setup.at_once)} sequences of {setup.context} tokens, {each // setup.context:,} bytes a token"
    )
    cache = Part("keys and values", kept, ("rollouts",), True, why)
    return replace(without, parts=(*parts, cache), sequences=sequences, learns=learns)


def sequence_bytes(setup: Setup) -> int:
    """Return the bytes of cache for a sequence of the whole context, on one GPU."""
    shape, vllm = setup.shape, setup.engine == "vllm"
    numbers = shape.cached_numbers(compressed=vllm)
    # The embedded engine keeps rows whole, windows or not, and has a place in every layer.
    tokens = shape.cached_tokens(setup.context) if vllm else shape.layers * setup.context
    # Key-value heads are split over GPUs, down to one each; the vector of latent attention has no heads.
    split = 1 if shape.latent or not vllm else min(setup.gpus, shape.kv_heads)
    return math.ceil(2 * tokens * numbers / split)


def default_pass(setup: Setup) -> int:
    """Return the tokens of a pass where ``max_tokens_per_pass`` does not say: what a quarter of the memory would hold.

    The learner's own estimate, which knows nothing of recomputation.
    """
    token = setup.shape.layers * layer_activations(setup.shape) * (4 if setup.trainer == "torch" else 2)
    return min(MOST_TOKENS, max(LEAST_TOKENS, int(MEMORY_SHARE * setup.gpu.memory / token)))


def layer_activations(shape: Shape) -> int:
    """Return the numbers that a layer keeps of a token for its backward pass."""
    return 18 * shape.hidden + 6 * shape.feed_forward


def _learner_parts(setup: Setup, tokens: int) -> Iterator[Part]:
    shape, rank, both = setup.shape, setup.rank, ("rollouts", "learning")
    trained = shape.adapter_parameters(rank) if rank else shape.parameters
    yield Part("learner: CUDA", CONTEXT, both, False, "an estimate")
    weights, why = _learner_weights(setup)
    yield Part("learner: weights", weights, both, False, why)
    if rank:
        yield Part("learner: adapter", 4 * trained, both, False, f"rank {rank}, {trained:,} parameters in float32")
    yield Part("learner: AdamW", 8 * trained, both, False, "two moments in float32")
    yield Part("learner: gradients", 4 * trained, ("learning",), False, "float32")
    head = HEAD + (0 if rank else 4 * shape.head_weights)
    yield Part("learner: LM head", head, ("learning",), False, "a chunk of logits at a time")
    activations, why = _activations(setup, tokens)
    if 4 * trained > activations:  # they come when the activations are gone
        activations, why = 4 * trained, "AdamW's temporaries, which are more"
    yield Part("learner: activations", activations, ("learning",), False, why)


def _learner_weights(setup: Setup) -> tuple[int, str]:
    shape = setup.shape
    if setup.trainer == "torch":
        return 4 * shape.parameters, "float32, a copy of the learner's own"
    if not setup.in_4bit:
        return 2 * shape.parameters, "16-bit, a copy of the learner's own"
    packed = shape.linear_weights - shape.expert_weights
    unpacked = 2 * max(it.weights for it in shape.linears() if not it.expert)
    size = math.ceil(packed * FOUR_BITS) + 2 * (shape.parameters - packed) + unpacked
    others = "embeddings, LM head and experts" if shape.experts else "embeddings and LM head"
    return size, f"4-bit, {others} in 16; one layer unpacked"


def _activations(setup: Setup, tokens: int) -> tuple[int, str]:
    width = layer_activations(setup.shape)
    if setup.trainer == "torch":
        return tokens * setup.shape.layers * width * 4, f"a pass of {tokens:,} tokens, all layers"
    # One layer is computed again at a time, with its gradients; what goes into the layers waits in the machine's memory.
    return tokens * width * 2 * 2, f"a pass of {tokens:,} tokens, a layer at a time (recomputed)"


def _engine_parts(setup: Setup) -> Iterator[Part]:
    shape, rank, both = setup.shape, setup.rank, ("rollouts", "learning")
    name = setup.engine
    if name == "embedded":
        yield Part("embedded: CUDA", CONTEXT, both, True, "an estimate")
        yield Part("embedded: weights", 2 * shape.parameters, both, True, "bfloat16, adapters merged in")
        return
    split = f", over {setup.gpus} GPUs" if setup.gpus > 1 else ""
    yield Part("vllm: CUDA and graphs", CONTEXT + GRAPHS, both, True, "an estimate; stays while it sleeps")
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
    yield Part("vllm: activations", batch + logits, ("rollouts",), True, f"{tokens} tokens of prompts at a time")


def machine_parts(found: Plan) -> dict[str, int]:
    """Return the bytes of the machine's own memory that a run takes because of how it shares the GPU."""
    setup, shape = found.setup, found.setup.shape
    parts = {}
    if found.turns:
        own = sum(it.size for it in found.parts if it.name == "vllm: weights")
        parts["the weights of a sleeping vLLM"] = own * setup.gpus
    if setup.engine == "embedded":
        parts["the weights that learner and engine share, float32"] = 4 * (
            shape.linear_weights if setup.rank else shape.parameters
        )
    if setup.trainer == "unsloth":
        parts["activations that wait there"] = 2 * found.pass_tokens * shape.hidden * shape.layers
    return parts


def batched_tokens(gpu: Gpu) -> int:
    """Return how many tokens of prompts vLLM 0.32 computes at a time by itself (``max-num-batched-tokens``)."""
    if gpu.memory < 70 * GIB or gpu.name.startswith("A100"):
        return 2048
    return 8192 if gpu.memory < 160 * GIB else 16384


def remedies(found: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield what to change, with the plan that comes of it, where that one fits and gives the engine clearly more room.

    One thing at a time, or two where one is not enough.
    """
    least = max(1, WORTH * found.sequences)
    single = [(what, changed, plan(changed)) for what, changed in _changes(found.setup)]
    enough = [(what, it) for what, _, it in single if it.fits and it.sequences >= least]
    yield from enough
    seen = set()
    for first, changed, _ in [] if enough or found.fits else single:
        for second, both in _changes(changed):
            twice = _changed(found.setup, both) == _changed(found.setup, changed)  # the same thing, further
            if not twice and both not in seen and (it := plan(both)).fits:
                seen.add(both)
                yield f"{first}, and {second}", it


def _changed(setup: Setup, other: Setup) -> set[str]:
    return {it.name for it in fields(Setup) if getattr(setup, it.name) != getattr(other, it.name)}


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
    yield from _smaller_or_more(setup)


def _smaller_or_more(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for context in (setup.context // 2, setup.context // 4):
        if context >= SHORT_CONTEXT:
            yield f"max_context={context}", replace(setup, context=context)
    for gpus in (2, 4, 8):
        if gpus > setup.gpus and setup.engine == "vllm" and setup.shape.heads % gpus == 0:
            yield f"{gpus} GPUs", replace(setup, gpus=gpus)
    least = max(1, WORTH * plan(setup).sequences)
    larger = [replace(setup, gpu=gpu) for gpu in GPUS if gpu.memory > setup.gpu.memory]
    if better := next((it for it in larger if plan(it).sequences >= least), None):
        yield f"another GPU: {better.gpu.name}", better
