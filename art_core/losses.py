"""LossInputs -> LossOutputs: pure functions of tensors.

Every loss is ``L = - sum over targets of share (c gain - kl D)``. The docstring of each loss gives its gain, with

- r = exp(logprob - proximal_logprob), the probability ratio of the weights being trained to those before the update; without
  ``proximal_logprobs``, to the recorded ``old_logprobs``. clip(r) is r clipped to [1 - clip_low, 1 + clip_high]
- A, the target's advantage
- D = exp(d) - d - 1 with d = ref_logprob - logprob, the "k3" estimator of the KL divergence from the reference (Schulman,
  http://joschu.net/blog/kl-approx.html), which is unbiased and never negative
- c = min(exp(proximal_logprob - old_logprob), importance_cap), without gradient; 1 without ``proximal_logprobs``. This is
  truncated importance sampling: it corrects for an engine that sampled with other numerics or older weights than the
  learner's, and the cap bounds the variance (V-trace, arXiv 1802.01561, section 4.1; between engine and learner: Yao et
  al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). ``importance_cap=None`` means no cap

Normalization. A target's share depends on its weight w, the sum n of its trajectory's weights, the sum W of the step's
weights (``step_weight``), and the number N of the step's trajectories with trained targets (``step_trajectories``)::

    grpo, gspo, distill  w / (n N)           the mean over each trajectory's targets, then over the trajectories
    dapo, cispo          w / W               the mean over all targets of the step
    dr_grpo              w / (max_tokens N)  the sum over each trajectory's targets / max_tokens, then the mean over trajectories

None of these depends on calls, branches or rows, so a trajectory weighs the same however its tokens are split. Given the
step's totals, the losses of a step's parts add up to the loss of the step. A part must consist of whole trajectories, except
for dapo, cispo and dr_grpo.

Metrics are means over the trained targets (weight > 0) of these rows, so a step's metric is the mean of its parts' metrics,
weighted by their numbers of trained targets. A metric whose name ends with ``_max`` is the maximum, for a step too.

- ``ratio``: r; ``clip_fraction``: the fraction of targets whose gain was clipped
- ``kl_old``: k3 of the divergence between the sampling weights and these; ``kl_ref``, with reference logprobs: D
- ``importance`` and ``importance_max``, with proximal logprobs: exp(proximal_logprob - old_logprob);
  ``importance_truncated``: the fraction of targets for which it was above the cap

Every loss raises ValueError if ``kl`` is nonzero without reference logprobs, or ``importance_cap`` is set without proximal ones.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from art_core.types import Loss, LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor


def grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0, importance_cap: float | None = None,
) -> LossOutputs:  # fmt: skip
    """Group-relative policy optimization (DeepSeekMath, arXiv 2402.03300, equations 3 and 4)::

        gain = min(r A, clip(r) A)      share = w / (n N)

    Each target is clipped on its own, and every trajectory weighs the same, whatever its length.
    """
    rows = _trained(inputs)
    return _clipped(rows, _log_ratio(rows).exp(), _trajectory_mean(rows), (clip_low, clip_high), kl, importance_cap)


def dr_grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0,
    importance_cap: float | None = None, max_tokens: float = 512.0,
) -> LossOutputs:  # fmt: skip
    """GRPO without its length bias (Dr. GRPO, arXiv 2503.20783, section 3.2)::

        gain = min(r A, clip(r) A)      share = w / (max_tokens N)

    A constant replaces the trajectory's length, so every token of the step weighs the same. ``max_tokens`` is the budget of
    sampled tokens per trajectory; it only scales the loss. Its default equals the default limit of one answer in a run.
    The paper's advantage is ``"mean"``.
    """
    rows = _trained(inputs)
    share = rows.weights / (max_tokens * _trajectories(rows))
    return _clipped(rows, _log_ratio(rows).exp(), share, (clip_low, clip_high), kl, importance_cap)


def dapo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, kl: float = 0.0, importance_cap: float | None = None,
) -> LossOutputs:  # fmt: skip
    """Decoupled clipping and the mean over tokens (DAPO, arXiv 2503.14476, sections 3.1 and 3.3)::

        gain = min(r A, clip(r) A)      share = w / W

    The higher upper bound leaves unlikely tokens room to become more likely. The paper's overlong filtering (section 3.4:
    answers cut off at their token limit are not trained) is part of the weights: see ``drops_overlong``.
    """
    rows = _trained(inputs)
    return _clipped(rows, _log_ratio(rows).exp(), _target_mean(rows), (clip_low, clip_high), kl, importance_cap)


def cispo(
    inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0, kl: float = 0.0, importance_cap: float | None = None,
) -> LossOutputs:  # fmt: skip
    """Clipped importance weights (CISPO; MiniMax-M1, arXiv 2506.13585, equations 4 and 5)::

        gain = clip(r) A logprob, without gradient through clip(r)      share = w / W

    Only a weight is clipped, so no token loses its gradient. By default there is no lower bound, as in the paper, and the
    largest weight is 5, within the range that ScaleRL (arXiv 2510.13786) found to work equally well.
    """
    rows = _trained(inputs)
    ratio = _log_ratio(rows).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = weight * rows.advantages * rows.logprobs
    share = _target_mean(rows)
    return _outputs(rows, gain, share, ratio=ratio, clipped=weight != ratio, kl=kl, importance_cap=importance_cap)


def gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4, kl: float = 0.0, importance_cap: float | None = None,
) -> LossOutputs:  # fmt: skip
    """Group sequence policy optimization (GSPO, arXiv 2507.18071, section 4)::

        s = exp((1/n) sum over the trajectory's targets of w (logprob - proximal_logprob))
        gain = min(s A, clip(s) A)      share = w / (n N)

    The sequence is the trajectory: all targets of all its calls. The trajectory is what is rewarded, so the ratio is per
    trajectory; a ratio per call would clip differently if the same tokens were split into other calls. s is the geometric
    mean of the targets' ratios, so one clip range suits long and short trajectories. ``c`` stays per target.
    """
    rows = _trained(inputs)
    member, totals = _members(rows)
    terms = rows.weights * _log_ratio(rows)
    means = terms.new_zeros(len(totals)).index_add(0, member, terms) / totals
    ratio = means.exp()[member]
    return _clipped(rows, ratio, _trajectory_mean(rows), (clip_low, clip_high), kl, importance_cap)


def distill(
    inputs: LossInputs, *, reward_weight: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2,
    kl: float = 0.0, importance_cap: float | None = None,
) -> LossOutputs:  # fmt: skip
    """On-policy distillation: the reverse KL divergence from a teacher (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649)::

        A' = ref_logprob - before + reward_weight A      gain = min(r A', clip(r) A')      share = w / (n N)

    ``before`` is the proximal logprob, or the recorded one if there is none. As long as both are the policy's own, the expected
    gradient is that of the divergence, token by token. The reference is the teacher; ``reward_weight`` adds GRPO's advantages.
    """
    if inputs.ref_logprobs is None:
        raise ValueError("distill needs ref_logprobs; pass the teacher's logprobs (a run with teacher= does)")
    rows = _trained(inputs)
    rows = replace(rows, advantages=rows.ref_logprobs - _before(rows) + reward_weight * rows.advantages)
    return _clipped(rows, _log_ratio(rows).exp(), _trajectory_mean(rows), (clip_low, clip_high), kl, importance_cap)


def drops_overlong(loss: Loss) -> bool:
    """Whether ``loss`` leaves out calls that were cut off at their token limit, unless a run says otherwise: ``dapo`` does."""
    return plain(loss) is dapo


def needs_teacher(loss: Loss) -> bool:
    """Whether ``loss`` learns from a teacher, and so from groups without contrast too."""
    return plain(loss) is distill


def plain(loss: Any) -> Any:
    """Return a loss without its settings."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _trained(inputs: LossInputs) -> LossInputs:
    """Drop the rows of weight 0: their values, which may be NaN, must not reach the loss."""
    keep = inputs.weights != 0
    rows = {name: value for name, value in vars(inputs).items() if value is not None and not name.startswith("step_")}
    return replace(inputs, **{name: value[keep] for name, value in rows.items()})


def _before(rows: LossInputs) -> Tensor:
    return rows.old_logprobs if rows.proximal_logprobs is None else rows.proximal_logprobs


def _log_ratio(rows: LossInputs) -> Tensor:
    return rows.logprobs - _before(rows)


def _clipped(
    rows: LossInputs, ratio: Tensor, share: Tensor, clip: tuple[float, float], kl: float, importance_cap: float | None
) -> LossOutputs:
    """Return the loss with PPO's gain, min(r A, clip(r) A)."""
    low, high = clip
    unclipped = ratio * rows.advantages
    clipped = ratio.clamp(1 - low, 1 + high) * rows.advantages
    gain = unclipped.minimum(clipped)
    return _outputs(rows, gain, share, ratio=ratio, clipped=unclipped > clipped, kl=kl, importance_cap=importance_cap)


def _members(rows: LossInputs) -> tuple[Tensor, Tensor]:
    """Return each row's trajectory, renumbered from 0 without gaps, and the sum of each trajectory's weights."""
    present, member = rows.trajectory.unique(return_inverse=True)
    return member, rows.weights.new_zeros(len(present)).index_add(0, member, rows.weights)


def _trajectories(rows: LossInputs) -> int:
    return rows.step_trajectories or len(rows.trajectory.unique())


def _trajectory_mean(rows: LossInputs) -> Tensor:
    """Return the shares of a mean over each trajectory's targets, then over the step's trajectories."""
    member, totals = _members(rows)
    return rows.weights / (totals[member] * _trajectories(rows))


def _target_mean(rows: LossInputs) -> Tensor:
    """Return the shares of a mean over the step's targets."""
    return rows.weights / (rows.step_weight or rows.weights.sum())


def _outputs(
    rows: LossInputs, gain: Tensor, share: Tensor, *, ratio: Tensor, clipped: Tensor, kl: float, importance_cap: float | None,
) -> LossOutputs:  # fmt: skip
    """Return the loss, as defined at the top of this file, and its metrics."""
    if kl and rows.ref_logprobs is None:
        raise ValueError(f"kl={kl} needs ref_logprobs; pass the reference's logprobs (a run with kl= does), or kl=0")
    if importance_cap is not None and rows.proximal_logprobs is None:
        raise ValueError(
            f"importance_cap={importance_cap} needs proximal_logprobs; pass the learner's logprobs before the update "
            "(a run with importance_cap= does), or importance_cap=None"
        )
    measured = {"clip_fraction": clipped.float(), "ratio": ratio, "kl_old": _k3(rows.logprobs - rows.old_logprobs)}
    if rows.proximal_logprobs is not None:
        importance = (rows.proximal_logprobs - rows.old_logprobs).detach().exp()
        correction = importance if importance_cap is None else importance.clamp(max=importance_cap)
        gain = gain * correction
        truncated = (correction < importance).float()
        measured |= {"importance": importance, "importance_max": importance, "importance_truncated": truncated}
    if rows.ref_logprobs is not None:
        measured["kl_ref"] = _k3(rows.ref_logprobs - rows.logprobs)
        if kl:
            gain = gain - kl * measured["kl_ref"]
    loss = -(share * gain).sum()
    if not len(rows.weights):
        return LossOutputs(loss, {})
    return LossOutputs(loss, {name: _number(name, values.detach()) for name, values in measured.items()})


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - log_ratio - 1


def _number(name: str, values: Tensor) -> float:
    return (values.max() if name.endswith("_max") else values.mean()).item()


def sft(inputs: LossInputs) -> LossOutputs:
    """Maximum likelihood of the sampled tokens (supervised fine-tuning)::

        L = -(1/N) sum over trajectories of (1/n) sum over targets of w logprob

    with w, n and N as in ``grpo``; advantages and old logprobs are ignored. Metrics: ``nll`` (mean -logprob).
    """
    rows = _trained(inputs)
    loss = -(_trajectory_mean(rows) * rows.logprobs).sum()
    return LossOutputs(loss, {"nll": -rows.logprobs.detach().mean().item()} if len(rows.weights) else {})
