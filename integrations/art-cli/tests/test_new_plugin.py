"""A plugin that ``art new-plugin`` writes works as it is, and nobody's files are lost by it."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib

import pytest

from art_cli.new_plugin import Kind, write_plugin
from art_core.errors import ConfigError


def run_tests(*plugins, options=()):
    """Run plugins' tests in a process of their own, with what this one can import and nothing installed."""
    # Only art_core: what other plugins are installed here, and take long to load, is no affair of a new one.
    others = ",".join({entry.name for entry in importlib.metadata.entry_points(group="art")})
    path = os.pathsep.join([*(str(it.folder) for it in plugins), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "ART_DISABLE_PLUGINS": others}
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", *options]
    command += [str(it.folder) for it in plugins]
    where = plugins[0].folder
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.smoke
@pytest.mark.system
def test_the_tests_of_a_new_adapter_pass_as_they_are(tmp_path):
    done = run_tests(write_plugin("my-thing", tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.system
def test_the_tests_of_every_other_kind_pass_as_they_are(tmp_path):
    # In one process, which saves starting five: their settings then come from here and not from their own files.
    plugins = [write_plugin(f"my-{kind}", tmp_path, kind) for kind in Kind if kind is not Kind.agent]
    done = run_tests(*plugins, options=["-o", "asyncio_mode=auto"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout


@pytest.mark.system
@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_written_is_clean(tmp_path, kind):
    folder = write_plugin("my-thing", tmp_path, kind).folder
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated", "--select", "E,F,UP,B,SIM"]
    done = subprocess.run([*ruff, "--line-length=120", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "$" not in "".join(path.read_text() for path in folder.rglob("*.*"))


@pytest.mark.system
def test_the_tests_of_a_new_adapter_fail_when_it_is_broken(tmp_path):
    plugin = write_plugin("mine", tmp_path)
    module = plugin.folder / "art_mine.py"
    module.write_text(module.read_text().replace("if address is None:", "if True:"))
    done = run_tests(plugin)
    assert done.returncode == 1
    assert "model calls of rollouts were not redirected" in done.stdout


def test_it_is_a_distribution_that_art_finds(tmp_path):
    plugin = write_plugin("Art_My_Thing", tmp_path, Kind.reward)
    assert plugin.folder == tmp_path / "art-my-thing"
    project = tomllib.loads((plugin.folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "art-my-thing"
    assert project["entry-points"]["art"] == {"my_thing": "art_my_thing"}
    assert project["dependencies"] == ["art-core"]
    assert (plugin.folder / "README.md").read_text().startswith("# art-my-thing\n")
    assert "python -m pytest" in plugin.next_steps()


@pytest.mark.parametrize("name", ["", "9lives", "a b", "../up", "x--y", "class", "ünder", "art-", "a/b", "-x"])
def test_what_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="is not a valid plugin name"):
        write_plugin(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["core", "art-langgraph", "openai", "ruler"])
def test_the_names_of_our_own_distributions_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"already exists; in the checkout of art, run: pip install -e "):
        write_plugin(name, tmp_path)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "art-mine").mkdir()
    (tmp_path / "art-mine" / "art_mine.py").write_text("mine")
    with pytest.raises(ConfigError, match="nothing in it was changed"):
        write_plugin("mine", tmp_path)
    assert [path.read_text() for path in (tmp_path / "art-mine").iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create .*--dir"):
        write_plugin("mine", tmp_path / "file")
