"""Trajectories -> the batches of a supervised warm start. Knows nothing about rewards' meaning, models or optimizers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from art_core.errors import ConfigError
from art_core.scoring import calls_of
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.token_tree import group_tree
from art_core.types import Group, TokenTree, Trajectory


def load_trajectories(
    run_dir: str | Path, *, split: str | None = "train", step: int | None = None, min_reward: float | None = None
) -> list[Trajectory]:
    """Return the finished runs of the agent that a run folder holds, with their calls and newest scores, oldest first.

    ``split`` is ``"train"`` or ``"eval"`` (runs on held-out tasks: to train on them spoils every later evaluation); None takes
    both, and of ``step`` all. ``min_reward`` leaves out those with less or none.
    Raises ConfigError where ``run_dir`` is not a run folder, StoreError where it cannot be read.
    """
    with Store(store_file(run_dir)) as store:
        found = store.trajectories(split=split, step=step)
    return [t for t in found if min_reward is None or (t.reward is not None and t.reward >= min_reward)]


def chosen(trajectories: Sequence[Trajectory], min_reward: float | None, nodes: Sequence[str] = ()) -> list[Trajectory]:
    """Return the trajectories worth imitating, with the calls of ``nodes``: no error, reward high enough, something sampled.

    Raises ConfigError for what is not a trajectory, and where none is left.
    """
    for it in trajectories:
        if not isinstance(it, Trajectory):
            raise ConfigError(
                f"learn_sft trains trajectories with token ids, this is a {type(it).__name__}: {it!r:.80}; take them from a run "
                "(art.load_trajectories), or build Trajectory(task=..., calls=[...]) of conversations, whose calls "
                "art_embedded.rendering.Renderer(model).call(messages, answer) makes"
            )
    if not trajectories:
        raise ConfigError("there are no trajectories to imitate: the list is empty; a lower min_reward may find some")
    given = [calls_of(t, nodes) for t in trajectories]
    whole = [t for t in given if t.error is None and any(_trainable(t))]
    good = [t for t in whole if min_reward is None or (t.reward is not None and t.reward >= min_reward)]
    if not good:
        raise ConfigError(
            f"nothing to imitate: of {len(trajectories)} trajectories {len(trajectories) - len(whole)} failed or sampled "
            f"nothing, and {len(whole)} have no reward of at least {min_reward}; give better runs or a lower min_reward"
        )
    return good


def _trainable(trajectory: Trajectory) -> Iterator[bool]:
    for call in trajectory.calls:
        yield call.finish_reason != "aborted" and len(set(call.forced)) < len(call.sampled_ids)


def batches(trajectories: Sequence[Trajectory], epochs: int, batch_size: int, seed: str) -> Iterator[list[Group]]:
    """Yield the groups of each optimizer step, one per task, whose runs share their start. Equal sizes, the last may be smaller.

    Raises ConfigError for an ``epochs`` or a ``batch_size`` below 1.
    """
    if epochs < 1 or batch_size < 1:
        raise ConfigError(f"epochs={epochs}, batch_size={batch_size}: give whole numbers of at least 1")
    for epoch in range(epochs):
        order = list(trajectories)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for first in range(0, len(order), batch_size):
            yield _by_task(order[first : first + batch_size])


def _by_task(trajectories: Sequence[Trajectory]) -> list[Group]:
    tasks: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(repr(trajectory.task), []).append(trajectory)
    return [Group(task=members[0].task, trajectories=tuple(members)) for members in tasks.values()]


def tree(group: Group) -> TokenTree:
    """Return a group as the token tree that a step imitates: with logprobs of the model's own distribution as what is trained."""
    tree = group_tree(group)
    return replace(tree, temperatures=np.ones_like(tree.temperatures))
