"""The nouns, in the order in which data flows. No I/O; torch is imported for type checkers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

FinishReason = Literal["stop", "length", "tool_calls", "aborted"]
"""Why sampling ended. ``aborted``: the client went away; such a call is kept but never trained."""

JsonDict = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One choice of one model call: the tokens the policy was shown and the tokens it sampled."""

    prompt_ids: tuple[int, ...]
    """Exactly what the policy was shown, as the engine reported it. Empty only if the call was recorded as text, because a
    provider's model answered: then there are no sampled tokens either, and it can't be trained."""
    sampled_ids: tuple[int, ...]
    """Exactly what the policy sampled, including the end-of-turn token if it was sampled."""
    logprobs: tuple[float, ...]
    """One natural logarithm per sampled token, from the distribution at ``temperature`` before truncation (top-p, top-k) and
    before a grammar's mask. At temperature 0 (greedy) they come from the distribution at temperature 1."""
    policy_version: int = 0
    """The number of optimizer steps that produced the weights that sampled this call: 0 for the start weights, -1 if another
    model answered."""
    agent: str | None = None
    """The node or agent that made the call, if the framework names it: names joined by ``/``, outermost first. If several
    frameworks name one, their names follow each other in the order that ``name_agents`` describes."""
    thread: str | None = None
    """The framework's conversation thread, if it has one: LangGraph's ``thread_id``."""
    request_id: str = ""
    """The same for the n choices of one request."""
    choice: int = 0
    """The index among the n choices of one request."""
    reward: float | None = None
    """The call's own reward, or None. If set, its tokens are trained with the advantage of this reward instead of the
    trajectory's. Reward functions set it through ``Trajectory.call_rewards``."""
    temperature: float = 1.0
    """The temperature of ``logprobs``: the sampling temperature, unless the engine reports logprobs of another one."""
    finish_reason: FinishReason = "stop"
    forced: tuple[int, ...] = ()
    """Positions in ``sampled_ids`` at which a grammar left one legal token; they are not trained."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The chat-completions request as the engine received it (messages, tools, sampling settings), with ``prompt`` (text or
    token ids) instead of ``messages`` if the agent sent a raw prompt."""
    response: Mapping[str, Any] = field(default_factory=dict)
    """The assistant message of the answer (role, content, tool_calls, and reasoning_content if the model was thinking)."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Of a call recorded as text what its provider counted: ``prompt_tokens``, ``completion_tokens``, ``cached_tokens``,
    ``cache_write_tokens``; and its ``seconds``."""

    def __post_init__(self) -> None:
        if not self.prompt_ids and self.sampled_ids:
            raise ValueError("a Call needs at least one prompt token, the context of the first sampled token")
        if len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(
                f"a Call with {len(self.sampled_ids)} sampled tokens has {len(self.logprobs)} logprobs; "
                "pass one logprob per sampled token, in order"
            )

    def made_by(self, *nodes: str) -> bool:
        """Whether one of these nodes or agents made the call: ``"team"``, ``"writer"`` and ``"team/writer"`` all match a call
        with ``agent="team/writer"``; ``"write"`` does not."""
        return within(self.agent, nodes)

    def token_counts(self) -> tuple[int, int] | None:
        """Return how many tokens were shown and sampled. Of a call recorded as text its provider's counts, None without them."""
        if self.prompt_ids:
            return len(self.prompt_ids), len(self.sampled_ids)
        counts = [self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        return None if None in counts else (int(counts[0]), int(counts[1]))

    def messages(self) -> list[JsonDict]:
        """Return the conversation and the answer as chat messages; a raw prompt counts as the user's."""
        prompt = self.request.get("prompt")
        shown = self.request.get("messages", ()) if prompt is None else [{"role": "user", "content": _shown(prompt)}]
        return [*shown, dict(self.response)]


def within(agent: str | None, nodes: Iterable[str]) -> bool:
    """Whether the path ``agent`` contains one of ``nodes`` as whole names; see ``Call.made_by``."""
    return agent is not None and any(f"/{node}/" in f"/{agent}/" for node in nodes)


def _shown(prompt: str | Sequence[int]) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


@dataclass(frozen=True)
class Trajectory:
    """Every model call of one rollout, in the order in which they were answered, and how the rollout ended."""

    task: Any
    calls: tuple[Call, ...] = field(repr=False)
    output: Any = None
    """What the agent returned; None if it failed."""
    reward: float | None = None
    """None until scored, or if the reward function could not score the rollout."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that a reward function adds: ``trajectory.metrics["success"] = 1.0``. Reports show ``success``."""
    error: str | None = None
    """Why the rollout failed, with the exception's type; None if it succeeded."""
    error_at: str = field(default="", kw_only=True, repr=False, compare=False)
    """Where the agent's own code raised it, as ``FILE:LINE in FUNCTION``, if known; not stored."""
    unrecorded: Mapping[str, Mapping[str, int]] = field(default_factory=dict, kw_only=True, repr=False, compare=False)
    """Counts of model requests that are not in ``calls``: ``failed`` at the policy (by status, code and message), ``refused``
    before they left, and ``passed`` to where the agent sends them (both by destination). Of this process; not stored."""
    rollout_id: str = ""
    seconds: float = 0.0
    call_rewards: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Rewards of single calls by their index in ``calls``, set by a reward function: ``trajectory.call_rewards[0] = 1.0``.
    Scoring empties it first and moves its values to ``Call.reward``."""
    notes: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Texts that a reward adds under a name of its own: ``trajectory.notes["ruler"] = "why"``. They are stored with the score.
    ``unscored`` says why the rollout has no reward; it is removed if it has one."""

    def reward_node(self, node: str, reward: float) -> None:
        """Reward every call that ``node`` made, through ``call_rewards``; for reward functions."""
        self.call_rewards.update({index: reward for index, call in enumerate(self.calls) if call.made_by(node)})

    def messages(self) -> list[JsonDict]:
        """Return the last call's conversation and answer as chat messages; empty if there was no call."""
        return self.calls[-1].messages() if self.calls else []


@dataclass(frozen=True)
class Group:
    """Several rollouts of one agent on one task. Rewards are compared within a group only."""

    task: Any
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...] = ()
    """One per trajectory once scored; empty before. A trajectory without a reward has advantage 0."""
    call_advantages: tuple[tuple[float, ...], ...] = ()
    """If calls have rewards of their own: one advantage per call for each trajectory, the trajectory's for a call without a
    reward. Empty if no call has one; every call then has its trajectory's advantage."""


