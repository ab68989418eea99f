"""Trajectories -> the batches of a supervised warm start."""

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
    """Return the finished rollouts of a run folder, with their calls and newest scores, oldest first.

    ``split`` is ``"train"``, ``"eval"`` (held-out tasks: training on them spoils every later evaluation), or None for both.
    ``step=None`` means all steps. ``min_reward`` leaves out rollouts with a lower reward or none.
    Raises ConfigError if ``run_dir`` is not a run folder, StoreError if it can't be read.
    """
    with Store(store_file(run_dir)) as store:
        return [t for t in store.trajectories(split=split, step=step) if _reaches(t, min_reward)]


def chosen(trajectories: Sequence[Trajectory], min_reward: float | None, nodes: Sequence[str] = ()) -> list[Trajectory]:
    """Return the trajectories to imitate, with the calls of ``nodes``: those without an error that sampled something trainable.

    Raises ConfigError if an item is not a trajectory, or if none is left.
    """
    for item in trajectories:
        if not isinstance(item, Trajectory):
            raise ConfigError(
                f"learn_sft needs trajectories with token ids, got a {type(item).__name__}: {item!r:.80}; load those of a run "
                "with art.load_trajectories, or turn conversations into calls with token ids and pass "
                "Trajectory(task=..., calls=[...])"
            )
    if not trajectories:
        raise ConfigError("there are no trajectories to imitate: the list is empty; a lower min_reward may find some")
    trainable = [t for t in (calls_of(t, nodes) for t in trajectories) if t.error is None and _is_trainable(t)]
    good = [t for t in trainable if _reaches(t, min_reward)]
    if not good:
        raise ConfigError(
            f"nothing to imitate: of {len(trajectories)} trajectories {len(trajectories) - len(trainable)} failed or sampled "
            f"nothing, and {len(trainable)} have no reward of at least {min_reward}; pass better ones or a lower min_reward"
        )
    return good


def _reaches(trajectory: Trajectory, min_reward: float | None) -> bool:
    return min_reward is None or (trajectory.reward is not None and trajectory.reward >= min_reward)


def _is_trainable(trajectory: Trajectory) -> bool:
    """Whether any call has a sampled token that is trained: not aborted, not forced by a grammar."""
    return any(c.finish_reason != "aborted" and len(set(c.forced)) < len(c.sampled_ids) for c in trajectory.calls)


def batches(trajectories: Sequence[Trajectory], epochs: int, batch_size: int, seed: str) -> Iterator[list[Group]]:
    """Yield the groups of each optimizer step: one per task, so that rollouts share their start in the tree.

    All steps of an epoch have ``batch_size`` trajectories, except that the last may have fewer. Raises ConfigError if
    ``epochs`` or ``batch_size`` is below 1.
    """
    if epochs < 1 or batch_size < 1:
        raise ConfigError(f"epochs and batch_size must be integers >= 1, got epochs={epochs}, batch_size={batch_size}")
    for epoch in range(epochs):
        order = list(trajectories)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for first in range(0, len(order), batch_size):
            by_task: dict[str, list[Trajectory]] = {}
            for trajectory in order[first : first + batch_size]:
                by_task.setdefault(repr(trajectory.task), []).append(trajectory)
            yield [Group(task=members[0].task, trajectories=tuple(members)) for members in by_task.values()]


def tree(group: Group) -> TokenTree:
    """Return the token tree that imitates a group: at temperature 1, because the model itself should say what was sampled."""
    tree = group_tree(group)
    return replace(tree, temperatures=np.ones_like(tree.temperatures))
