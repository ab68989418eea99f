"""TreePlan and Piece: every token is found behind exactly its ancestors, however the tree is cut into pieces."""

from itertools import islice, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import trajectory_lists

from art_core.token_tree import build_tree
from art_hybrid.plan import Piece, TreePlan

CPU = torch.device("cpu")


def ancestors(plan, token):
    """The tokens before ``token`` on its path, the nearest first."""
    while (token := plan.before[token]) >= 0:
        yield token


def pieces_of(plan, tree, cuts):
    bounds = [0, *sorted({cut % tree.num_tokens for cut in cuts} - {0}), tree.num_tokens]
    return [Piece(plan, start, stop, CPU) for start, stop in pairwise(bounds)]


def paths(tree):
    """Each token's depth-first index -> those of its path, read off the nodes."""
    found = {}
    for node, parent in enumerate(tree.node_parents):
        above = found[tree.node_starts[parent + 1] - 1] if parent >= 0 else []
        for token in range(tree.node_starts[node], tree.node_starts[node + 1]):
            above = found[token] = [*above, token]
    return found


@given(trajectories=trajectory_lists())
def test_the_predecessors_of_a_token_are_its_path(trajectories):
    tree = build_tree(trajectories)
    plan = TreePlan(tree)
    for token, path in paths(tree).items():
        assert [*ancestors(plan, token)][::-1] == path[:-1]


@given(trajectories=trajectory_lists(), cuts=st.lists(st.integers(0, 60), max_size=3), width=st.integers(1, 4))
def test_a_token_of_the_layout_stands_behind_the_inputs_that_precede_it_on_its_path(trajectories, cuts, width):
    tree = build_tree(trajectories)
    plan, kept = TreePlan(tree), []
    for piece in pieces_of(plan, tree, cuts):
        layout = piece.layout(width)
        inputs = [None, *kept, *range(piece.start, piece.stop)]
        row = [inputs[column] for column in layout.columns.tolist()]
        for token, place in zip(range(piece.start, piece.stop), layout.places.tolist(), strict=True):
            before = [*ancestors(plan, token)][: width - 1]
            expected = [*[None] * (width - 1 - len(before)), *before[::-1], token]
            assert row[place - width + 1 : place + 1] == expected
        kept = [inputs[column] for column in layout.passed_on.tolist()]
    assert kept == []


@given(trajectories=trajectory_lists(), cuts=st.lists(st.integers(0, 60), max_size=3), size=st.integers(1, 5))
def test_a_chunk_continues_the_state_after_the_token_before_it(trajectories, cuts, size):
    tree = build_tree(trajectories)
    plan, earlier, seen = TreePlan(tree), [-1], []
    for piece in pieces_of(plan, tree, cuts):
        chunks = piece.chunks(size)
        tokens = [[piece.start + at for at in row if at < piece.stop - piece.start] for row in chunks.tokens.tolist()]
        states, before, left = [*earlier], earlier, iter(tokens)
        for parents in chunks.parents:
            level = [*islice(left, len(parents))]
            for chunk, parent in zip(level, parents.tolist(), strict=True):
                assert before[parent] == plan.before[chunk[0]]
                assert all(plan.before[token] == token - 1 for token in chunk[1:])
            before = [chunk[-1] for chunk in level]
            states += before
        flat = chunks.tokens.flatten()[chunks.places] + piece.start
        assert flat.tolist() == [*range(piece.start, piece.stop)]
        seen += [token for chunk in tokens for token in chunk]
        earlier = [-1, *(states[number] for number in chunks.passed_on.tolist())]
        assert earlier[1:] == plan.open_ends(piece.stop).tolist()
    assert sorted(seen) == [*range(tree.num_tokens)] and earlier == [-1]
