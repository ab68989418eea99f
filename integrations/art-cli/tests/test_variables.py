""".env and the environment variables of the classic programs."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from art_cli import doctor
from art_cli.main import app
from art_cli.variables import CHECKED, load_env_file, warn_refused
from art_core.errors import ConfigError
from art_core.plugins import Plugins

NAMES = [variable.name for variable in CHECKED]
SECRET = "not-to-be-shown-7312"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder; what is put into the environment is taken out of it again."""
    for name in [*NAMES, "QUOTED", "LATER"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def art(command):
    command = [sys.executable, "-m", "art_cli", command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_as_shells_and_windows_write_it_is_read_and_the_environment_beats_it(folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "the environment's")
    lines = [
        "# Model settings",
        "export OPENAI_API_KEY=one # mine",
        "QUOTED='two # words'",
        "WANDB_API_KEY=file",
        "",
        "SECRET='pa${QUOTED}x'",
    ]
    (folder / ".env").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    load_env_file()
    assert [os.environ[name] for name in ("OPENAI_API_KEY", "QUOTED", "WANDB_API_KEY")] == [
        "one",
        "two # words",
        "the environment's",
    ]
    assert os.environ["SECRET"] == "pa${QUOTED}x", "a value is what stands there"


def test_a_folder_of_that_name_is_left_alone(folder):
    (folder / ".env").mkdir()
    load_env_file()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f'GOOD=1\nOPENAI_API_KEY="{SECRET}\n'.encode(), r"\.env, line 2: not a NAME=VALUE line"),
        (f"GOOD=1\n{SECRET} and so on\n".encode(), r"\.env, line 2: not a NAME=VALUE line"),
        (f"GOOD=1\n\n{SECRET}\n".encode(), r"\.env, line 3: not a NAME=VALUE line"),
        (b"export GOOD\n", r"\.env, line 1: not a NAME=VALUE line"),
        (f"OPENAI_API_KEY={SECRET}".encode("utf-16"), r"\.env cannot be read: it is not UTF-8"),
        (f"OPENAI_API_KEY={SECRET}\0\n".encode(), r"\.env: not a NAME=VALUE line"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_showing_it(folder, content, said):
    (folder / ".env").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        load_env_file()
    assert SECRET not in str(refused.value) and "OPENAI_API_KEY" not in os.environ


@pytest.mark.system
def test_every_command_reads_it_before_the_plugins(folder):
    (folder / ".env").write_text("ART_DISABLE_PLUGINS=ruler\n")
    assert "art-ruler" not in art("plugins").stdout
    (folder / ".env").write_text(f'ART_DISABLE_PLUGINS="{SECRET}\n')
    for command in ("plugins", "doctor"):
        done = art(command)
        assert done.returncode == 1 and ".env, line 1" in done.stderr and SECRET not in done.stderr
        assert "Traceback" not in done.stderr


def test_doctor_says_of_every_classic_variable_whether_it_is_set_and_never_its_value(folder):
    numbers = {"ART_SERVER_PORT": "8000", "ART_CLIENT_WORKERS": "4"}
    (folder / ".env").write_text("".join(f"{name}={numbers.get(name, SECRET)}\n" for name in NAMES[1:]))
    load_env_file()
    found = {it.part: it.state for it in doctor.variables()}
    assert found.pop("OPENAI_API_KEY") == "not set" and found.pop("OPENPIPE_API_KEY") == "refused"
    assert set(found) == set(NAMES[2:]) and set(found.values()) == {"set"}
    assert SECRET not in repr(doctor.variables())


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("ART_SERVER_PORT", "http", "not an integer from 0 to 65535"),
        ("ART_SERVER_PORT", "65536", "not an integer from 0 to 65535"),
        ("ART_CLIENT_WORKERS", "0", "not an integer >= 1; the command will refuse it"),
    ],
)
def test_doctor_says_of_a_number_that_a_start_refuses_it(folder, monkeypatch, name, value, state):
    monkeypatch.setenv(name, value)
    assert {it.part: it.state for it in doctor.variables()}[name].startswith(state)


def test_a_start_says_once_that_a_key_is_not_used(folder, monkeypatch, caplog):
    monkeypatch.setenv("OPENPIPE_API_KEY", SECRET)
    warn_refused.cache_clear()
    for _ in range(2):
        failed = CliRunner().invoke(app, ["train", "nowhere.py:agent", "tasks.jsonl"])
        assert isinstance(failed.exception, ConfigError)
    [said] = [it.getMessage() for it in caplog.records if it.name == "art_cli.variables"]
    assert said.startswith("OPENPIPE_API_KEY is set but ignored: ") and SECRET not in said


def test_doctor_says_which_distribution_is_missing_for_a_variable():
    have = {it.distribution for it in Plugins().installed()}
    for variable, found in zip(CHECKED, doctor.variables(), strict=True):
        assert found.advice.startswith(variable.does)
        assert ("pip install" in found.advice) == (variable.needs not in {"", *have})


def test_the_monitor_of_openpipe_is_refused_by_name_with_what_to_take_instead():
    with pytest.raises(ConfigError, match=r"no tracker named 'openpipe' \(refused: .*langfuse.*wandb.*art view"):
        Plugins().choose("register_trackers", "openpipe")


def test_the_file_of_another_folder_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    for folder, text in (
        ("elsewhere", "ART_OF_BOTH=elsewhere\nART_OF_ONE=1\nART_OF_ALL=file"),
        ("mine", "ART_OF_BOTH=mine"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".env").write_text(text)
    for name in ("ART_OF_BOTH", "ART_OF_ONE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ART_OF_ALL", "environment")
    for folder in ("elsewhere", "mine"):
        monkeypatch.chdir(tmp_path / folder)
        load_env_file()
    assert os.environ["ART_OF_BOTH"] == "mine" and "ART_OF_ONE" not in os.environ
    assert os.environ["ART_OF_ALL"] == "environment"
