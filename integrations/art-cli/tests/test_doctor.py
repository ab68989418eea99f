"""What `art doctor` says first, and what last."""

import io

import pytest
from rich.console import Console

from art_cli.doctor import MISSING, Finding, report, verdict

GPU = Finding("GPU", "NVIDIA H200, 130.0 of 139.0 GiB free")
NO_GPU = Finding("GPU", "not usable", "torch is a CPU build")
LIBRARIES = [Finding(part, "1.0") for part in ("torch", "transformers", "safetensors", "peft")]


def shown(findings, variables=()):
    console = Console(file=io.StringIO(), width=200, markup=False)
    works = report(findings, list(variables), console)
    return works, console.file.getvalue()


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ([*LIBRARIES, GPU], "art can train here, on NVIDIA H200, 130.0 of 139.0 GiB free"),
        ([*LIBRARIES, NO_GPU], "art can train small models here, on the CPU; no GPU is usable"),
        ([Finding("torch", MISSING, "needed"), *LIBRARIES[1:]], "but not train: torch missing"),
        (
            [Finding("python", "3.10.1", "art_core needs Python 3.11 or newer", broken=True)],
            "art can't work here: art_core needs",
        ),
    ],
)
def test_the_first_line_says_what_can_be_done_here(findings, said):
    assert said in verdict(findings)
    assert shown(findings)[1].startswith(verdict(findings))


def test_what_is_missing_comes_before_what_is_in_order():
    _, said = shown(
        [
            *LIBRARIES,
            NO_GPU,
            Finding("plugin openai", "art-openai 0.1.0"),
            Finding("plugin for agno", MISSING, "pip it"),
        ]
    )
    assert (
        said.index("torch is a CPU build") < said.index("pip it") < said.index("in order: torch 1.0, transformers 1.0")
    )
    assert "plugins: openai" in said


def test_a_variable_is_listed_for_what_is_wrong_with_it_and_else_by_name():
    variables = [
        Finding("A", "set", "a"),
        Finding("B", "not set", "b"),
        Finding("C", "refused", "because it cannot be tested"),
    ]
    works, said = shown([*LIBRARIES, GPU], variables)
    assert works and "because it cannot be tested" in said
    assert "variables that are set: A" in said and "what they do): B" in said


def test_only_what_art_cannot_work_without_is_a_failure():
    assert shown([*LIBRARIES, NO_GPU])[0]
    assert not shown([Finding("python", "3.10.1", "too old", broken=True)])[0]
