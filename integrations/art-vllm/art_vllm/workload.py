"""How many tokens a step computes: measured in a run folder, or assumed. Knows nothing about models or GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.token_tree import build_tree
from art_core.types import TokenTree, Trajectory

STEPS = 4
"""The newest of a run, over which its counts are averaged."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a kind, and what their attention reads."""

    count: float = 0.0
    context: float = 0.0
    """Tokens that one of them sees, on average."""

    @staticmethod
    def of(contexts: np.ndarray) -> Tokens:
        return Tokens(float(len(contexts)), float(contexts.mean()) if len(contexts) else 0.0)

    def plus(self, other: Tokens) -> Tokens:
        count = self.count + other.count
        total = self.count * self.context + other.count * other.context
        return Tokens(count, total / count if count else 0.0)

    def times(self, factor: float) -> Tokens:
        return Tokens(self.count * factor, self.context)


@dataclass(frozen=True)
class Workload:
    """A step."""

    source: str
    """Where the counts are from."""
    runs: float
    """Of the agent."""
    calls: float
    prompts: Tokens
    """Of all calls, each on its own: what a server without a prefix cache computes."""
    prefill: Tokens
    """Of these, what is left where no prefix is computed twice within a group and answers stay in the cache."""
    decode: Tokens
    """Sampled."""
    learner: Tokens
    """What the learner computes: every shared prefix once."""
    targets: float
    """Tokens that are trained."""
    largest: int
    """Tokens of the largest group's tree."""
    longest: int
    """Tokens of the longest prompt with its answer."""


def assumed(runs: int, group_size: int, *, calls: int, prompt: int, sampled: int) -> Workload:
    """Return the step of agents that make ``calls`` calls each.

    The first prompt is ``prompt`` tokens, the same for a whole group; each later one is the one before with its answer of
    ``sampled`` tokens.
    """
    lengths = prompt + sampled * np.arange(calls)
    each = Tokens(float(lengths.sum()), float((lengths**2).sum() / (2 * lengths.sum())))
    first = Tokens(prompt, prompt / 2)
    answers = Tokens(calls * sampled, prompt + calls * sampled / 2)
    groups = runs / group_size
    return Workload(
        source=f"assumed: {calls} calls a run, a first prompt of {prompt} tokens, {sampled} sampled tokens a call",
        runs=runs,
        calls=runs * calls,
        prompts=each.times(runs),
        prefill=first.times(groups),
        decode=answers.times(runs),
        learner=first.plus(answers.times(group_size)).times(groups),
        targets=runs * calls * sampled,
        largest=prompt + group_size * calls * sampled,
        longest=prompt + calls * sampled,
    )


def measured(run_dir: Path) -> Workload:
    """Return the mean of a run's newest steps. Raises ConfigError where it is not a run folder or has no step."""
    with Store(store_file(run_dir)) as store:
        metrics = dict(store.steps())
        steps = sorted({it.step for it in store.rollouts(split="train") if it.finished and it.step in metrics})[-STEPS:]
        if not steps:
            raise ConfigError(
                f"{run_dir} has no finished training step to count tokens in; train one, or leave --run out"
            )
        found = [_of_step(_groups(store, step, metrics[step]), metrics[step].get("tokens")) for step in steps]
        model = store.meta("model")
    count = len(found)

    def mean(name: str) -> Tokens:
        total = Tokens()
        for it in found:
            total = total.plus(getattr(it, name))
        return total.times(1 / count)

    return Workload(
        source=f"measured: mean of {count} steps of {run_dir} (model {model}, up to step {steps[-1]})",
        runs=sum(it.runs for it in found) / count,
        calls=sum(it.calls for it in found) / count,
        prompts=mean("prompts"),
        prefill=mean("prefill"),
        decode=mean("decode"),
        learner=mean("learner"),
        targets=sum(it.targets for it in found) / count,
        largest=max(it.largest for it in found),
        longest=max(it.longest for it in found),
    )


def step_of(run_dir: Path) -> tuple[int, int]:
    """Return ``group_size`` and ``tasks_per_step`` of the settings that a run began with."""
    with Store(store_file(run_dir)) as store:
        began = store.meta("config", {})
    return tuple(began.get(name, getattr(TrainConfig, name)) for name in ("group_size", "tasks_per_step"))


def _groups(store: Store, step: int, metrics: Mapping[str, float]) -> list[list[Trajectory]]:
    """Return the runs that the step was given, by group: the newest, as those of an interrupted one keep its number."""
    found = [rollout for rollout in store.rollouts(split="train", step=step) if rollout.finished]
    groups: dict[str, list[Trajectory]] = {}
    for rollout in found[-int(metrics.get("trajectories", len(found))) :]:
        groups.setdefault(rollout.group or rollout.rollout_id, []).append(store.trajectory(rollout.rollout_id))
    return list(groups.values())


def _of_step(groups: Sequence[Sequence[Trajectory]], trained: float | None) -> Workload:
    """Count a step; ``trained`` tokens are those that its learner said it computed: of the groups with contrast."""
    trees = [build_tree(group) for group in groups]
    calls = [call for group in groups for trajectory in group for call in trajectory.calls]
    depths = np.concatenate([tree.depths for tree in trees])
    learner = Tokens.of(depths)
    share = trained / learner.count if trained and learner.count else 1.0
    targets = sum(tree.num_targets for tree in trees)
    lengths = np.array([len(call.prompt_ids) for call in calls], dtype=np.float64)
    prompts = Tokens(lengths.sum(), (lengths**2).sum() / (2 * lengths.sum())) if len(lengths) else Tokens()
    return Workload(
        source="",
        runs=sum(map(len, groups)),
        calls=len(calls),
        prompts=prompts,
        prefill=Tokens.of(np.concatenate([_given(tree) for tree in trees])),
        decode=Tokens.of(np.concatenate([tree.depths[tree.target_tokens] for tree in trees])),
        learner=learner.times(share),
        targets=targets * share,
        largest=max(tree.num_tokens for tree in trees),
        longest=int(depths.max(initial=-1)) + 1,
    )


def _given(tree: TokenTree) -> np.ndarray:
    """Return the depths of the tokens that nobody sampled."""
    return np.delete(tree.depths, np.unique(tree.target_tokens))
