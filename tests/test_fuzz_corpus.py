"""What fuzzing found stays fixed: every kept input of every target holds, without the fuzzer; with it a short search follows."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.__main__ import main
from fuzz.corpus import FOLDER, TARGETS, entries, target

ROOT = Path(__file__).parent.parent
MOST, LONGEST = 200, 2048
"""Inputs of a target, and bytes of one."""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Targets make templates' time short and logs silent, in this test alone."""
    import logging

    import art_embedded.chat

    monkeypatch.setattr(art_embedded.chat, "RENDER_SECONDS", art_embedded.chat.RENDER_SECONDS)
    levels = {name: logging.getLogger(name).level for name in ("art_core", "art_server")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


# A template that is interrupted in a destructor goes on, and is interrupted once more.
interrupts = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@interrupts
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_that_was_kept_holds(name):
    kept, one_input = entries(name), target(name).one_input
    assert len(kept) > len(target(name).SEEDS), "fuzzing has kept something"
    for entry in kept:
        one_input(entry.data)


@interrupts
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=400))
def test_any_bytes_hold(name, data):
    """Where there is no fuzzer this is what is searched."""
    target(name).one_input(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_corpus_is_small_and_says_what_went_wrong(name):
    kept = entries(name)
    assert len(kept) <= MOST + len(target(name).SEEDS) and all(len(it.data) <= LONGEST for it in kept)
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    assert all(json.loads(line).keys() <= {"data", "found"} for line in lines)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_search_finds_nothing(name, monkeypatch):
    if importlib.util.find_spec("atheris") is None:
        assert sys.platform != "linux", "atheris is missing: make test-long installs it"
        pytest.skip(
            "atheris has no wheel for this system, so nothing is searched; the kept inputs were run by make test"
        )
    monkeypatch.chdir(ROOT / "tests")
    monkeypatch.setattr(sys, "argv", ["fuzz", name, "--seconds", os.environ.get("FUZZ_SECONDS", "2")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
