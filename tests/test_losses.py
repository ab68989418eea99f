"""The losses: formulas checked by hand, normalization, clipping, and what must not reach a loss."""

import dataclasses
import functools
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import make_call, make_model

from art_core.builtin import register_losses
from art_core.learner import tree_logprobs
from art_core.losses import cispo, dapo, distill, dr_grpo, drops_overlong, grpo, gspo, sft
from art_core.token_tree import build_tree
from art_core.types import LossInputs, Trajectory

LOSSES = [grpo, dr_grpo, dapo, cispo, gspo]
CLIPS = {grpo: (0.2, 0.2), dr_grpo: (0.2, 0.2), dapo: (0.2, 0.28), cispo: (1.0, 4.0), gspo: (3e-4, 4e-4)}
ROWS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights", "trajectory", "call", "proximal_logprobs")

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def make_inputs(rows: int = 12, trajectories: int = 3, seed: int = 0, **fields) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, generator=generator, dtype=torch.float64) * 3
    trajectory = torch.arange(rows) % trajectories
    values = {
        "logprobs": (old + torch.randn(rows, generator=generator, dtype=torch.float64) * 0.3).requires_grad_(),
        "old_logprobs": old,
        "ref_logprobs": None,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.25], dtype=torch.float64)[trajectory],
        "weights": torch.ones(rows, dtype=torch.float64),
        "trajectory": trajectory,
        "call": trajectory,
    }
    return LossInputs(**(values | fields))


def make_rich_inputs(seed: int = 0, rows: int = 12) -> LossInputs:
    """All at once: untrained and half-weighted rows, a reference, and a learner whose weights differ from the engine's."""
    generator = torch.Generator().manual_seed(seed + 100)
    noise = torch.randn(2, rows, generator=generator, dtype=torch.float64) * 0.5
    weights = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0] * rows, dtype=torch.float64)[:rows]
    inputs = make_inputs(rows, seed=seed, weights=weights)
    return dataclasses.replace(
        inputs, ref_logprobs=inputs.logprobs.detach() + noise[0], proximal_logprobs=inputs.old_logprobs + noise[1]
    )


def rows_of(inputs: LossInputs, keep: torch.Tensor, **totals) -> LossInputs:
    rows = {name: getattr(inputs, name) for name in ROWS}
    return LossInputs(**{name: None if value is None else value[keep] for name, value in rows.items()}, **totals)


def totals_of(inputs: LossInputs) -> dict[str, float]:
    trained = inputs.weights != 0
    return {
        "step_trajectories": len(inputs.trajectory[trained].unique()),
        "step_weight": inputs.weights.sum().item(),
    }


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def by_hand(loss, inputs: LossInputs, low: float, high: float, kl: float, cap: float) -> float:
    """The loss in plain Python, without tensors."""
    new, old, advantage, weight, run, ref, near = (
        None if rows is None else rows.tolist()
        for rows in (
            inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.weights, inputs.trajectory,
            inputs.ref_logprobs, inputs.proximal_logprobs,
        )
    )  # fmt: skip
    corrected, near = near is not None, near or old
    rows = [i for i in range(len(new)) if weight[i]]
    runs = {run[i] for i in rows}
    length = {number: sum(weight[i] for i in rows if run[i] == number) for number in runs}
    total = 0.0
    for i in rows:
        ratio = math.exp(new[i] - near[i])
        if loss is gspo:
            of_run = [j for j in rows if run[j] == run[i]]
            ratio = math.exp(sum(weight[j] * (new[j] - near[j]) for j in of_run) / length[run[i]])
        clipped = clamp(ratio, 1 - low, 1 + high)
        gain = clipped * advantage[i] * new[i] if loss is cispo else min(ratio * advantage[i], clipped * advantage[i])
        if corrected:
            gain *= min(math.exp(near[i] - old[i]), cap)
        if ref is not None:
            gain -= kl * (math.exp(ref[i] - new[i]) - (ref[i] - new[i]) - 1)
        share = {
            grpo: weight[i] / (length[run[i]] * len(runs)),
            gspo: weight[i] / (length[run[i]] * len(runs)),
            dr_grpo: weight[i] / (512 * len(runs)),
            dapo: weight[i] / sum(length.values()),
            cispo: weight[i] / sum(length.values()),
        }[loss]
        total -= share * gain
    return total


