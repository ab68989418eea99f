"""``art optimize``, from files."""

import json

import pytest
from typer.testing import CliRunner

from art_cli import main
from art_cli.arguments import with_prompts
from art_core.errors import ConfigError
from art_gepa.command import _is_function

APP = """
from openai import AsyncOpenAI

def agent():
    async def ask(task):
        async with AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused") as client:
            messages = [{"role": "system", "content": "Say the word of the user again."}, {"role": "user", "content": task}]
            reply = await client.chat.completions.create(model="m", messages=messages, max_completion_tokens=4)
            return len(reply.choices[0].message.content)
    return ask

def reward(trajectory):
    return float("loudly" in trajectory.calls[0].request["messages"][0]["content"])

def reflector(prompt):
    return "```\\nSay the word of the user loudly.\\n```"
"""


@pytest.mark.system
def test_the_command_prints_the_patch_and_where_the_texts_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "optimized_app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(f"word {number}") + "\n" for number in range(6)))
    arguments = (
        "optimized_app.py:agent tasks.jsonl --reward optimized_app.py:reward --model tiny "
        "--reflector optimized_app.py:reflector"
    )
    ended = CliRunner().invoke(
        main.command(),
        ["optimize", *arguments.split(), "--rollouts", "40", "--held-out", "tasks.jsonl", "--run-dir", "found"],
    )
    assert ended.exit_code == 0, ended.output
    assert "-Say the word of the user again.\n+Say the word of the user loudly." in ended.stdout
    assert "0.000 -> 1.000 on the validation tasks" in ended.stdout and "1 reflection, $0.00" in ended.stdout
    assert "held out: " in ended.stdout and "the new texts are in found/prompts.json" in ended.stdout

    same = [
        "optimized_app.py:agent",
        "tasks.jsonl",
        "--reward",
        "optimized_app.py:reward",
        "--prompts",
        "found/prompts.json",
    ]
    evaluated = CliRunner().invoke(main.command(), ["eval", *same, "--run-dir", "evaluated"])
    assert json.loads(evaluated.stdout)["success"] == 1.0
    trained = CliRunner().invoke(main.command(), ["train", *same, "--dry-run", "--run-dir", "trained"])
    assert trained.exit_code == 0 and "rewards: [1.0, 1.0" in trained.output


def test_prompts_of_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file: .*none.json; pass the prompts.json of an `art optimize` run"):
        with_prompts(str(tmp_path / "none.json"))


def test_a_model_with_a_colon_in_its_name_is_no_function():
    assert not _is_function("ollama/qwen3:8b") and not _is_function("openai/gpt-6-luna")
    assert _is_function("package.module:reflect") and _is_function("examples/reflect.py:reflect")
