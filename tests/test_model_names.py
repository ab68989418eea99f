"""No page, message or example names a model that its provider has retired or is about to."""

import re

import pytest
from doc_blocks import PAGES, ROOT

RETIRING = re.compile(
    r"(?<![\w.-])(?:gpt-3\.5|gpt-4|gpt-5(?!\.[4-9])|gpt-5\.4-nano|o[134](?:-mini|-pro|-preview)?(?![\w.-])"
    r"|claude-(?:[123]|instant|(?:opus|sonnet|haiku)-(?:3|4(?!-[6-9])))|gemini-(?:1|2\.0))[\w.-]*"
)
"""OpenAI ends gpt-3.5, gpt-4, o1 and o4-mini in October 2026, gpt-5 and o3 in December, gpt-4o and gpt-4.1 in January 2027,
gpt-5.1 and gpt-5.4-nano in April. Anthropic ends Claude Sonnet 4.5 in November 2026, and those before it earlier."""
RECORDS = {"CHANGELOG.md", "docs/benchmarks.md"}
"""What was, and what was measured with it."""
SOURCES = (
    "art_core/**/*.py",
    "plugins/*/art_*/**/*.py",
    "integrations/*/art_*/**/*.py",
    "examples/**/*.py",
    "examples/*.ipynb",
)


def test_no_page_message_or_example_names_a_model_that_is_about_to_end():
    files = {*PAGES, *(path for pattern in SOURCES for path in ROOT.glob(pattern))}
    names = {str(path.relative_to(ROOT)): path for path in files if "node_modules" not in path.parts}
    found = {name: RETIRING.findall(path.read_text()) for name, path in names.items() if name not in RECORDS}
    assert {name: models for name, models in found.items() if models} == {}


@pytest.mark.parametrize(
    "name", ["openai/gpt-4.1-mini", "openai:gpt-4o", "openai/o3", "gpt-5", "claude-sonnet-4-5-20250929"]
)
def test_a_retiring_model_is_found(name):
    assert RETIRING.search(f'judge = "{name}"')


@pytest.mark.parametrize(
    "name", ["gpt-6-luna", "gpt-6.1-terra", "claude-sonnet-5-5", "olmo3", "GPT-2", "gpt-5.6-sol", "foo-o3"]
)
def test_other_names_are_left_alone(name):
    assert not RETIRING.search(f'model = "{name}"')