@dataclass(frozen=True)
class TokenTree:
    """The calls of some trajectories with every shared prefix stored once.

    A node is a sequence of tokens that follows its parent's tokens. Nodes are in depth-first order, so a node's tokens are
    contiguous and every ancestor comes before its descendants. Invariant: concatenating the nodes on the path from a root
    to a call's end gives exactly ``call.prompt_ids + call.sampled_ids``.

    A target is one (trajectory, call, sampled position). A token that several calls sampled is stored once and is a target
    of each, because each has its own old logprob and advantage.
    """

    tokens: np.ndarray
    """(num_tokens,) int64: token ids, one node after another."""
    depths: np.ndarray
    """(num_tokens,) int64: the number of tokens before this one on its path; the position for rotary embeddings."""
    node_starts: np.ndarray
    """(num_nodes + 1,) int64: node i holds ``tokens[node_starts[i]:node_starts[i + 1]]``."""
    node_parents: np.ndarray
    """(num_nodes,) int64: -1 for a root."""
    target_tokens: np.ndarray
    """(num_targets,) int64: index into ``tokens`` of the sampled token."""
    target_contexts: np.ndarray
    """(num_targets,) int64: index into ``tokens`` of the token before the target, whose hidden state predicts it."""
    old_logprobs: np.ndarray
    """(num_targets,) float32: logprobs recorded when the tokens were sampled."""
    temperatures: np.ndarray
    """(num_targets,) float32: temperatures of ``old_logprobs``; 1 for greedy calls."""
    weights: np.ndarray
    """(num_targets,) float32: 0 if the target is not trained (aborted call, forced token, dropped overlong call), else 1."""
    advantages: np.ndarray
    """(num_targets,) float32: zero until scored."""
    trajectory: np.ndarray
    """(num_targets,) int64: index of the target's trajectory."""
    call: np.ndarray
    """(num_targets,) int64: index of the target's call among the calls of all trajectories."""

    @property
    def num_tokens(self) -> int:
        """Unique tokens, each computed once."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """The sum of ``len(sampled_ids)`` over all calls, trained or not."""
        return len(self.target_tokens)


@dataclass(frozen=True)
class LossInputs:
    """One row per target, all of shape (targets,)."""

    logprobs: Tensor
    """Under the weights being trained; differentiable."""
    old_logprobs: Tensor
    """Under the weights that sampled the token, as recorded."""
    ref_logprobs: Tensor | None
    """Under the reference weights; None without a KL term."""
    advantages: Tensor
    weights: Tensor
    """0 for targets that are not trained."""
    trajectory: Tensor
    """int64; rows with the same number belong to one trajectory. All rows of a trajectory are in one LossInputs."""
    call: Tensor
    """int64; rows with the same number belong to one call."""
    step_trajectories: int | None = None
    """Trajectories with trained targets in the whole optimizer step, if these rows are a part of it; None if they are all of
    it. The losses of the parts add up to the loss of the step."""
    step_weight: float | None = None
    """Sum of the weights in the whole optimizer step, if these rows are a part of it; None if they are all of it."""
    proximal_logprobs: Tensor | None = None
    """Under the learner's weights before the update, without a gradient; None means ``old_logprobs``. They differ from
    ``old_logprobs`` if the engine computes differently from the learner, or sampled with older weights."""


@dataclass(frozen=True)
class LossOutputs:
    """A scalar to call ``backward`` on, and numbers to log."""

    loss: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Weights:
    """Weights to serve: a folder, and the tensors themselves if engine and learner share memory."""

    version: int
    path: Path | None
    """A Hugging Face model folder or an adapter folder; None if only ``live`` exists."""
    live: Mapping[str, Tensor] | None = None
    """Parameter name -> tensor in shared memory, adapters merged in. The learner changes them in place between swaps
    (with ``max_staleness`` in ``Learner.weights`` only); parameters that training leaves alone may be missing."""


GREEDY = 1e-5
"""A temperature below this is 0: dividing logits by it leaves the range of float32."""


@dataclass(frozen=True)
class Sampling:
    """What a rollout imposes on every request of the agent; None keeps the agent's own setting."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @classmethod
    def plain(cls, temperature: float) -> Sampling:
        """Return the settings that sample from the model's own distribution at ``temperature``."""
        penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        return cls(temperature, top_p=1.0, top_k=0, min_p=0.0, **penalties)


@dataclass(frozen=True)
class RolloutAddress:
    """Where the agent's model calls of one rollout go."""

    rollout_id: str
    base_url: str
    """``http://HOST:PORT/rollouts/{rollout_id}/v1``, for any OpenAI-compatible client."""
    api_key: str
    model: str
    """A model name to send; any name works, because the policy answers."""
    passthrough: frozenset[str] = frozenset()
    """Model names that the policy doesn't answer: calls to them go where the agent sends them."""
    nodes: tuple[str, ...] = ()
    """If not empty, the policy answers only the calls of these nodes; others go where the agent sends them."""
    live: bool = False
    """Whether the agent's own providers answer: calls go where the agent sends them, through this address, which records them."""
