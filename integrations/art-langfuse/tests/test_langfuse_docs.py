"""docs/langfuse.md runs as it stands, in order, in one program."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from art_core.plugins import Plugins

PAGE = Path(__file__).parents[3] / "docs" / "langfuse.md"


@pytest.mark.engines
def test_the_page_runs(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "langfuse" not in Plugins().registered("register_trackers"):
        pytest.skip("art-langfuse is not installed")
    train, imitate, episodes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    program = {"__name__": "page"}
    exec(compile(train, "langfuse.md", "exec"), program)
    assert len(server.traces()) == 2 * 2 * 4
    command = "import langfuse --since 7d --session seen --run-dir runs/imported --limit 10"
    done = subprocess.run([sys.executable, "-m", "art_cli", *command.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "10 traces read" in done.stdout, done.stderr
    exec(compile(imitate, "langfuse.md", "exec"), program)
    asyncio.run(program["warm_start"]())
    exec(compile(episodes, "langfuse.md", "exec"), program)
    program["tracker"].close()
    assert "'action_distribution': {'search': 1}" in capsys.readouterr().out
