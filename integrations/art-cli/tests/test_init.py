"""``art init`` finds the agent in a repository, and what it writes trains it."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import doc_shell
import pytest
from doc_blocks import ROOT

from art_cli.find_agents import find_agents
from art_cli.init import FILES, write_starter
from art_core.errors import ConfigError

FUNCTION = """
    from openai import OpenAI

    client = OpenAI()


    def ask(messages):
        return client.chat.completions.create(model="m", messages=messages, max_tokens=8).choices[0].message.content


    def answer(question):
        return ask([{"role": "user", "content": question}])
"""
GRAPH = """
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI


    def build_agent():
        model = ChatOpenAI(model="gpt-6-luna", api_key="unused", max_tokens=8)
        return create_agent(model, tools=[])
"""


def repository(folder: Path, **files: str) -> Path:
    """Write files, named with __ for a slash and without .py, and return the folder."""
    for name, code in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    return folder


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (FUNCTION, ["app.py:answer"]),
        (GRAPH, ["app.py:build_agent"]),
        ("from langgraph.graph import StateGraph\ng = StateGraph(dict)\ngraph = g.compile()", ["app.py:graph"]),
        (
            "from agents import Agent\nbilling = Agent(name='b')\ntriage: Agent = Agent(name='t', handoffs=[billing])",
            ["app.py:triage"],
        ),
        (
            "from langgraph.graph import StateGraph\nimport re\nWORD = re.compile('w')\ninner = StateGraph(dict).compile()\n"
            "outer = StateGraph(dict)\nouter.add_node('inner', inner)\ngraph = outer.compile(name='g')\nprint(graph.invoke({}))",
            ["app.py:graph"],
        ),
        (
            "from agents import Agent, Runner\nagent = Agent[dict](name='a')\nprint(agent)\nRunner.run_sync(agent, 'hi')",
            ["app.py:agent"],
        ),
        (f"{FUNCTION}\n    def main():\n        print(answer(input()))", ["app.py:answer"]),
        (f"{FUNCTION}\n    def handler(request):\n        return answer(request)", ["app.py:answer"]),
        ("import subprocess\nimport openai\ndef sh(command):\n    return subprocess.run(command)", []),
        (
            "import openai\ndef build(*, model):\n    def agent(task):\n        return openai.chat(task)\n    return agent",
            [],
        ),
        ("x = " + "+".join(["1"] * 20000), []),
        ("import pydantic_ai as p\nhelper = p.Agent('openai:gpt-6-luna')", ["app.py:helper"]),
        (
            "from crewai import Agent, Crew\nwriter = Agent(role='w')\ncrew = Crew(agents=[writer])",
            ["app.py:crew"],
        ),
        ("import dspy\nqa = dspy.ChainOfThought('question -> answer')", ["app.py:qa"]),
        ("from claude_agent_sdk import ClaudeAgentOptions\noptions = ClaudeAgentOptions()", ["app.py:options"]),
        (
            "from anthropic import Anthropic\ndef make():\n    def agent(task):\n"
            "        return Anthropic().messages.create(model='m')\n    return agent",
            ["app.py:make"],
        ),
        ("from litellm import completion\nasync def agent(task, address):\n    return completion(model='m')", []),
        (
            "from litellm import completion\ndef agent(task, size=1):\n    return completion(model='m')",
            ["app.py:agent"],
        ),
        ("from openai import OpenAI\ndef node(state):\n    return OpenAI().responses.create(model='m')", []),
        ("def agent(task):\n    return client.create()", []),
        ("def broken(:", []),
    ],
)
def test_an_agent_is_found_by_its_framework_or_by_the_client_that_it_calls(tmp_path, code, found):
    assert [str(it) for it in find_agents(repository(tmp_path, app=code))] == found


def test_a_function_is_an_agent_only_where_no_framework_makes_one(tmp_path):
    repository(tmp_path, tools=FUNCTION, deep__er__app="from agents import Agent\nhelper = Agent(name='h')")
    assert [str(it) for it in find_agents(tmp_path)] == ["deep/er/app.py:helper"]


def test_the_graphs_of_langgraphs_own_configuration_are_the_agents(tmp_path):
    repository(tmp_path, src__shop__graph=GRAPH, other=GRAPH)
    path = "./src/shop/graph.py:build_agent"
    for graph in (path, {"path": path}):
        (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"shop": graph, "js": "./a.ts:graph"}}))
        assert [str(it) for it in find_agents(tmp_path)] == ["src/shop/graph.py:build_agent"]
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "sales.py").write_text("class SalesAgent: ...")
    repository(tmp_path, own="from agents.sales import SalesAgent\nagent = SalesAgent()")  # not the OpenAI Agents SDK's
    (tmp_path / "langgraph.json").write_text('{"graphs": {"a": {"path": null}}}')
    assert len(find_agents(tmp_path)) == 2


def test_environments_hidden_folders_and_tests_are_not_searched(tmp_path):
    hidden = {name: FUNCTION for name in (".git__app", "env__lib__app", "tests__app", "node_modules__app", "test_app")}
    repository(tmp_path, **hidden, src__shop__app=FUNCTION)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert [str(it) for it in find_agents(tmp_path)] == ["src/shop/app.py:answer"]


def test_without_an_agent_and_with_several_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"no agent was found .*art init FILE\.py:NAME"):
        write_starter(None, tmp_path)
    repository(tmp_path, one=GRAPH, two=GRAPH)
    with pytest.raises(
        ConfigError, match=r"2 agents were found(.|\n)*art init two\.py:build_agent +# line 6: langchain"
    ):
        write_starter(None, tmp_path)
    for wrong in ("three.py:agent", "one.py:", "one.py", "README.md:agent"):
        with pytest.raises(ConfigError, match=f"'{wrong}' does not name an agent"):
            write_starter(wrong, tmp_path)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["one.py", "two.py"]


def test_an_agent_whose_file_is_no_module_is_refused(tmp_path):
    repository(tmp_path, **{"my-app": FUNCTION})
    with pytest.raises(ConfigError, match=r"my-app\.py cannot be imported"):
        write_starter(None, tmp_path)


def test_existing_files_are_kept_and_anothers_train_py_is_refused(tmp_path):
    repository(tmp_path, app=FUNCTION)
    (tmp_path / "tasks.jsonl").write_text("mine")
    first = write_starter(None, tmp_path)
    assert first.kept == ["tasks.jsonl"] and (tmp_path / "tasks.jsonl").read_text() == "mine"
    assert set(first.written) == FILES.keys() - {"tasks.jsonl", "held_out.jsonl"}, "examples beside one's own tasks"
    assert "no held_out.jsonl: move some tasks of tasks.jsonl there" in first.next_steps()
    assert write_starter(None, tmp_path).written == []
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(ConfigError, match="doesn't use art; nothing was written"):
        write_starter(None, tmp_path)


def test_the_skill_is_one_that_coding_agents_load_and_its_commands_exist(tmp_path):
    repository(tmp_path, app=FUNCTION)
    write_starter(None, tmp_path)
    skill = tmp_path / ".agents" / "skills" / "train-agent" / "SKILL.md"
    text = skill.read_text()
    assert text == (tmp_path / ".claude" / "skills" / "train-agent" / "SKILL.md").read_text()
    # As agentskills.io has it: the name is the folder's, the description has at most 1,024 characters.
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.*)\n---\n", text)
    assert head[1] == skill.parent.name and len(head[2]) <= 1024
    commands = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(commands) == 4
    page = ROOT / "README.md"
    for code in commands:
        mine = "\n".join(line for line in code.splitlines() if not line.startswith("python train.py"))
        assert not list(doc_shell.check(mine, page))


@pytest.mark.system
@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("src__shop__answers", f"    from shop.words import WORDS{FUNCTION}"),
        ("backend__graph", f"    from words import WORDS{GRAPH}"),
        ("backend__app__agent", f"    from app.words import WORDS\n    from .words import WORDS{FUNCTION}"),
    ],
)
def test_a_dry_run_of_what_is_written_rolls_out_the_agent_as_it_is(tmp_path, where, code):
    repository(tmp_path, **{where: code, f"{where.rpartition('__')[0]}__words": "WORDS = 1"})
    if "from ." in code:
        (tmp_path / "backend" / "app" / "__init__.py").touch()
    starter = write_starter(None, tmp_path)
    ast.parse((tmp_path / "train.py").read_text())
    env = {**os.environ, "OPENAI_API_KEY": ""}  # as in a copied .env.example
    command = [sys.executable, "train.py", "--dry-run", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "dry run: one group\ncalls: 8\n" in done.stderr and "errors: []" in done.stderr
    assert f"art doctor --agent {starter.agent} --task INPUT" in starter.next_steps()
    found = "import sys; from art_cli.arguments import load_agent; print(load_agent(sys.argv[1]))"
    loaded = subprocess.run(
        [sys.executable, "-c", found, str(starter.agent)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert starter.agent.name in loaded.stdout, loaded.stderr


@pytest.mark.system
@pytest.mark.parametrize(
    ("repo", "file", "packages", "imports"),
    [
        ("my-shop", "app/agent.py", ["app"], "from app.words import WORDS"),
        ("my-shop", "my backend/app/agent.py", ["my backend/app"], "from app.words import WORDS"),
        ("my-shop", "backend/app/api/agent.py", ["backend/app", "backend/app/api"], "from app.api.words import WORDS"),
        ("my-shop", "backend/app/__init__.py", ["backend/app"], "from app.words import WORDS"),
        ("my-shop", "services/shop/src/shop/agent.py", [], "from shop.words import WORDS"),
        ("my-shop", "src/shop/agent.py", ["src", "src/shop"], "from ..shop.words import WORDS"),
        ("my-shop", "agent.py", ["."], "from words import WORDS"),
        ("shop", "agent.py", ["."], "from shop.words import WORDS"),
    ],
)
def test_what_is_written_imports_the_agent_as_its_own_code_does(tmp_path, repo, file, packages, imports):
    folder = tmp_path / repo
    folder.mkdir()
    for package in packages:
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").touch()
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("words.py").write_text("WORDS = 1")
    path.write_text(f"{imports}\ndef agent(task): ...")
    write_starter(f"{file}:agent", folder)
    done = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (folder / "train.py").read_text() + done.stderr
    assert "function agent" in loaded(folder, f"{file}:agent")


def loaded(folder, where):
    """Return what ``where`` names, as a process in that folder prints it."""
    code = f"from art_cli.arguments import load_agent; print(load_agent({where!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
@pytest.mark.parametrize("package", [True, False])
def test_an_agents_file_may_import_its_package_by_its_name(tmp_path, package):
    agent = ["from shop.words import WORDS", "def agent(task): ..."]
    if package:
        agent.insert(0, "from .words import WORDS as THE_SAME")
    repository(tmp_path, src__shop__words="WORDS = 1", src__shop__app="\n".join(agent))
    if package:
        (tmp_path / "src" / "shop" / "__init__.py").touch()
    assert "function agent" in loaded(tmp_path, "src/shop/app.py:agent")


@pytest.mark.system
def test_files_of_the_same_name_in_two_working_directories_are_two_agents(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "app.py").write_text(f"def agent(task): return {folder!r}")
    code = """
import os
from art_cli.arguments import load_agent
first = load_agent("app.py:agent")
os.chdir("../other")
other = load_agent("app.py:agent")
os.chdir("../one")
print(first(""), other(""), load_agent("app.py:agent") is first)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "one", capture_output=True, text=True, check=False
    )
    assert done.stdout == "one other True\n", done.stderr
