"""The pages of this repository and the code blocks in them.

``<!-- not run: REASON -->`` or ``<!-- tests/FILE.py runs this -->`` above a block says why ``tests/test_docs.py`` leaves it.
Where a test ``runs these``, it runs all blocks from there to the end of the page.
``<!-- given: CODE -->`` is Python that a page leaves out: it is run where it stands, and no reader sees it.
``<!-- engines: REASON -->`` anywhere in a page lets make test-engines run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "integrations/art-embedded/tiny/*.md",
        "examples/**/*.md",
        "plugins/*/*.md",
        "integrations/*/*.md",
    )
    for path in ROOT.glob(pattern)
    if not {"node_modules", ".pytest_cache"} & set(path.parts)
)
RUN_BY = re.compile(r"(\S+\.py) runs (this|these|this page)")
COMMENT = re.compile(r"\s*<!--\s*(.*?)\s*-->\s*", flags=re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    """Empty where none is named."""
    code: str
    mark: str = ""
    """The comment above it."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why ``tests/test_docs.py`` does not run it; empty where it does."""
        found = re.fullmatch(r"not run: (.+)", self.mark, flags=re.DOTALL)
        return found[1] if found else self.run_by

    @property
    def run_by(self) -> str:
        """The test that runs it; empty where none is named."""
        found = RUN_BY.fullmatch(self.mark)
        return found[1] if found else ""


def inline_of(page: Path) -> list[str]:
    """Return the code that stands within the page's text and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [it.content for token in tokens for it in token.children or () if it.type == "code_inline"]


def blocks_of(page: Path) -> list[Block]:
    """Return the page's blocks in order, those that are given included."""
    found, mark, of_all = [], "", ""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        comment = COMMENT.fullmatch(token.content) if token.type == "html_block" else None
        if comment and (given := re.fullmatch(r"given:\s*(.*)", comment[1], flags=re.DOTALL)):
            found.append(Block(page, token.map[0] + 1, "python", given[1]))
        elif token.type in {"fence", "code_block"}:
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, mark or of_all))
        mark = comment[1] if comment else ""
        if (by := RUN_BY.fullmatch(mark)) and by[2] != "this":
            of_all = mark
    return found
