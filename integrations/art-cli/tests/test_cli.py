"""The ``art`` command, end to end."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import doc_shell
import pytest

from art_cli.arguments import load_reward, load_tasks
from art_core import load_trajectories
from art_core.errors import ConfigError

AGENT = """
    from openai import OpenAI

    def build_agent():
        client = OpenAI(base_url="http://unused")

        def agent(task):
            reply = client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": task}], max_tokens=8
            )
            return reply.choices[0].message.content

        return agent

    def reward(trajectory):
        trajectory.notes["mine"] = "half of a pair: \\ud800"
        return sum(trajectory.calls[0].sampled_ids) % 5
"""


@pytest.fixture
def art(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "tasks.jsonl").write_text('"one"\n"two"\n')

    def run(*arguments):
        command = [sys.executable, "-m", "art_cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.smoke
@pytest.mark.system
def test_train_and_eval_an_agent_from_files(art, tmp_path):
    common = ["agent.py:build_agent", "tasks.jsonl", "--reward", "agent.py:reward"]
    trained = art(
        "train", *common, "--steps", "1", "--run-dir", "my run", "--eval-tasks", "tasks.jsonl", "--set", "group_size=2"
    )
    assert trained.returncode == 0, trained.stderr
    assert (
        "everything is in my run" in " ".join(trained.stdout.split())
        and (tmp_path / "my run" / "chart.png").stat().st_size > 0
    )
    assert "half of a pair: \\ud800" in trained.stdout
    assert "  # Train longer" in trained.stdout or "  # Read tasks that" in trained.stdout
    assert "next: art view 'my run' " in trained.stdout and "art audit 'my run' " in trained.stdout
    measured = art("eval", *common, "--model", "my run")
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    assert found["n"] == 2 and (tmp_path / found["run_dir"] / "run.sqlite").is_file()
    assert found["run_dir"].endswith("-eval-my run") and f"recorded in {found['run_dir']}" in measured.stderr
    assert f"art compare OTHER_RUN '{found['run_dir']}' " in measured.stderr


@pytest.mark.system
def test_a_file_may_name_a_reward_made_of_several(art, tmp_path):
    with (tmp_path / "agent.py").open("a") as file:
        file.write(
            "\nimport art_core\nboth = art_core.weighted(length=(0.5, reward), short=(2, lambda t: len(t.output) < 9))\n"
            "def shortened(output):\n    return 'a' if len(output) % 2 else ''\n"
        )
    common = ["agent.py:build_agent", "tasks.jsonl", "--steps", "1", "--set", "group_size=2", "--run-dir", "run"]
    trained = art("train", *common, "--reward", "agent.py:both", "--to-output", "agent.py:shortened")
    assert trained.returncode == 0, trained.stderr
    assert {t.output for t in load_trajectories(tmp_path / "run")} <= {"", "a"}, "of --to-output"
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["reward"] == pytest.approx(0.5 * line["reward/length"] + 2 * line["reward/short"])


@pytest.mark.system
def test_a_dry_run_prints_what_would_be_trained(art):
    done = art(
        "train", "agent.py:build_agent", "tasks.jsonl", "--reward", "agent.py:reward", "--dry-run", "--run-dir", "run"
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "calls: 8",
        "targets:",
        "tokens:",
        "learn_seconds_per_step:",
        "The group teaches",
        "20 steps like this: 1,280",
    ):
        assert word in done.stderr


@pytest.mark.system
def test_debug_prints_the_traceback_of_an_error_too(art):
    plain, debugged = (
        art("train", "nope.py:agent", "tasks.jsonl"),
        art("--debug", "train", "nope.py:agent", "tasks.jsonl"),
    )
    assert "Traceback" not in plain.stderr and "no such file: nope.py" in plain.stderr
    after = art("train", "nope.py:agent", "tasks.jsonl", "--debug")
    assert "Traceback" in after.stderr
    assert "Traceback" in debugged.stderr and debugged.stderr.endswith(plain.stderr.splitlines()[-1] + "\n")
    assert plain.returncode == debugged.returncode == 1


@pytest.mark.system
def test_errors_are_one_message_without_a_traceback(art, tmp_path):
    (tmp_path / "one.json").write_text('{"input": "one"}')
    (tmp_path / "broken.py").write_text("import os\nimport not_there_at_all\n")
    (tmp_path / "failing.py").write_text("def tasks():\n    return [1 / 0]\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "latin.jsonl").write_bytes('"one"\n"zwölf"\n'.encode("latin-1"))
    (tmp_path / ".agents").write_text("")
    for arguments, said in [
        (("train", "nope.py:agent", "tasks.jsonl"), "no such file: nope.py"),
        (("train", "broken.py:agent", "tasks.jsonl"), "'not_there_at_all' (broken.py, line 2); the option --debug"),
        (("train", "broken:agent", "tasks.jsonl"), "'not_there_at_all' (broken.py, line 2); the option --debug"),
        (("train", "leaving.py:agent", "tasks.jsonl"), "it calls sys.exit() (leaving.py, line 2)"),
        (("train", "nope:agent", "tasks.jsonl"), "No module named 'nope'; run art in a folder from which"),
        (
            ("train", "agent.py:build_agent", "failing.py:tasks"),
            "ZeroDivisionError: division by zero (failing.py, line 2)",
        ),
        (("train", "agent.py:nope", "tasks.jsonl"), "has no 'nope'"),
        (("train", "agent.py:biuld_agent", "tasks.jsonl"), "has no 'biuld_agent'; did you mean 'build_agent'"),
        (
            ("train", "agent.py:build_agent", "agent.py:reward"),
            "agent.py:reward must be a list of tasks, got function",
        ),
        (("train", "agent.py:build_agent", "one.json"), "one.json must be a list of tasks, got dict; pass a list"),
        (("train", "agent.py:build_agent", "nope.jsonl"), "no such task file: nope.jsonl"),
        (
            ("train", "agent.py:build_agent", "latin.jsonl"),
            "latin.jsonl, line 2: the byte 0xf6 is not UTF-8; save the file as UTF-8",
        ),
        (("init",), "NotADirectoryError: .agents/skills/train-agent: Not a directory; check"),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--set", "grup_size=2"), "did you mean 'group_size'"),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--set", "losss=dapo"), "did you mean 'loss'"),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--set", "reward=ruler"), "use --reward ruler"),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--set", "trackers=wandb"), "use --tracker wandb"),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--set", "to_output=a.py:f"), "use --to-output a.py:f"),
        (
            ("train", "agent.py:build_agent", "tasks.jsonl", "--set", "overlong=False"),
            "overlong must be None, 'train' or 'drop', got False",
        ),
        (("train", "agent.py:build_agent", "tasks.jsonl", "--model", "./x"), "no model folder ./x"),
    ]:
        done = art(*arguments)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.system
def test_an_error_of_the_system_that_names_no_file_keeps_its_traceback(tmp_path):
    code = """
