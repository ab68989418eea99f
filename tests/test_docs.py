"""What the pages show is true: their Python runs, their commands exist, their data can be read."""

import ast
import asyncio
import inspect
import io
import json
import os
import tomllib

import doc_shell
import pytest
import yaml
from doc_blocks import PAGES, ROOT, Block, blocks_of, inline_of
from doc_python import Names
from dotenv.parser import parse_stream

import art_core as art

BLOCKS = {str(page.relative_to(ROOT)): blocks for page in PAGES if (blocks := blocks_of(page))}
SHOWN = {"text", "javascript", "powershell", "dockerfile", "html"}
"""Languages that nothing checks."""
COMMANDS = ("art ", "make ", "pip ", "python -m ", "git clone ")


def python_of(page: str) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == "python"]


def runs(page: str) -> bool:
    return any(not block.not_run for block in python_of(page))


def is_apart(page: str) -> bool:
    """Whether the page shows a framework that isn't installed here; test_frameworks_apart.py checks it where it is."""
    return (ROOT / page).parent.joinpath("apart").is_dir() and page != "plugins/art-langgraph/README.md"


def takes_long(page: str) -> bool:
    """Whether the page says so: ``<!-- engines: WHY -->`` anywhere in it."""
    return "<!-- engines: " in (ROOT / page).read_text()


@pytest.mark.parametrize("page", BLOCKS)
def test_every_block_names_its_language_and_can_be_read(page):
    for block in BLOCKS[page]:
        match block.language:
            case "python":
                compile(block.code, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "sh" | "bash":
                assert list(doc_shell.check(block.code, block.page)) == [], block.where
            case "json":
                json.loads(block.code)
            case "jsonl":
                [json.loads(line) for line in block.code.splitlines()]
            case "toml":
                tomllib.loads(block.code)
            case "yaml":
                yaml.safe_load(block.code)
            case "ini":
                assert not [it for it in parse_stream(io.StringIO(block.code)) if it.error], block.where
            case other:
                assert other in SHOWN, (
                    f"{block.where}: a block is fenced and names its language; {other!r} is not checked"
                )


def test_commands_within_the_text_of_pages_exist():
    found = [(page, code) for page in PAGES for code in inline_of(page) if code.startswith(COMMANDS)]
    assert len(found) > 150
    wrong = [f"{page.name}: {it}" for page, code in found for it in doc_shell.check_mentioned(code, page)]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in BLOCKS if python_of(page) and not is_apart(page)])
def test_imports_and_calls_of_python_blocks_fit_what_is_there(page):
    names = Names()
    wrong = [f"{block.where}: {it}" for block in python_of(page) for it in names.check(block.code)]
    assert wrong == []


@pytest.mark.parametrize("page", BLOCKS)
def test_a_block_that_is_not_run_says_why_or_who_runs_it(page):
    for block in BLOCKS[page]:
        assert not block.mark.startswith("not run") or block.not_run, block.where
        if block.run_by:
            assert block.page.name in (ROOT / block.run_by).read_text(), f"{block.run_by} does not read {block.where}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.engines] * takes_long(page)) for page in BLOCKS if runs(page)],
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    namespace = {"__name__": "page", "art": art, "os": os}
    with asyncio.Runner() as runner:
        for block in python_of(page):
            if not block.not_run:
                code = compile(block.code, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if code.co_flags & inspect.CO_COROUTINE:
                    runner.run(eval(code, namespace))
                else:
                    exec(code, namespace)