@every_loss
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "with KL and correction"])
def test_the_loss_is_the_formula_of_its_docstring(loss, seed, rich):
    inputs = make_rich_inputs(seed) if rich else make_inputs(seed=seed)
    kl, cap = (0.1, 1.2) if rich else (0.0, None)
    low, high = (0.1, 0.3) if seed % 2 else CLIPS[loss]
    clips = {"clip_low": low, "clip_high": high} if seed % 2 else {}
    outputs = loss(inputs, kl=kl, importance_cap=cap, **clips)
    assert outputs.loss.item() == pytest.approx(by_hand(loss, inputs, low, high, kl, cap))
    assert outputs.loss.shape == ()


def test_all_losses_are_registered_and_accept_kl_and_importance_cap():
    registered = {}
    register_losses(registered.__setitem__)
    losses = [*LOSSES, distill]  # which is none of every_loss, because it needs reference logprobs
    assert registered == {loss.__name__: loss for loss in losses}
    for loss in losses:
        assert {"clip_low", "clip_high", "kl", "importance_cap"} <= set(inspect.signature(loss).parameters)


@every_loss
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**16), data=st.data())
def test_calls_rows_and_parts_do_not_change_the_loss_or_its_gradient(loss, seed, data):
    loss = functools.partial(loss, kl=0.1, importance_cap=1.2)
    inputs = make_rich_inputs(seed)
    whole = loss(inputs).loss
    [gradient] = torch.autograd.grad(whole, inputs.logprobs)
    calls = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=12, max_size=12)))
    order = torch.tensor(data.draw(st.permutations(range(12))))
    # Parts consist of whole trajectories, or of any rows if the loss is a mean over all targets.
    cut_by = inputs.trajectory if loss.func in (grpo, gspo) else torch.arange(12)
    part = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=12, max_size=12)))[cut_by]
    mixed = dataclasses.replace(rows_of(inputs, order), call=calls)
    parts = [loss(rows_of(inputs, part == number, **totals_of(inputs))).loss for number in range(3)]
    for other in (loss(mixed).loss, sum(parts)):
        assert other.item() == pytest.approx(whole.item())
        torch.testing.assert_close(torch.autograd.grad(other, inputs.logprobs)[0], gradient)


@pytest.mark.parametrize("loss", [grpo, gspo])
def test_a_long_trajectory_weighs_as_much_as_a_short_one(loss):
    trajectory = torch.tensor([0] * 11 + [1])
    inputs = make_inputs(trajectory=trajectory, advantages=(1.0 - 2.0 * trajectory).double())
    outputs = loss(dataclasses.replace(inputs, logprobs=inputs.old_logprobs.clone().requires_grad_()))
    assert outputs.loss.item() == pytest.approx(0.0)


@pytest.mark.parametrize("loss", [dr_grpo, dapo, cispo])
def test_a_token_weighs_the_same_in_a_long_trajectory_and_in_a_short_one(loss):
    trajectory = torch.tensor([0] * 11 + [1])
    old = torch.full((12,), -1.0, dtype=torch.float64)
    inputs = make_inputs(
        trajectory=trajectory, advantages=torch.ones(12), old_logprobs=old, logprobs=old.clone().requires_grad_()
    )
    [gradient] = torch.autograd.grad(loss(inputs).loss, inputs.logprobs)
    assert gradient.tolist() == pytest.approx([gradient[0].item()] * 12)


def test_the_constant_of_dr_grpo_scales_the_loss():
    inputs = make_inputs()
    assert dr_grpo(inputs, max_tokens=256).loss.item() == pytest.approx(2 * dr_grpo(inputs).loss.item())


@every_loss
def test_an_untrained_target_reaches_neither_loss_nor_gradient_even_if_it_is_nan(loss):
    logprobs = torch.tensor([-1.0, -math.inf, math.nan, -2.0], requires_grad=True)
    odd = torch.tensor([-1.0, math.nan, -math.inf, -2.0])
    inputs = make_inputs(
        4,
        2,
        logprobs=logprobs,
        old_logprobs=odd,
        ref_logprobs=odd,
        proximal_logprobs=odd.clone(),
        weights=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        advantages=torch.tensor([1.0, math.nan, math.inf, 1.0]),
    )
    outputs = loss(inputs, kl=0.1, importance_cap=2.0)
    outputs.loss.backward()
    assert outputs.loss.isfinite() and all(map(math.isfinite, outputs.metrics.values()))
    assert logprobs.grad[[1, 2]].tolist() == [0.0, 0.0]
    assert logprobs.grad[[0, 3]].all()


