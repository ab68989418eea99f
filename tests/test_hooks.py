"""Every hook is documented and tested, and so are the extension points that take an argument instead."""

import inspect
import re
from pathlib import Path

import pytest

from art_cli.catalogue import WITHOUT_PLUGIN
from art_core import hookspecs
from art_core.testing.conformance import KINDS

ROOT = Path(__file__).parent.parent
HOOKS = sorted(
    name for name, thing in vars(hookspecs).items() if inspect.isfunction(thing) and hasattr(thing, "art_spec")
)


def test_there_are_hooks():
    assert "adapt_agent" in HOOKS and len(HOOKS) == 12


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_when_it_is_called_and_what_its_answer_means(hook):
    text = " ".join(inspect.getdoc(getattr(hookspecs, hook)).split())
    assert re.search(r"[Cc]alled", text), "when, by whom, with what"
    assert "None" in text or "return value is ignored" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_heading_with_its_signature_in_the_docs(hook):
    names = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"## `{hook}({names})`" in (ROOT / "docs" / "extending.md").read_text()


def test_the_docs_say_how_to_begin_and_how_to_test_and_name_every_known_framework():
    text = (ROOT / "docs" / "extending.md").read_text()
    assert "## Start: `art new-plugin`" in text and "## Test it: `check_adapter`" in text
    for framework, model in WITHOUT_PLUGIN.items():
        assert f"| {framework} | `{model}` |" in text
    for kind in KINDS:
        assert f"`{kind}`" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_test(hook):
    tests = [*(ROOT / "tests").glob("test_*.py"), *ROOT.glob("*/*/tests/test_*.py")]
    assert any(hook in path.read_text() for path in tests if path.name != "test_hooks.py")
