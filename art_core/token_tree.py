"""Trajectories -> TokenTree: every shared prefix is stored once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from art_core.types import Call, Group, TokenTree, Trajectory

ROOT = 0
"""An empty node above all roots, so that inserting needs no special case; the TokenTree leaves it out."""


def build_tree(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] = (),
    *,
    call_advantages: Sequence[Sequence[float]] = (),
    drop_overlong: bool = False,
) -> TokenTree:
    """Store the calls of ``trajectories`` as a radix tree over token ids.

    ``advantages`` has one number per trajectory, or is empty (all targets get 0). ``call_advantages``, unless empty, replaces
    them with one sequence per trajectory that has one number per call. ``drop_overlong`` gives targets of calls that were cut
    off at their token limit the weight 0. Targets are ordered by trajectory, call and position. Raises ValueError if the
    number of advantages differs from that of trajectories or calls.
    """
    if any(not call.prompt_ids for trajectory in trajectories for call in trajectory.calls):
        raise ValueError("a call that was recorded as text has no tokens; leave its trajectory out")
    by_call = _by_call(trajectories, advantages, call_advantages)
    untrained = {"aborted", "length"} if drop_overlong else {"aborted"}
    radix = RadixTree()
    calls = [(number, call) for number, trajectory in enumerate(trajectories) for call in trajectory.calls]
    ends = [radix.insert(np.array(call.prompt_ids + call.sampled_ids, dtype=np.int64)) for _, call in calls]
    order = list(radix.depth_first())
    row = {node: index for index, node in enumerate(order)}
    edges = [radix.edges[node] for node in order]
    starts = np.cumsum([0, *map(len, edges)], dtype=np.int64)
    parents = np.array([row.get(radix.parents[node], -1) for node in order], dtype=np.int64)
    sizes = [len(call.sampled_ids) for _, call in calls]
    paths = [_path_end(starts, parents, row[end], size) for end, size in zip(ends, sizes, strict=True)]
    return TokenTree(
        tokens=_concatenate(edges, np.int64),
        depths=_depths(starts, parents),
        node_starts=starts,
        node_parents=parents,
        target_tokens=_concatenate([path[1:] for path in paths], np.int64),
        target_contexts=_concatenate([path[:-1] for path in paths], np.int64),
        old_logprobs=_concatenate([call.logprobs for _, call in calls], np.float32),
        temperatures=np.repeat(np.array([call.temperature or 1.0 for _, call in calls], dtype=np.float32), sizes),
        weights=_concatenate([_weights(call, untrained) for _, call in calls], np.float32),
        advantages=np.repeat(by_call, sizes),
        trajectory=np.repeat(np.array([number for number, _ in calls], dtype=np.int64), sizes),
        call=np.repeat(np.arange(len(calls), dtype=np.int64), sizes),
    )


def group_tree(group: Group, *, drop_overlong: bool = False) -> TokenTree:
    """Return ``build_tree`` of a group's trajectories and advantages."""
    return build_tree(
        group.trajectories, group.advantages, call_advantages=group.call_advantages, drop_overlong=drop_overlong
    )


class RadixTree:
    """Token sequences with shared prefixes merged; a node is the tokens on the edge from its parent."""

    def __init__(self) -> None:
        self.edges: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        self.parents: list[int] = [-1]
        self.children: list[dict[int, int]] = [{}]
        """Per node: first token of a child's edge -> child, in insertion order."""

    def insert(self, tokens: np.ndarray) -> int:
        """Return the node at whose end ``tokens`` end, also after further insertions."""
        node, done = ROOT, 0
        while done < len(tokens):
            child = self.children[node].get(int(tokens[done]))
            if child is None:
                return self._add(tokens[done:], node)
            edge = self.edges[child]
            length = min(len(edge), len(tokens) - done)
            differs = edge[:length] != tokens[done : done + length]
            common = int(differs.argmax()) if differs.any() else length
            node = child if common == len(edge) else self._split(child, common)
            done += common
        return node

    def depth_first(self) -> Iterator[int]:
        """Yield every node but ROOT, parents first and children in insertion order."""
        pending = [ROOT]
        while pending:
            node = pending.pop()
            if node != ROOT:
                yield node
            pending.extend(reversed(self.children[node].values()))

    def _add(self, edge: np.ndarray, parent: int) -> int:
        node = len(self.edges)
        self.edges.append(edge)
        self.parents.append(parent)
        self.children.append({})
        self.children[parent][int(edge[0])] = node
        return node

    def _split(self, node: int, length: int) -> int:
        """Cut ``node`` after ``length`` tokens and return the upper part."""
        # The upper part is the new node, so calls that end at the end of ``node`` still do.
        edge, parent = self.edges[node], self.parents[node]
        upper = self._add(edge[:length], parent)
        self.edges[node], self.parents[node] = edge[length:], upper
        self.children[upper][int(edge[length])] = node
        return upper


def _path_end(starts: np.ndarray, parents: np.ndarray, node: int, sampled: int) -> np.ndarray:
    """Return the indices of the last ``sampled`` + 1 tokens on the path that ends in ``node``."""
    pieces: list[np.ndarray] = []
    missing = sampled + 1
    while missing > 0:
        first, end = starts[node], starts[node + 1]
        pieces.append(np.arange(max(first, end - missing), end))
        missing -= len(pieces[-1])
        node = parents[node]
    return np.concatenate(pieces[::-1])


def _depths(starts: np.ndarray, parents: np.ndarray) -> np.ndarray:
    lengths = np.diff(starts)
    above = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] = above[parent] + lengths[parent]
    return np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1] - above, lengths)


def _by_call(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], call_advantages: Sequence[Sequence[float]]
) -> np.ndarray:
    """Return one advantage per call, in the order of trajectories and calls."""
    sizes = [len(trajectory.calls) for trajectory in trajectories]
    if len(call_advantages):
        given = [len(numbers) for numbers in call_advantages]
        if given != sizes:
            raise ValueError(f"call advantages for {given} calls of trajectories with {sizes} calls; pass one per call")
        return _concatenate(call_advantages, np.float32)
    if len(advantages) not in (0, len(trajectories)):
        raise ValueError(
            f"{len(advantages)} advantages for {len(trajectories)} trajectories; pass one per trajectory, or none"
        )
    return np.repeat(np.asarray(advantages if len(advantages) else [0.0] * len(sizes), dtype=np.float32), sizes)


def _weights(call: Call, untrained: Collection[str]) -> np.ndarray:
    weights = np.full(len(call.sampled_ids), 0.0 if call.finish_reason in untrained else 1.0, dtype=np.float32)
    weights[list(call.forced)] = 0.0
    return weights


def _concatenate(pieces: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(piece, dtype) for piece in pieces)])
