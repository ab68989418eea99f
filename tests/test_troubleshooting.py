"""Every message that docs/troubleshooting.md explains is one that the code says."""

import ast
import re
from functools import cache

import pytest
from doc_blocks import ROOT

HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)
LEFT_OUT = "\0"


@cache
def texts():
    """Every text in the code, with a mark where it is filled in."""
    found = []
    for side in ("art_core", "plugins", "integrations"):
        for path in (ROOT / side).rglob("*.py"):
            if "tests" not in path.parts:
                found += [flat(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr)]
    return [re.sub(r"\{[^{}]*\}", LEFT_OUT, text) for text in found if text]


def flat(node):
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(it.value if isinstance(it, ast.Constant) else LEFT_OUT for it in parts)
    return ""


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_that_is_explained_is_said_by_the_code(heading):
    parts = [part.strip() for part in heading.split("...") if part.strip(" ;.,")]
    # What is filled in may be nothing, and an ellipsis may be the code's own.
    pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.DOTALL)
    assert any(pattern.search(text) for text in texts()), f"nobody says {heading!r}"


def test_there_are_messages():
    assert len(HEADINGS) > 30
