"""What a plugin does to a client library when an agent imports it, and that nothing is imported before."""

import importlib
import subprocess
import sys

import pytest

from art_core import when_imported
from art_core.plugins import Plugins


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a package that nobody has imported yet."""
    package = tmp_path / "client_library_of_a_test"
    package.mkdir()
    code = "from importlib.resources import files\ntext = files(__name__).joinpath('text').read_text()\nkind = dict\n"
    (package / "__init__.py").write_text(code)
    (package / "text").write_text("its own file")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    sys.modules.pop(package.name, None)


def test_an_action_waits_for_the_import_and_is_done_once(library):
    done = []
    when_imported(library.name, done.append)
    assert not done and library.name not in sys.modules
    module = importlib.import_module(library.name)
    importlib.import_module(library.name)
    assert done == [module]


def test_whoever_imports_a_name_gets_it_with_the_action_done(library):
    when_imported(library.name, lambda module: setattr(module, "kind", list))
    names = {}
    exec(f"from {library.name} import kind", names)
    assert names["kind"] is list


def test_an_imported_module_is_acted_on_at_once(library):
    module, done = importlib.import_module(library.name), []
    when_imported(library.name, done.append)
    assert done == [module]


def test_a_module_reads_its_own_files_and_keeps_its_loader(library):
    plain = type(importlib.import_module(library.name).__spec__.loader)
    del sys.modules[library.name]
    when_imported(library.name, lambda module: None)
    module = importlib.import_module(library.name)
    assert module.text == "its own file"
    assert type(module.__loader__) is type(module.__spec__.loader) is plain


def test_an_import_that_fails_is_acted_on_when_it_succeeds(library):
    done, code = [], (library / "__init__.py").read_text()
    when_imported(library.name, done.append)
    (library / "__init__.py").write_text("raise ImportError('half installed')")
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module(library.name)
    (library / "__init__.py").write_text(code)
    importlib.invalidate_caches()
    assert done == []
    assert importlib.import_module(library.name) and len(done) == 1


def test_a_module_that_is_missing_stays_missing():
    when_imported("no_such_client_library", print)
    with pytest.raises(ModuleNotFoundError, match="no_such_client_library"):
        importlib.import_module("no_such_client_library")


REDIRECT = """
import sys
from art_core.plugins import Plugins
Plugins().call("redirect_clients")
libraries = ("openai", "agents", "langchain_core", "langgraph", "pydantic_ai", "torch", "transformers", "httpx")
print([name for name in libraries if name in sys.modules])
import agents, openai, pydantic_ai.models.test
from langchain_core.language_models import BaseChatModel, BaseLLM
from langgraph.pregel import Pregel
asks = [openai.OpenAI.request, openai.AsyncOpenAI.request, BaseChatModel.generate, BaseLLM.agenerate, Pregel.astream,
        agents.OpenAIChatCompletionsModel.get_response, pydantic_ai.models.test.TestModel.request]
print([ask.__qualname__ for ask in asks if not hasattr(ask, "__wrapped__")])
"""


@pytest.mark.system
def test_redirecting_imports_no_client_library_and_wraps_those_that_are_imported_later():
    names = {it.distribution for it in Plugins().installed()}
    if missing := {"art-openai", "art-langchain", "art-langgraph", "art-pydantic-ai"} - names:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    told = subprocess.check_output([sys.executable, "-c", REDIRECT], text=True)
    assert told.splitlines() == ["[]", "[]"]