from art_cli.main import app, main

@app.command()
def broken():
    raise OSError(5, "Input/output error")

main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "broken"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and "in broken" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.json"])
def test_tasks_may_begin_with_a_byte_order_mark_and_other_encodings_are_refused(tmp_path, name):
    file = tmp_path / name
    text = '["zwölf"]'
    file.write_text(text, encoding="utf-8-sig")
    assert load_tasks(str(file)) == (["zwölf"] if name.endswith(".json") else [["zwölf"]])
    file.write_text(text, encoding="utf-16")
    with pytest.raises(ConfigError, match=rf"{name}, line 1: the byte 0xff is not UTF-8; save the file as UTF-8"):
        load_tasks(str(file))


def test_a_task_file_of_another_form_is_refused_with_the_forms_that_are_read(tmp_path):
    file = tmp_path / "tasks.csv"
    file.write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"tasks.csv' does not name tasks; write FILE.jsonl \(a task per line\)"):
        load_tasks(str(file))


def test_what_is_not_json_is_named_by_its_line_and_column(tmp_path):
    lines, whole = tmp_path / "tasks.jsonl", tmp_path / "tasks.json"
    lines.write_text('{"input": 1}\n"a",\n')
    whole.write_text('["a"\n"b"]')
    for file, place in (
        (lines, "jsonl, line 2, column 4: not JSON: Extra data"),
        (whole, "json, line 2, column 1: not"),
    ):
        with pytest.raises(ConfigError, match=place):
            load_tasks(str(file))


def test_a_reward_file_without_a_name_is_refused_with_the_form_to_write():
    with pytest.raises(ConfigError, match=r"'agent.py' does not name a reward; write agent.py:NAME"):
        load_reward("agent.py")


@pytest.mark.system
def test_doctor_and_plugins_tell_what_is_installed_and_which_variables_are_set(art, tmp_path):
    (tmp_path / ".env").write_text("WANDB_API_KEY=not-to-be-shown\n")
    doctor, plugins = art("doctor"), art("plugins")
    assert doctor.returncode == plugins.returncode == 0, doctor.stderr + plugins.stderr
    assert ", langgraph," in doctor.stdout and "art-langgraph" in plugins.stdout
    assert "GPU" in doctor.stdout and "WANDB_API_KEY" in doctor.stdout
    assert "not-to-be-shown" not in doctor.stdout + doctor.stderr


@pytest.mark.system
def test_new_plugin_writes_a_folder_and_says_what_to_do_next(art, tmp_path):
    done = art("new-plugin", "my-thing", "--kind", "reward", "--dir", "made")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "art-my-thing" / "art_my_thing.py").exists()
    for said in ("pip install -e", "python -m pytest", "art plugins", "docs/extending.md"):
        assert said in done.stdout
    again = art("new-plugin", "my-thing", "--dir", "made")
    assert again.returncode == 1 and "nothing in it was changed" in again.stderr


@pytest.mark.parametrize("command", sorted(doc_shell.art().commands))
def test_every_command_has_help_with_examples_that_it_takes(command):
    found = doc_shell.art().commands[command]
    examples = re.findall("`(art .+?)`", found.epilog)
    assert found.epilog.startswith("Example") and examples
    assert [wrong for example in examples for wrong in doc_shell.check(example, Path(__file__))] == []
