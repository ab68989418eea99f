"""The loss of actions alone: its gradient is that of the policy gradient, and its KL term is never negative."""

import pytest

pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st

from art_classic.trainer import GRPOTrainer
from art_core.config import model_folder
from art_core.errors import ConfigError
from art_core.learner.pretrained import load_causal_lm, load_tokenizer


class Table:
    """A model of three actions in two states."""

    def __init__(self, logits):
        self.logits = torch.tensor(logits, requires_grad=True)

    def get_log_probs(self, states, actions):
        return self.logits.log_softmax(-1)[torch.tensor(states), torch.tensor(actions)]


numbers = st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6).map(lambda it: [it[:3], it[3:]])


@given(numbers, numbers, st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4))
def test_without_old_logprobs_the_gradient_is_the_policy_gradients_and_the_divergence_is_not_negative(
    mine, its, rewards
):
    policy, reference = Table(mine), Table(its)
    states, actions = [0, 1, 1, 0], [2, 0, 1, 1]
    baseline = sum(rewards) / 4
    found = GRPOTrainer(policy, reference, beta=0.1).compute_grpo_loss(states, actions, rewards, [baseline] * 4)
    assert set(found) == {"total_loss", "policy_loss", "kl_loss", "advantages"}
    torch.testing.assert_close(found["total_loss"], found["policy_loss"] + found["kl_loss"])
    assert found["kl_loss"].item() >= -1e-6
    assert found["advantages"].item() == pytest.approx(0, abs=1e-6)

    (gradient,) = torch.autograd.grad(found["policy_loss"], policy.logits)
    again = Table(mine)
    advantages = torch.tensor(rewards) - baseline
    (-(advantages * again.get_log_probs(states, actions)).mean()).backward()
    torch.testing.assert_close(gradient, again.logits.grad, atol=1e-5, rtol=1e-4)


def test_the_divergence_from_oneself_is_nothing_and_the_standard_deviation_divides():
    policy = Table([[1.0, 0.0, 0.0]] * 2)
    trainer = GRPOTrainer(policy, Table([[1.0, 0.0, 0.0]] * 2), beta=0.5)
    plain = trainer.compute_grpo_loss([0, 0], [0, 1], [1.0, 0.0], 0.5)
    divided = trainer.compute_grpo_loss([0, 0], [0, 1], [1.0, 0.0], 0.5, group_stds=0.25)
    assert plain["kl_loss"].item() == pytest.approx(0, abs=1e-7)
    first, second = (torch.autograd.grad(it["total_loss"], policy.logits)[0] for it in (plain, divided))
    torch.testing.assert_close(second, first * 4, rtol=1e-3, atol=1e-6)


def test_a_ratio_beyond_the_clip_has_no_gradient():
    policy = Table([[0.0, 0.0, 0.0]] * 2)
    trainer = GRPOTrainer(policy, Table([[0.0, 0.0, 0.0]] * 2), beta=0.0)
    now = policy.get_log_probs([0], [0]).detach()
    found = trainer.compute_grpo_loss([0], [0], [1.0], 0.0, old_logprobs=now - 1)
    assert found["policy_loss"].item() == pytest.approx(-1.2)
    (gradient,) = torch.autograd.grad(found["total_loss"], policy.logits)
    assert not gradient.any()


def test_a_language_models_actions_have_the_probability_that_the_model_gives_them():
    folder = model_folder("tiny")
    model, tokenizer = load_causal_lm(folder, torch.float32), load_tokenizer(folder)
    reference = load_causal_lm(folder, torch.float32)
    trainer = GRPOTrainer(model, reference, beta=0.1, tokenizer=tokenizer)
    states, actions = ["Which city is it? ", "Which city is it? ", "Who wrote"], ["Paris", "Rome is it", "?"]
    found = trainer.get_log_probs(states, actions)
    for state, action, logprob in zip(states, actions, found, strict=True):
        shown, said = (tokenizer.encode(text, add_special_tokens=False) for text in (state, action))
        logits = model(torch.tensor([shown + said])).logits[0].log_softmax(-1)
        expected = sum(logits[len(shown) - 1 + place, token] for place, token in enumerate(said))
        assert logprob.item() == pytest.approx(expected.item(), abs=1e-4)
    loss = trainer.compute_grpo_loss(states, actions, [1.0, 0.0, 0.5], 0.5)
    loss["total_loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_what_does_not_fit_is_refused():
    trainer = GRPOTrainer(Table([[0.0] * 3] * 2), Table([[0.0] * 3] * 2))
    with pytest.raises(ConfigError, match="as many of both"):
        trainer.compute_grpo_loss([0], [0, 1], [1.0], 0.0)
    with pytest.raises(ConfigError, match="one value per action"):
        trainer.compute_grpo_loss([0, 0], [0, 1], [1.0, 2.0, 3.0], 0.0)
    model = load_causal_lm(model_folder("tiny"), torch.float32)
    with pytest.raises(ConfigError, match="tokenizer="):
        GRPOTrainer(model, model).get_log_probs(["text"], ["more"])
    with pytest.raises(ConfigError, match="no tokens"):
        GRPOTrainer(model, model).get_log_probs([[1]], [[]])
