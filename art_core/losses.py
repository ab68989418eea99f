"""LossInputs -> LossOutputs: pure functions of tensors. Knows nothing about models, trees or optimizers.

Normalisation. A trajectory weighs the same however many calls, branches or rows its tokens came in: the terms of its
targets are averaged over the trajectory, and the trajectories are averaged over the optimizer step. Where a step is
computed in parts, ``step_trajectories`` makes the parts' losses add up to the loss of the step.

Metrics are means over the trained targets (weight > 0) of these rows, so those of a step are the parts' means weighted
by their numbers of trained targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core.types import LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor


def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0) -> LossOutputs:
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, equations 3 and 4)::

        L = -(1/N) sum over trajectories of (1/n) sum over targets of w [min(r A, clip(r) A) - kl D]

    with r = exp(logprob - old_logprob) the ratio, clip(r) = r held in [1 - clip_low, 1 + clip_high], A the advantage, w
    the weight, n the sum of the trajectory's weights and N the number of trajectories with trained targets in the step.
    D = exp(d) - d - 1 with d = ref_logprob - logprob is the estimator "k3" of the KL divergence from the reference
    (Schulman, http://joschu.net/blog/kl-approx.html): unbiased and never negative.

    Metrics: ``clip_fraction`` (targets whose term was clipped), ``ratio`` (mean r), ``kl_old`` (k3 of the divergence
    between the sampling weights and these) and, where there are reference logprobs, ``kl_ref`` (mean D).
    Raises ValueError where ``kl`` is asked for without reference logprobs.
    """
    if kl and inputs.ref_logprobs is None:
        raise ValueError(f"kl={kl} needs ref_logprobs; give the reference's logprobs, or kl=0")
    rows = _trained(inputs)
    if not len(rows.weights):
        return LossOutputs(inputs.logprobs.sum() * 0.0, {})
    log_ratio = rows.logprobs - rows.old_logprobs
    ratio = log_ratio.exp()
    unclipped = ratio * rows.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * rows.advantages
    gain = unclipped.minimum(clipped)
    metrics = {
        "clip_fraction": _mean((unclipped > clipped).float()),
        "ratio": _mean(ratio),
        "kl_old": _mean(_k3(log_ratio)),
    }
    if rows.ref_logprobs is not None:
        divergence = _k3(rows.ref_logprobs - rows.logprobs)
        metrics["kl_ref"] = _mean(divergence)
        if kl:
            gain = gain - kl * divergence
    return LossOutputs(-_mean_of_trajectories(gain, rows), metrics)


def _trained(inputs: LossInputs) -> LossInputs:
    """Drop the rows of weight 0: whatever stands in them, NaN included, must not reach the loss."""
    keep = inputs.weights != 0
    return LossInputs(
        logprobs=inputs.logprobs[keep],
        old_logprobs=inputs.old_logprobs[keep],
        ref_logprobs=None if inputs.ref_logprobs is None else inputs.ref_logprobs[keep],
        advantages=inputs.advantages[keep],
        weights=inputs.weights[keep],
        trajectory=inputs.trajectory[keep],
        call=inputs.call[keep],
        step_trajectories=inputs.step_trajectories,
    )


def _mean_of_trajectories(values: Tensor, rows: LossInputs) -> Tensor:
    """Average over each trajectory's targets by weight, then over the step's trajectories."""
    present, row_of = rows.trajectory.unique(return_inverse=True)
    totals = rows.weights.new_zeros(len(present)).index_add(0, row_of, rows.weights)
    return (values * rows.weights / totals[row_of]).sum() / (rows.step_trajectories or len(present))


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - log_ratio - 1


def _mean(values: Tensor) -> float:
    return values.detach().mean().item()


def sft(inputs: LossInputs) -> LossOutputs:
    """Maximum likelihood of what was sampled (supervised fine-tuning)::

        L = -(1/N) sum over trajectories of (1/n) sum over targets of w logprob

    with w, n and N as in ``grpo``; advantages and old logprobs are not read. Metrics: ``nll`` (mean -logprob).
    """
    rows = _trained(inputs)
    if not len(rows.weights):
        return LossOutputs(inputs.logprobs.sum() * 0.0, {})
    return LossOutputs(-_mean_of_trajectories(rows.logprobs, rows), {"nll": _mean(-rows.logprobs)})
