"""Estimates the FLOPs, time and price of a training step.

Times come from published peaks and the assumed shares of them below; nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from art_vllm.plan import Plan, Setup, sequence_bytes
from art_vllm.shapes import Shape
from art_vllm.workload import Tokens, Workload

PREFILL_SHARE, DECODE_SHARE, LEARNER_SHARE = 0.5, 0.6, 0.3
"""Shares of the GPU's peak: compute for prompts, memory bandwidth for decoding, compute for the learner."""
ASSUMED = (
    f"all rollouts of a step run concurrently; prompts at {PREFILL_SHARE:.0%} and learning at {LEARNER_SHARE:.0%} of peak "
    f"compute; decoding reads the weights once per step at {DECODE_SHARE:.0%} of the bandwidth"
)
NOT_COUNTED = "not included: the agent's own work, its tools, the judge, weight swaps, sleeping and waking"


@dataclass(frozen=True)
class Work:
    """The compute of one part of a step."""

    name: str
    tokens: float
    flops: float
    """Multiplications plus additions."""
    seconds: float | None
    """None if the GPU's speed is unknown or the plan doesn't fit."""


@dataclass(frozen=True)
class Cost:
    """The compute, time and price of one step."""

    workload: Workload
    parts: tuple[Work, ...]
    unshared: float
    """FLOPs of the prompts without prefix sharing."""
    batch: float
    """Sequences per decoding batch."""
    seconds: float | None
    dollars: float | None

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)


def cost(planned: Plan, workload: Workload, dollars_per_hour: float | None = None) -> Cost:
    """Return the cost of a step; ``dollars_per_hour`` is the price of one GPU."""
    setup, shape, gpu = planned.setup, planned.setup.shape, planned.setup.gpu
    batch = _batch(planned, workload)
    prefill = forward_flops(shape, workload.prefill) + 2 * shape.head_weights * workload.calls
    decode = forward_flops(shape, workload.decode) + 2 * shape.head_weights * workload.decode.count
    learn = learner_flops(planned, workload)
    times: tuple[float | None, ...] = (None, None, None)
    if planned.fits and gpu.half and gpu.bandwidth and gpu.single:
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
    """Return the FLOPs of a forward pass without the LM head: 2 per active weight and token, plus attention."""
    return tokens.count * (2 * shape.active_linear_weights + attention_flops(shape, tokens.context))


def attention_flops(shape: Shape, context: float) -> float:
    """Return the FLOPs of one token that attends to ``context`` tokens: 2 (key size + value size) per head, layer and token."""
    if shape.latent:
        width = shape.heads * (shape.latent.plain + shape.latent.rotary + shape.latent.value)
    else:
        width = shape.heads * 2 * shape.head_size
    full = shape.layers - shape.windowed - shape.stateful
    attended = full * context + shape.windowed * min(context, shape.window or context)
    return 2 * width * attended


def learner_flops(planned: Plan, workload: Workload) -> float:
    """Return the FLOPs of the learner's passes.

    Per token, a weight costs 2 FLOPs forward and 2 for the gradient through it, and 2 more if it is trained: 4 N for the
    frozen weights under LoRA, 6 for each adapter weight, 6 N if all weights are trained. Recomputation costs another forward
    pass. Attention's backward pass costs twice its forward pass.
    """
    setup, shape, tokens = planned.setup, planned.setup.shape, workload.learner
    recomputed = setup.trainer == "unsloth" or workload.largest > planned.pass_tokens
    forward = 1 + recomputed
    trained = 0 if setup.rank else 1
    adapter = 6 * shape.adapter_parameters(setup.rank) * shape.active_linear_weights / shape.linear_weights
    each = 2 * (forward + 1 + trained) * shape.active_linear_weights
    attention = (forward + 2) * attention_flops(shape, tokens.context)
    # The LM head's logits are recomputed in its backward pass.
    head = 2 * (3 + trained) * shape.head_weights * workload.targets
    return tokens.count * (each + adapter + attention) + head


def _batch(planned: Plan, workload: Workload) -> float:
    """Return how many sequences of mean length are decoded together."""
    cache_tokens = planned.sequences * planned.setup.context
    length = max(1.0, workload.decode.context)
    return max(1.0, min(planned.setup.at_once, workload.runs, cache_tokens / length))


def _decode_bytes(setup: Setup, workload: Workload, batch: float) -> float:
    """Return the bytes that all GPUs read to sample a training step's tokens: the weights once per decoding step, and every
    token's cache."""
    shape, width = setup.shape, 1 if setup.serve_in_8bit else 2
    experts, touched = shape.expert_weights, 1.0
    if shape.experts:  # the share that some token of the batch uses, if all experts are equally likely
        touched = 1 - (1 - shape.experts.per_token / shape.experts.count) ** batch
    weights = width * (shape.linear_weights - experts + touched * experts) + 2 * shape.head_weights
    cache = setup.gpus * sequence_bytes(setup) / setup.context * workload.decode.context  # on all GPUs
    return workload.decode.count * (weights / batch + cache)
