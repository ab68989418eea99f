"""The loss of actions whose log-probabilities two models give. Knows nothing about agents, rollouts or optimizers.

Torch and transformers are loaded when it is first computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.types import Call, LossInputs, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


class ActionLoss:
    """GRPO's loss (arXiv 2402.03300) with an action, not a token, as what is clipped and weighed::

        policy_loss = -mean(min(r A, clip(r, 0.8, 1.2) A))     r = exp(logprob - old logprob)
        kl_loss     = beta mean(exp(d) - d - 1)                d = reference logprob - logprob
        total_loss  = policy_loss + kl_loss

    ``model`` and ``reference_model`` have ``get_log_probs(states, actions)``, which returns (n,) log-probabilities, or are
    causal language models of transformers; for those a state and an action are token ids, or texts where ``tokenizer`` is given.
    """

    def __init__(self, model: Any, reference_model: Any, beta: float, tokenizer: Any = None) -> None:
        self.model, self.reference_model, self.beta, self.tokenizer = model, reference_model, beta, tokenizer

    def compute(
        self,
        states: Sequence[Any],
        actions: Sequence[Any],
        rewards: Any,
        group_baselines: Any,
        *,
        group_stds: Any = None,
        old_logprobs: Any = None,
    ) -> dict[str, Tensor]:
        """Return ``total_loss`` (call ``backward`` on it), ``policy_loss``, ``kl_loss`` and ``advantages``, their mean.

        All of shape (n,), or one number for all: ``rewards``; ``group_baselines``, each the mean reward of its group;
        ``group_stds``, by which advantages are divided where they are given. ``old_logprobs`` are those of the weights that
        chose the actions, of shape (n,); None: these weights chose them, so every ratio is 1 and the gradient that of
        -A logprob.
        """
        import torch

        from art_core import losses

        logprobs = self.log_probs(states, actions)
        with torch.no_grad():
            reference = self._log_probs_of(self.reference_model, states, actions).to(logprobs)

        row = functools.partial(_row, logprobs)
        advantages = row(rewards) - row(group_baselines)
        if group_stds is not None:
            advantages = advantages / (row(group_stds) + 1e-4)
        number = torch.arange(len(logprobs), device=logprobs.device)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old_logprobs is None else row(old_logprobs),
            ref_logprobs=reference,
            advantages=advantages,
            weights=torch.ones_like(logprobs),
            trajectory=number,
            call=number,
        )
        policy, total = losses.grpo(inputs).loss, losses.grpo(inputs, kl=self.beta).loss
        return {
            "total_loss": total,
            "policy_loss": policy,
            "kl_loss": total - policy,
            "advantages": advantages.mean(),
        }

    def log_probs(self, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        """Return the log-probability of each action in its state under ``model``, in nats: (n,), differentiable.

        That of an action of several tokens is the sum of theirs. States that begin alike share what they begin with.
        """
        return self._log_probs_of(self.model, states, actions)

    def _log_probs_of(self, model: Any, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        if len(states) != len(actions) or not len(actions):
            raise ConfigError(
                f"{len(states)} states and {len(actions)} actions were given; give as many of both, at least one"
            )
        own: Callable[..., Tensor] | None = getattr(model, "get_log_probs", None)
        return self._of_tokens(model, states, actions) if own is None else own(states, actions)

    def _of_tokens(self, model: Any, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        import torch

        from art_core.learner import tree_logprobs
        from art_core.token_tree import build_tree

        calls = [self._call(state, action) for state, action in zip(states, actions, strict=True)]
        tree = build_tree([Trajectory(task=None, calls=tuple(calls))])
        logprobs = tree_logprobs(model, tree)
        of_action = torch.as_tensor(tree.call, device=logprobs.device)
        return logprobs.new_zeros(len(calls)).index_add(0, of_action, logprobs)

    def _call(self, state: Any, action: Any) -> Call:
        shown, chosen = self._ids(state), self._ids(action)
        if not chosen:
            raise ConfigError(
                f"the action {action!r:.80} has no token; its probability would be 1 whatever the model is"
            )
        return Call(prompt_ids=shown, sampled_ids=chosen, logprobs=(0.0,) * len(chosen))

    def _ids(self, given: Any) -> tuple[int, ...]:
        if not isinstance(given, str):
            return tuple(int(token) for token in given)
        if self.tokenizer is None:
            raise ConfigError(f"{given!r:.80} is a text: give token ids, or GRPOTrainer(..., tokenizer=) to make them")
        return tuple(self.tokenizer.encode(given, add_special_tokens=False))


def _row(logprobs: Tensor, values: Any) -> Tensor:
    """Return ``values``, one number or one for each action, as a tensor like ``logprobs``."""
    import torch

    given = torch.as_tensor(values, dtype=logprobs.dtype, device=logprobs.device)
    if given.ndim and given.shape != logprobs.shape:
        raise ConfigError(
            f"{len(logprobs)} actions were given with values of shape {tuple(given.shape)}; give one each, or one for all"
        )
    return given.expand(logprobs.shape)
