"""A plan and a step's tokens -> arithmetic, seconds and money. Knows nothing about memory or printing.

Seconds are estimates from published peaks and the shares of them in ``ASSUMED``; nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from art_vllm.plan import Plan, Setup, sequence_bytes
from art_vllm.shapes import Shape
from art_vllm.workload import Tokens, Workload

PREFILL_SHARE, DECODE_SHARE, LEARNER_SHARE = 0.5, 0.6, 0.3
"""Of the peak: arithmetic of prompts, memory bandwidth of decoding, arithmetic of the learner."""
ASSUMED = (
    f"all runs of a step at once; prompts at {PREFILL_SHARE:.0%} and learning at {LEARNER_SHARE:.0%} of the peak arithmetic; "
    f"decoding reads the weights once per token of the batch at {DECODE_SHARE:.0%} of the bandwidth"
)
NOT_COUNTED = "not counted: the agent's own work, its tools, the judge, swaps, sleeping and waking"


@dataclass(frozen=True)
class Work:
    """The arithmetic of one part of a step."""

    name: str
    tokens: float
    flops: float
    """Multiplications and additions, counted apart."""
    seconds: float | None
    """None where the GPU's speed is not known, or the plan does not fit."""


@dataclass(frozen=True)
class Cost:
    """One step."""

    workload: Workload
    parts: tuple[Work, ...]
    unshared: float
    """FLOPs of the prompts if every call's were computed anew."""
    batch: float
    """Sequences that are decoded together."""
    seconds: float | None
    dollars: float | None

    @property
    def flops(self) -> float:
        return sum(it.flops for it in self.parts)


def cost(found: Plan, workload: Workload, dollars_per_hour: float | None = None) -> Cost:
    """Return what a step takes; ``dollars_per_hour`` is the price of one GPU."""
    setup, shape, gpu = found.setup, found.setup.shape, found.setup.gpu
    batch = _batch(found, workload)
    prefill = forward_flops(shape, workload.prefill) + 2 * shape.head_weights * workload.calls
    decode = forward_flops(shape, workload.decode) + 2 * shape.head_weights * workload.decode.count
    learn = learner_flops(found, workload)
    times: tuple[float | None, ...] = (None, None, None)
    if found.fits and gpu.half and gpu.bandwidth and gpu.single:
        peak = 1e12 * gpu.half * setup.gpus
        own = 1e12 * (gpu.single if setup.trainer == "torch" else gpu.half)
        arithmetic = decode / (PREFILL_SHARE * peak)
        reading = _decode_bytes(setup, workload, batch) / (1e9 * gpu.bandwidth * setup.gpus * DECODE_SHARE)
        times = prefill / (PREFILL_SHARE * peak), max(arithmetic, reading), learn / (LEARNER_SHARE * own)
    parts = (
        Work("prompts", workload.prefill.count, prefill, times[0]),
        Work("decoding", workload.decode.count, decode, times[1]),
        Work("learning", workload.learner.count, learn, times[2]),
    )
    seconds = None
    if times[0] is not None:
        rollouts = times[0] + times[1]
        seconds = max(rollouts, times[2]) if setup.staleness else rollouts + times[2]
    dollars = None if seconds is None or dollars_per_hour is None else seconds / 3600 * dollars_per_hour * setup.gpus
    unshared = forward_flops(shape, workload.prompts) + 2 * shape.head_weights * workload.calls
    return Cost(workload, parts, unshared, batch, seconds, dollars)


def forward_flops(shape: Shape, tokens: Tokens) -> float:
    """Return 2 N for each token, N the weights that it is multiplied with, and attention; the LM head is left out."""
    return tokens.count * (2 * shape.active_linear_weights + attention_flops(shape, tokens.context))


def attention_flops(shape: Shape, context: float) -> float:
    """Return the FLOPs of a token that sees ``context`` tokens: 2 (key size + value size) for each head, layer and of these."""
    if shape.latent:
        width = shape.heads * (shape.latent.plain + shape.latent.rotary + shape.latent.value)
    else:
        width = shape.heads * 2 * shape.head_size
    full = shape.layers - shape.windowed - shape.stateful
    seen = full * context + shape.windowed * min(context, shape.window or context)
    return 2 * width * seen


def learner_flops(found: Plan, workload: Workload) -> float:
    """Return those of the learner's passes.

    A weight costs 2 FLOPs a token forward and 2 backward through it, and 2 more where it is trained: 4 N for LoRA, whose own
    weights cost 6, and 6 N for all weights. What is recomputed costs its forward pass again. Attention's backward pass costs
    twice its forward one.
    """
    setup, shape, tokens = found.setup, found.setup.shape, workload.learner
    recomputed = setup.trainer == "unsloth" or workload.largest > found.pass_tokens
    forward = 1 + recomputed
    trained = 0 if setup.rank else 1
    adapter = 6 * shape.adapter_parameters(setup.rank) * shape.active_linear_weights / shape.linear_weights
    each = 2 * (forward + 1 + trained) * shape.active_linear_weights
    attention = (forward + 2) * attention_flops(shape, tokens.context)
    # The head's logits are computed again in its backward pass.
    head = 2 * (3 + trained) * shape.head_weights * workload.targets
    return tokens.count * (each + adapter + attention) + head


def _batch(found: Plan, workload: Workload) -> float:
    """Return how many sequences of the mean length are decoded together."""
    room = found.sequences * found.setup.context
    longest = max(1.0, workload.decode.context)
    return max(1.0, min(found.setup.at_once, workload.runs, room / longest))


def _decode_bytes(setup: Setup, workload: Workload, batch: float) -> float:
    """Return the bytes that all GPUs read to sample a step's tokens: per token of a batch the weights once, and each one's
    cache."""
    shape, width = setup.shape, 1 if setup.serve_in_8bit else 2
    experts, touched = shape.expert_weights, 1.0
    if shape.experts:  # of the experts, those that some token of the batch takes, if all are as likely
        touched = 1 - (1 - shape.experts.per_token / shape.experts.count) ** batch
    weights = width * (shape.linear_weights - experts + touched * experts) + 2 * shape.head_weights
    cache = setup.gpus * sequence_bytes(setup) / setup.context * workload.decode.context  # read on all GPUs
    return workload.decode.count * (weights / batch + cache)
