"""Random calls that share prefixes, and what a tree of them says; for tests of trees."""

import numpy as np
from hypothesis import strategies as st

from art_core.types import Call, TokenTree, Trajectory

token = st.integers(0, 2)  # few tokens, so that prefixes are shared, calls repeat and calls are prefixes of others


def make_call(prompt, sampled, **fields) -> Call:
    logprobs = tuple(-0.5 - i for i in range(len(sampled)))
    return Call(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=logprobs, **fields)


@st.composite
def trajectory_lists(draw) -> list[Trajectory]:
    seen: list[tuple[int, ...]] = [()]
    trajectories = []
    for _ in range(draw(st.integers(0, 4))):
        calls = []
        for _ in range(draw(st.integers(0, 4))):
            earlier = draw(st.sampled_from(seen))
            kept = earlier[: draw(st.integers(0, len(earlier)))]
            prompt = kept + tuple(draw(st.lists(token, min_size=0 if kept else 1, max_size=5)))
            sampled = tuple(draw(st.lists(token, max_size=5)))
            forced = tuple(i for i in range(len(sampled)) if draw(st.booleans()))
            reason = draw(st.sampled_from(["stop", "length", "aborted"]))
            calls.append(make_call(prompt, sampled, forced=forced, finish_reason=reason))
            seen.append(prompt + sampled)
        trajectories.append(Trajectory(task="t", calls=tuple(calls)))
    return trajectories


def path_to(tree: TokenTree, token_index: int) -> tuple[int, ...]:
    """The tokens from the root to ``token_index``, read off the nodes."""
    node = int(np.searchsorted(tree.node_starts, token_index, side="right")) - 1
    path = list(tree.tokens[tree.node_starts[node] : token_index + 1])
    while (node := tree.node_parents[node]) >= 0:
        path[:0] = tree.tokens[tree.node_starts[node] : tree.node_starts[node + 1]]
    return tuple(int(token) for token in path)
