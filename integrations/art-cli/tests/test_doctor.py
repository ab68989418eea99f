"""What `art doctor` says first, and what last, and what it says about an agent."""

import io
import textwrap

import pytest
from rich.console import Console
from typer.testing import CliRunner

from art_cli.doctor import MISSING, Finding, report, verdict
from art_cli.main import app

GPU = Finding("GPU", "NVIDIA H200, 130.0 of 139.0 GiB free")
NO_GPU = Finding("GPU", "not usable", "torch is a CPU build")
LIBRARIES = [Finding(part, "1.0") for part in ("torch", "transformers", "safetensors", "peft")]

AGENT = """
    from pathlib import Path

    import httpx

    TOOL = {"name": "delete_order", "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}}}
    CHOICE = {"type": "function", "function": {"name": "delete_order"}}


    def asked(address, task, **more):
        body = {"model": "m", "messages": [{"role": "user", "content": task}], "max_tokens": 8, **more}
        answer = httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False)
        return answer.raise_for_status().json()["choices"][0]["message"]


    def with_a_tool(task, address, **more):
        message = asked(address, task, tools=[{"type": "function", "function": TOOL}], **more)
        for call in message.get("tool_calls") or ():
            Path("deleted").write_text(call["function"]["arguments"])
        return message


    def forced(task, address):
        [call] = with_a_tool(task, address, tool_choice=CHOICE)["tool_calls"]
        return call["function"]["name"]


    def of_dicts(task, address):
        return asked(address, task["question"])


    def without_tools(task, address):
        return asked(address, task)["content"]
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(textwrap.dedent(AGENT))
    return lambda name, *more: CliRunner().invoke(app, ["doctor", "--agent", f"app.py:{name}", *more])


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


NOT_CALLED = "tools were not called (delete_order)"
CALLING = "; --tools calls each once, for real, with made-up arguments"


def test_looking_where_an_agents_calls_go_runs_none_of_its_tools(doctor, tmp_path):
    done = doctor("with_a_tool")
    assert done.exit_code == 0 and "the policy" in done.output, done.output
    assert NOT_CALLED + CALLING in done.output.splitlines() and not (tmp_path / "deleted").exists()


def test_the_option_tools_runs_each_tool_once(doctor, tmp_path):
    done = doctor("with_a_tool", "--tools")
    assert done.exit_code == 0 and "not called" not in done.output, done.output
    assert (tmp_path / "deleted").read_text() == '{"order_id": "no task"}'


def test_an_agent_that_needs_a_call_of_a_tool_is_seen_with_the_option_tools(doctor, tmp_path):
    done = doctor("forced")
    assert done.exit_code == 1 and "the agent failed: " in done.output, done.output
    assert (
        f"{NOT_CALLED}, and the agent may have failed for that{CALLING}" in done.output.splitlines()
        and not (tmp_path / "deleted").exists()
    )
    assert doctor("forced", "--tools").exit_code == 0


def test_an_agent_that_fails_is_named_with_its_line_and_its_task(doctor):
    done = doctor("of_dicts")
    assert "the agent failed: TypeError: " in done.output and "app.py:29 in of_dicts)" in done.output, done.output
    assert "its task was 'Say hello.'; --task passes another, as text or JSON" in done.output
    assert doctor("of_dicts", "--task", '{"question": "one"}').exit_code == 0


def test_nothing_is_said_about_tools_where_there_are_none(doctor):
    done = doctor("without_tools")
    assert done.exit_code == 0 and "tool" not in done.output, done.output
