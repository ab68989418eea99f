"""The README's example runs as it stands, and is short. Its links are followed by tests/test_site.py."""

import re
from pathlib import Path

import pytest

import art_core as art

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.smoke
@pytest.mark.system
def test_the_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert re.search(r"2 steps, written to runs/", capsys.readouterr().out)
    assert art.TrainConfig().model == "tiny"


def test_the_readme_is_short_and_begins_with_code():
    assert len(README.split()) <= 600
    assert README.splitlines().index("```python") < 25
