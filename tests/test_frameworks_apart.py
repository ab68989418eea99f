"""Plugins of frameworks that need an environment of their own: the tests in ``plugins/*/apart`` pass there."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(folder.parent for folder in ROOT.glob("plugins/*/apart"))
TRAP = ("-p", "trap_network", "-o", "usefixtures=trap_network")
OWN_NETWORK = {"art-claude-agent"}
"""Claude Code is a program that looks names up by itself; its tests have a proxy that refuses whatever leaves."""
# Some frameworks leave their connections to the garbage collector, which finds them in whatever test is running.
QUIET = ("-p", "no:cacheprovider", "--show-capture=no", "-W", "ignore:unclosed:ResourceWarning")


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_the_plugin_keeps_every_rule_in_its_environment(plugin):
    python = ROOT / ".apart" / plugin.name / "bin" / "python"
    assert python.exists(), f"make .apart/{plugin.name}/.ready"
    tests = plugin / "apart"
    # Without what this process was told about packages.
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PLUGIN": str(plugin)}
    network = () if plugin.name in OWN_NETWORK else TRAP
    command = [python, "-m", "pytest", *QUIET, *network, f"--confcutdir={tests}", tests, ROOT / "tests/readme_apart.py"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
