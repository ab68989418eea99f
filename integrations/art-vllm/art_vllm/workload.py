"""Counts the tokens that a training step computes, measured in a run folder or assumed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from art_core import TrainConfig
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.token_tree import build_tree
from art_core.types import TokenTree, Trajectory

STEPS = 4
"""Newest steps of a run that are averaged."""


@dataclass(frozen=True)
class Tokens:
    """A number of tokens, and how many tokens each attends to."""

    count: float = 0.0
    context: float = 0.0
    """Mean number of tokens that one of them attends to."""

    @staticmethod
    def of(contexts: np.ndarray) -> Tokens:
        return Tokens(float(len(contexts)), float(contexts.mean()) if len(contexts) else 0.0)

    @staticmethod
    def sum(each: Iterable[Tokens]) -> Tokens:
        return functools.reduce(Tokens.plus, each, Tokens())

    def plus(self, other: Tokens) -> Tokens:
        count = self.count + other.count
        total = self.count * self.context + other.count * other.context
        return Tokens(count, total / count if count else 0.0)

    def times(self, factor: float) -> Tokens:
        return Tokens(self.count * factor, self.context)


@dataclass(frozen=True)
class Workload:
    """The tokens of one step."""

    source: str
    """Where the counts come from."""
    runs: float
    """Rollouts."""
    calls: float
    prompts: Tokens
    """Prompts of all calls: what a server without a prefix cache computes."""
    prefill: Tokens
    """The part of ``prompts`` that is computed if a group computes every prefix once and answers stay in the cache."""
    decode: Tokens
    """Sampled tokens."""
    learner: Tokens
    """Tokens that the learner computes, every shared prefix once."""
    rows: float
    """Tokens that a learner computes if every path of a group's tree is a row of its own."""
    targets: float
    """Trained tokens."""
    largest: int
    """Tokens of the largest group's tree."""
    longest: int
    """Tokens of the longest prompt plus answer."""


def assumed(rollouts: int, group_size: int, *, calls: int, prompt: int, sampled: int) -> Workload:
    """Return the workload of rollouts with ``calls`` calls each.

    The first prompt has ``prompt`` tokens and is the same for a whole group; each later prompt appends the previous answer
    of ``sampled`` tokens.
    """
    lengths = prompt + sampled * np.arange(calls)
    each = Tokens(float(lengths.sum()), float((lengths**2).sum() / (2 * lengths.sum())))
    first = Tokens(prompt, prompt / 2)
    answers = Tokens(calls * sampled, prompt + calls * sampled / 2)
    groups = rollouts / group_size
    return Workload(
        source=f"assumed: {calls} calls per rollout, a first prompt of {prompt} tokens, {sampled} sampled tokens per call",
        runs=rollouts,
        calls=rollouts * calls,
        prompts=each.times(rollouts),
        prefill=first.times(groups),
        decode=answers.times(rollouts),
        learner=first.plus(answers.times(group_size)).times(groups),
        rows=rollouts * (prompt + calls * sampled),
        targets=rollouts * calls * sampled,
        largest=prompt + group_size * calls * sampled,
        longest=prompt + calls * sampled,
    )


def measured(run_dir: Path) -> Workload:
    """Return the mean workload of a run's newest steps. Raises ConfigError if ``run_dir`` is not a run folder or has no step."""
    with Store(store_file(run_dir)) as store:
        metrics = dict(store.steps())
        steps = sorted({row.step for row in store.rollouts(split="train") if row.finished and row.step in metrics})[
            -STEPS:
        ]
        if not steps:
            raise ConfigError(f"{run_dir} has no finished training step to count tokens in; train one, or omit --run")
        measurements = [_of_step(_groups(store, step, metrics[step]), metrics[step].get("tokens")) for step in steps]
        model = store.meta("model")
    count = len(measurements)

    def mean(name: str) -> Tokens:
        return Tokens.sum(getattr(each, name) for each in measurements).times(1 / count)

    return Workload(
        source=f"measured: mean of {count} steps of {run_dir} (model {model}, up to step {steps[-1]})",
        runs=sum(each.runs for each in measurements) / count,
        calls=sum(each.calls for each in measurements) / count,
        prompts=mean("prompts"),
        prefill=mean("prefill"),
        decode=mean("decode"),
        learner=mean("learner"),
        rows=sum(each.rows for each in measurements) / count,
        targets=sum(each.targets for each in measurements) / count,
        largest=max(each.largest for each in measurements),
        longest=max(each.longest for each in measurements),
    )


def has_steps(run_dir: Path) -> bool:
    """Whether the run has finished a training step, so ``measured`` has something to count."""
    with Store(store_file(run_dir)) as store:
        return bool(store.steps())


def step_of(run_dir: Path) -> tuple[int, int]:
    """Return ``group_size`` and ``tasks_per_step`` from a run's stored settings."""
    with Store(store_file(run_dir)) as store:
        config = store.meta("config", {})
    return tuple(config.get(name, getattr(TrainConfig, name)) for name in ("group_size", "tasks_per_step"))


def _groups(store: Store, step: int, metrics: Mapping[str, float]) -> list[list[Trajectory]]:
    """Return the step's trajectories by group: the newest, because those of an interrupted attempt have the same step number."""
    finished = [rollout for rollout in store.rollouts(split="train", step=step) if rollout.finished]
    groups: dict[str, list[Trajectory]] = {}
    for rollout in finished[-int(metrics.get("trajectories", len(finished))) :]:
        groups.setdefault(rollout.group or rollout.rollout_id, []).append(store.trajectory(rollout.rollout_id))
    return list(groups.values())


def _of_step(groups: Sequence[Sequence[Trajectory]], trained: float | None) -> Workload:
    """Return one step's workload. ``trained`` is the learner's token count, which covers only the groups with contrast."""
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
        prefill=Tokens.of(np.concatenate([_prompt_depths(tree) for tree in trees])),
        decode=Tokens.of(np.concatenate([tree.depths[tree.target_tokens] for tree in trees])),
        learner=learner.times(share),
        rows=sum(map(_path_tokens, trees)) * share,
        targets=targets * share,
        largest=max(tree.num_tokens for tree in trees),
        longest=int(depths.max(initial=-1)) + 1,
    )


def _prompt_depths(tree: TokenTree) -> np.ndarray:
    """Return the depths of the tokens that were not sampled."""
    return np.delete(tree.depths, np.unique(tree.target_tokens))


def _path_tokens(tree: TokenTree) -> int:
    """Return the sum of the lengths of all paths from a root to a leaf."""
    leaves = np.setdiff1d(np.arange(len(tree.node_parents)), tree.node_parents)
    return int((tree.depths[tree.node_starts[leaves + 1] - 1] + 1).sum())