@every_loss
def test_without_trained_targets_the_loss_is_zero_and_differentiable(loss):
    inputs = make_inputs(weights=torch.zeros(12))
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0 and outputs.metrics == {}


def one_target(log_ratio: float, advantage: float, **fields) -> LossInputs:
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    return make_inputs(1, 1, logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([advantage]), **fields)


@pytest.mark.parametrize("loss", [grpo, dr_grpo, dapo, gspo])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.5, 1.0, True), (0.5, -1.0, False), (-0.5, 1.0, False), (-0.5, -1.0, True), (0.0, 1.0, False)],
)
def test_a_ratio_is_clipped_only_if_the_gradient_would_move_it_further_away(loss, log_ratio, advantage, clipped):
    inputs = one_target(log_ratio, advantage)
    outputs = loss(inputs)
    outputs.loss.backward()
    assert (inputs.logprobs.grad.item() == 0.0) is clipped
    assert outputs.metrics["clip_fraction"] == float(clipped)
    assert outputs.metrics["ratio"] == pytest.approx(math.exp(log_ratio))


@pytest.mark.parametrize(("loss", "bound"), [(grpo, 1.2), (dapo, 1.28), (gspo, 1.0004)])
def test_a_good_trajectory_is_not_pushed_beyond_the_upper_bound(loss, bound):
    assert loss(one_target(0.5, 1.0)).loss.item() == pytest.approx(-bound)


@pytest.mark.parametrize(("loss", "bound"), [(grpo, 0.8), (dapo, 0.8), (gspo, 0.9997)])
def test_a_bad_trajectory_is_not_pushed_beyond_the_lower_bound(loss, bound):
    assert loss(one_target(-0.5, -1.0)).loss.item() == pytest.approx(bound)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_clips_the_weight_and_keeps_the_gradient(advantage):
    inputs = one_target(2.0, advantage)
    outputs = cispo(inputs)
    outputs.loss.backward()
    assert inputs.logprobs.grad.item() == pytest.approx(-5.0 * advantage)
    assert outputs.metrics["clip_fraction"] == 1.0
    low = one_target(-3.0, advantage)
    cispo(low).loss.backward()
    assert low.logprobs.grad.item() == pytest.approx(-math.exp(-3.0) * advantage)


def test_gspo_clips_a_trajectory_as_a_whole_whatever_its_single_targets_do():
    old = torch.full((4,), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor([0.5, -0.5, 0.5, 0.5])).requires_grad_()
    inputs = make_inputs(
        4, logprobs=logprobs, old_logprobs=old, trajectory=torch.tensor([0, 0, 1, 1]), advantages=torch.ones(4)
    )
    outputs = gspo(inputs)
    outputs.loss.backward()
    assert logprobs.grad.tolist() == [-0.25, -0.25, 0.0, 0.0]
    assert outputs.metrics["clip_fraction"] == 0.5


@every_loss
def test_the_mismatch_of_engine_and_learner_multiplies_the_gradient_up_to_the_cap(loss):
    old = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
    near = old + torch.tensor([0.5, 1.5, 3.0], dtype=torch.float64).log()
    fields = {"old_logprobs": old, "trajectory": torch.arange(3), "advantages": torch.ones(3, dtype=torch.float64)}
    corrected = make_inputs(3, logprobs=near.clone().requires_grad_(), proximal_logprobs=near, **fields)
    plain = make_inputs(3, logprobs=near.clone().requires_grad_(), **(fields | {"old_logprobs": near}))
    outputs = loss(corrected, importance_cap=2.0)
    outputs.loss.backward()
    loss(plain).loss.backward()
    factors = corrected.logprobs.grad / plain.logprobs.grad
    assert factors.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert outputs.metrics["ratio"] == pytest.approx(1.0) and outputs.metrics["clip_fraction"] == 0.0
    assert outputs.metrics["importance"] == pytest.approx(5 / 3)
    assert outputs.metrics["importance_max"] == pytest.approx(3.0)
    assert outputs.metrics["importance_truncated"] == pytest.approx(1 / 3)


