"""Identities of agents, rewards and tasks: the same in every process, and another after an edit that matters."""

import functools
import importlib.util
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import art_core as art
from art_core.loop.own_code import identity
from art_core.loop.resume_checks import identity_of_tasks
from art_core.testing import ScriptedAgent

MODULE = """
    import functools

    def grade(text):
        return len(text)

    def score(trajectory):
        return grade(trajectory.output)  # longer is better

    def strict(trajectory, factor=1):
        return factor * score(trajectory)

    class Judge:
        def __init__(self, value):
            self.value = value

        async def score(self, group):
            return [self.value for _ in group.trajectories]

        def single(self, trajectory):
            return self.value

    def maker(limit, inner):
        def limited(trajectory):
            return min(limit, inner(trajectory))
        return limited

    double, triple = functools.partial(strict, factor=2), functools.partial(strict, factor=3)
    judge, single = Judge(object()), Judge(1).single
    limited = maker(object(), lambda trajectory: score(trajectory))
    short = dict(steps=4, reward=lambda trajectory: 0.5)["reward"]
"""
NAMES = ("score", "double", "triple", "judge", "single", "limited", "short")


def loaded(folder, text=MODULE):
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location("mine", file)
    module = sys.modules["mine"] = importlib.util.module_from_spec(spec)  # inspect finds a class's source through it
    spec.loader.exec_module(module)
    return module


def names(module):
    return {name: identity(getattr(module, name)) for name in NAMES}


def changed(tmp_path, before, after):
    """Return which of NAMES have another identity after an edit of the source."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    assert before in MODULE
    old, new = names(loaded(folders[0])), names(loaded(folders[1], MODULE.replace(before, after)))
    return {name for name in NAMES if old[name] != new[name]}


@pytest.mark.system
def test_an_identity_is_the_same_in_every_process_and_contains_no_address(tmp_path):
    here = names(loaded(tmp_path))
    code = f"import mine; from art_core.loop.own_code import identity; print({{n: identity(getattr(mine, n)) for n in {NAMES}}})"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert eval(output) == here and "0x" not in output
    assert here["judge"].startswith("Judge (source ") and here["single"].startswith("Judge.single (source ")


@pytest.mark.parametrize(
    ("before", "after", "other"),
    [
        ("return len(text)", "return len(text) + 1", {"score", "double", "triple", "limited"}),
        ("  # longer is better", "  # the longer the better\n", set()),
        ("return self.value\n", "return -self.value\n", {"judge", "single"}),
        ("factor=2", "factor=4", {"double"}),
        ("steps=4", "steps=400", set()),
        ("trajectory: 0.5", "trajectory: 0.7", {"short"}),
        ("object(), lambda trajectory: score", "object(), lambda trajectory: 2 * score", {"limited"}),
        ("Judge(object())", "Judge(7)", set()),
    ],
)
def test_an_edit_of_the_code_changes_the_identity_of_all_that_uses_it(tmp_path, before, after, other):
    assert changed(tmp_path, before, after) == other


def test_library_code_is_identified_by_name(tmp_path):
    assert identity(len) == "len" and identity("ruler") == "ruler" and identity(ScriptedAgent(2)) == "ScriptedAgent"
    assert identity(textwrap.dedent) == "dedent"


def test_a_graph_is_identified_by_its_nodes_even_in_a_closure(tmp_path):
    graph, other = SimpleNamespace(nodes={"b": 1, "a": 2}), SimpleNamespace(nodes={"a": 2})
    assert identity(graph) == "SimpleNamespace (nodes a, b)"

    def wrapped(inner):
        return lambda task: inner

    assert identity(wrapped(graph)) != identity(wrapped(other))


def test_a_weighted_sum_is_identified_by_its_parts_and_recursion_ends():
    def one(trajectory):
        return one

    def two(trajectory):
        return 2

    sums = [art.weighted(part=(weight, reward)) for weight, reward in ((1, one), (1, two), (2, one), (1, "ruler"))]
    assert len({identity(reward) for reward in sums}) == 4
    assert identity(functools.partial(one, "x")) != identity(functools.partial(one, "y"))


def test_tasks_are_identified_by_number_and_contents_in_any_order():
    assert identity_of_tasks(["a", "b"]) == identity_of_tasks(["b", "a"]) != identity_of_tasks(["a", "c"])
    assert identity_of_tasks(["a", {"input": 1}]).startswith("2 tasks (")
