"""What docs/models.md says of the families is what the code does with their tiny models."""

import json
import logging
import re
from functools import cache
from pathlib import Path

import pytest

from art_core import losses
from art_core.config import TrainConfig
from art_core.learner import TorchLearner, unsloth
from art_core.learner.tree_forward import way_of
from art_embedded.parsers import reasoning_parser, tool_parser
from art_vllm.known_shapes import find_shape
from art_vllm.plan import FOUR_BITS
from bench.family_models import FAMILIES, save

DOC = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
WAYS = {"segments": "one pass", "dense": "one pass, dense mask", "paths": "paths"}


def rows_of(section):
    """The cells of the table in a section, without its head."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", DOC, flags=re.DOTALL | re.MULTILINE)[1]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def named(cell):
    return re.findall(r"`([^`]+)`", cell)


@cache
def learner_of(name, root):
    return TorchLearner(save(name, root / name), TrainConfig(lora_rank=4), losses.grpo)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    logging.disable(logging.WARNING)
    yield tmp_path_factory.mktemp("models")
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("row", rows_of("Families"), ids=lambda row: row[0])
def test_what_the_docs_say_of_a_family_is_what_is_found(row, root):
    family, _, tree, takes_unsloth, tools, thinking = row
    [name] = named(family)
    learner = learner_of(name, root)
    folder = Path(learner.model_folder)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert tree == WAYS[way_of(learner.model).backend]
    assert takes_unsloth == ("yes" if kind in unsloth.FAMILIES else "no")
    assert named(tools) == [found for found in [tool_parser(str(folder))] if found]
    assert named(thinking) == [found for found in [reasoning_parser(str(folder))] if found]


def test_every_family_that_is_named_on_the_hub_is_recognised_there_as_here():
    for family, names, _, _, tools, thinking in rows_of("Families"):
        for name in names.split(", "):
            if not re.search("gemma|granite|moonlight", family):
                assert (tool_parser(name) or "-") == (named(tools) or ["-"])[0]
                assert (reasoning_parser(name) or "-") == (named(thinking) or ["-"])[0]


@pytest.mark.parametrize(
    ("name", "cell"), [(name, row[1]) for row in rows_of("What LoRA adapts") for name in named(row[0])]
)
def test_what_the_docs_say_is_adapted_is(name, cell, root):
    adapted = {it.removesuffix(".weight") for it in learner_of(name, root)._adapted}
    assert {it.rpartition(".")[2] for it in adapted if "experts" not in it} == set(named(cell))
    assert any("experts" in it for it in adapted) == ("every expert" in cell)


def test_every_tiny_model_has_its_place_in_the_docs():
    assert {name for row in rows_of("What LoRA adapts") for name in named(row[0])} == set(FAMILIES)
    told = {name for row in rows_of("Families") for name in named(row[0])}
    assert all(f"`{name}`" in DOC.partition("## Any Hugging Face")[2] for name in set(FAMILIES) - told)


def test_the_memory_in_the_docs_is_what_art_plan_counts():
    rows = rows_of("Memory")
    assert len(rows) > 15
    for model, billions, half, four, adapter in rows:
        shape = find_shape(named(model)[0])
        packed = shape.linear_weights - shape.expert_weights
        in_four = (FOUR_BITS * packed + 2 * (shape.parameters - packed)) / 2**30
        numbers = [shape.parameters / 1e9, 2 * shape.parameters / 2**30, in_four, shape.adapter_parameters(16) / 1e6]
        formats = ["{:,.2f}", "{:,.1f}", "{:,.1f}", "{:,.0f}"]
        assert [billions, half, four, adapter] == [f.format(n) for f, n in zip(formats, numbers, strict=True)]
