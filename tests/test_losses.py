"""grpo: the formula by hand, the normalisation, what must not reach the loss."""

import dataclasses
import math

import pytest
import torch

from art_core.losses import grpo
from art_core.types import LossInputs


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


def by_hand(inputs: LossInputs, low: float = 0.2, high: float = 0.2, kl: float = 0.0) -> float:
    terms: dict[int, list[float]] = {}
    for i in range(len(inputs.logprobs)):
        if not inputs.weights[i]:
            continue
        new, old, advantage = (x[i].item() for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages))
        ratio = math.exp(new - old)
        term = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if kl:
            d = inputs.ref_logprobs[i].item() - new
            term -= kl * (math.exp(d) - d - 1)
        terms.setdefault(int(inputs.trajectory[i]), []).append(term)
    return -sum(sum(t) / len(t) for t in terms.values()) / len(terms)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_loss_is_the_formula_of_its_docstring(seed, kl):
    inputs = make_inputs(seed=seed, weights=torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.float64))
    inputs = dataclasses.replace(inputs, ref_logprobs=inputs.logprobs.detach() + 0.3)
    outputs = grpo(inputs, clip_low=0.1, clip_high=0.28, kl=kl)
    assert outputs.loss.item() == pytest.approx(by_hand(inputs, 0.1, 0.28, kl))
    assert outputs.loss.shape == ()


def test_a_trajectory_weighs_the_same_in_whatever_calls_its_tokens_came():
    inputs = make_inputs()
    apart = dataclasses.replace(inputs, call=torch.arange(12))
    assert grpo(apart).loss.item() == grpo(inputs).loss.item()


def test_a_trajectory_weighs_the_same_when_its_rows_are_in_another_order():
    inputs = make_inputs()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    fields = ("logprobs", "old_logprobs", "advantages", "weights", "trajectory", "call")
    mixed = dataclasses.replace(inputs, **{name: getattr(inputs, name)[order] for name in fields})
    assert grpo(mixed).loss.item() == pytest.approx(grpo(inputs).loss.item())


def test_a_long_trajectory_weighs_as_much_as_a_short_one():
    trajectory = torch.tensor([0] * 11 + [1])
    inputs = make_inputs(trajectory=trajectory, advantages=(1.0 - 2.0 * trajectory).double())
    outputs = grpo(dataclasses.replace(inputs, logprobs=inputs.old_logprobs.clone().requires_grad_()))
    assert outputs.loss.item() == pytest.approx(0.0)


def test_the_losses_of_the_parts_add_up_to_the_loss_of_the_step():
    inputs = make_inputs()
    parts = []
    for members in ([0], [1, 2]):
        keep = torch.isin(inputs.trajectory, torch.tensor(members))
        rows = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        rows = {name: value[keep] for name, value in rows.items() if isinstance(value, torch.Tensor)}
        parts.append(grpo(LossInputs(**rows, ref_logprobs=None, step_trajectories=3)).loss)
    assert sum(parts).item() == pytest.approx(grpo(inputs).loss.item())


def test_an_untrained_target_reaches_neither_loss_nor_gradient_even_if_it_is_not_a_number():
    logprobs = torch.tensor([-1.0, -math.inf, math.nan, -2.0], requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 0.0, 1.0])
    inputs = make_inputs(4, 2, logprobs=logprobs, old_logprobs=logprobs.detach() - 0.1, weights=weights)
    outputs = grpo(inputs)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert logprobs.grad[[1, 2]].tolist() == [0.0, 0.0]
    assert logprobs.grad[[0, 3]].all()


def test_without_trained_targets_the_loss_is_zero_and_differentiable():
    inputs = make_inputs(weights=torch.zeros(12))
    outputs = grpo(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0 and outputs.metrics == {}


def test_a_good_run_is_not_pushed_beyond_the_clip():
    logprobs = torch.tensor([-0.5], requires_grad=True)
    inputs = make_inputs(1, 1, logprobs=logprobs, old_logprobs=torch.tensor([-1.0]), advantages=torch.tensor([1.0]))
    outputs = grpo(inputs)
    outputs.loss.backward()
    assert logprobs.grad.item() == 0.0
    assert outputs.loss.item() == pytest.approx(-1.2)
    assert outputs.metrics["clip_fraction"] == 1.0


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


def test_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        grpo(make_inputs(), kl=0.1)
