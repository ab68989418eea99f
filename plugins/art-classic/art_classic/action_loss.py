"""GRPO's loss over actions, from a model and a reference model alone.

Torch and transformers are imported when it is first computed.
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
    """GRPO's loss (arXiv 2402.03300), clipped and weighted per action instead of per token::

        policy_loss = -mean(min(r A, clip(r, 0.8, 1.2) A))     r = exp(logprob - old logprob)
        kl_loss     = beta mean(exp(d) - d - 1)                d = reference logprob - logprob
        total_loss  = policy_loss + kl_loss

    ``model`` and ``reference_model`` have ``get_log_probs(states, actions)``, which returns log-probabilities of shape (n,), or
    are causal language models of transformers; for those, states and actions are token ids, or strings if there is a
    ``tokenizer``.
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
        """Return ``total_loss`` (call ``backward`` on it), ``policy_loss``, ``kl_loss`` and ``advantages`` (their mean).

        Each of shape (n,), or one number for all: ``rewards``; ``group_baselines``, the mean reward of each action's group;
        ``group_stds``, optional divisors of the advantages. ``old_logprobs``, of shape (n,), are from the weights that chose the
        actions; None: the current weights chose them, so every ratio is 1 and the gradient is that of -A logprob.
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
        index = torch.arange(len(logprobs), device=logprobs.device)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old_logprobs is None else row(old_logprobs),
            ref_logprobs=reference,
            advantages=advantages,
            weights=torch.ones_like(logprobs),
            trajectory=index,
            call=index,
        )
        policy, total = losses.grpo(inputs).loss, losses.grpo(inputs, kl=self.beta).loss
        return {
            "total_loss": total,
            "policy_loss": policy,
            "kl_loss": total - policy,
            "advantages": advantages.mean(),
        }

    def log_probs(self, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        """Return the log-probability of each action in its state under ``model``: nats, shape (n,), differentiable.

        An action's log-probability is the sum over its tokens. Common prefixes of states are computed once.
        """
        return self._log_probs_of(self.model, states, actions)

    def _log_probs_of(self, model: Any, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        if len(states) != len(actions) or not len(actions):
            raise ConfigError(
                f"got {len(states)} states and {len(actions)} actions; pass as many of both, at least one"
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
            raise ConfigError(f"the action {action!r:.80} has no tokens, so its probability would be 1 under any model")
        return Call(prompt_ids=shown, sampled_ids=chosen, logprobs=(0.0,) * len(chosen))

    def _ids(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(int(token) for token in value)
        if self.tokenizer is None:
            raise ConfigError(
                f"{value!r:.80} is a string; pass token ids, or GRPOTrainer(..., tokenizer=) to encode it"
            )
        return tuple(self.tokenizer.encode(value, add_special_tokens=False))


def _row(logprobs: Tensor, values: Any) -> Tensor:
    """Return ``values``, one number for all actions or one per action, as a tensor like ``logprobs``."""
    import torch

    row = torch.as_tensor(values, dtype=logprobs.dtype, device=logprobs.device)
    if row.ndim and row.shape != logprobs.shape:
        raise ConfigError(
            f"got {len(logprobs)} actions but values of shape {tuple(row.shape)}; pass one value per action, or one for all"
        )
    return row.expand(logprobs.shape)