@every_loss
def test_without_a_cap_the_whole_mismatch_counts(loss):
    inputs = make_rich_inputs()
    outputs = loss(inputs)
    assert outputs.loss.item() == pytest.approx(by_hand(loss, inputs, *CLIPS[loss], kl=0.0, cap=math.inf))
    assert outputs.metrics["importance_max"] > 1.2 and outputs.metrics["importance_truncated"] == 0.0


@every_loss
def test_if_engine_and_learner_agree_the_correction_changes_nothing(loss):
    inputs = make_inputs()
    same = dataclasses.replace(inputs, proximal_logprobs=inputs.old_logprobs)
    assert loss(same, importance_cap=2.0).loss.item() == loss(inputs).loss.item()


def test_imitation_is_the_mean_over_each_trajectorys_trained_tokens_then_over_trajectories():
    logprobs = torch.tensor([-1.0, -2.0, -5.0, math.nan], dtype=torch.float64, requires_grad=True)
    fields = {"old_logprobs": logprobs.detach(), "trajectory": torch.tensor([0, 0, 1, 1])}
    outputs = sft(make_inputs(4, logprobs=logprobs, weights=torch.tensor([1.0, 3.0, 1.0, 0.0]), **fields))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(((1 + 3 * 2) / 4 + 5) / 2)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 8, -3 / 8, -1 / 2, 0.0])
    assert outputs.metrics == {"nll": pytest.approx(8 / 3)}


def test_imitation_without_trained_targets_is_zero_and_has_no_metrics():
    outputs = sft(make_inputs(weights=torch.zeros(12)))
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0 and outputs.metrics == {}


def test_metrics_are_means_over_the_trained_targets():
    old = torch.tensor([-1.0, -1.0, -9.0])
    inputs = make_inputs(
        3,
        1,
        logprobs=torch.tensor([-1.0, -1.0 + math.log(2), 0.0]),
        old_logprobs=old,
        ref_logprobs=old,
        advantages=torch.ones(3),
        weights=torch.tensor([1.0, 1.0, 0.0]),
    )
    metrics = grpo(inputs).metrics
    assert metrics["ratio"] == pytest.approx(1.5)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["kl_old"] == pytest.approx((2 - math.log(2) - 1) / 2)
    assert metrics["kl_ref"] == pytest.approx((0.5 + math.log(2) - 1) / 2)
    assert all(type(value) is float for value in metrics.values())


@every_loss
def test_a_keyword_without_the_logprobs_that_it_needs_is_refused(loss):
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        loss(make_inputs(), kl=0.1)
    with pytest.raises(ValueError, match="needs proximal_logprobs"):
        loss(make_inputs(), importance_cap=2.0)


def test_only_dapo_asks_for_overlong_calls_to_be_dropped():
    assert [loss for loss in LOSSES if drops_overlong(loss)] == [dapo]
    assert drops_overlong(functools.partial(functools.partial(dapo, kl=0.1), clip_high=0.3))
    assert not drops_overlong(functools.partial(grpo, kl=0.1))


@every_loss
def test_a_token_shared_by_several_trajectories_gets_the_sum_of_its_targets_gradients(loss):
    model = make_model("qwen3")
    runs = [Trajectory(task="t", calls=(make_call([3, 4, 5], sampled),)) for sampled in ([6, 7], [6, 8, 9])]
    advantages = [1.0, -0.4]

    def gradient(trees) -> torch.Tensor:
        model.zero_grad()
        for tree in trees:
            rows = {
                name: torch.from_numpy(getattr(tree, name))
                for name in ("old_logprobs", "advantages", "weights", "trajectory", "call")
            }
            logprobs = tree_logprobs(model, tree)
            inputs = LossInputs(
                logprobs=logprobs,
                ref_logprobs=None,
                step_trajectories=2,
                step_weight=5.0,
                # Each target's own ratio is on its own side of 1.
                **(rows | {"old_logprobs": logprobs.detach() + 0.1 * rows["advantages"]}),
            )
            loss(inputs, clip_low=0.5, clip_high=0.5).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    together = build_tree(runs, advantages)
    assert together.target_tokens[0] == together.target_tokens[2]
    apart = [build_tree([run], [advantage]) for run, advantage in zip(runs, advantages, strict=True)]
    torch.testing.assert_close(gradient([together]), gradient(apart), rtol=1e-5, atol=1e-7)
