"""What docs/server.md shows, typed as it stands: a server, a worker and a script, each a process of its own."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

DOC = Path(__file__).parents[3] / "docs" / "server.md"
ENV = {name: value for name, value in os.environ.items() if not name.startswith("ART_")} | {
    "OMP_WAIT_POLICY": "PASSIVE"
}


@contextmanager
def started(folder, *command, until):
    """A process of which a line that has ``until`` was seen; Ctrl-C ends it, and it ends well."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said = ""
        for line in process.stderr:
            said += line
            if until in line:
                break
        assert until in said, said
        yield process
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
        assert "Traceback" not in rest, rest
    finally:
        process.kill()
        process.wait()


def test_the_page_works_as_it_is_typed(tmp_path):
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert [name for name, _ in blocks] == ["app.py", "drive.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    serve = re.search(r"^art (serve \S+ \S+)", DOC.read_text(), flags=re.M)[1].split()
    work = re.search(r"^art (worker .*?)\s+#", DOC.read_text(), flags=re.M)[1].split()
    with (
        started(tmp_path, "-m", "art_cli", *serve, "--run-dir", "run", until="serving at"),
        started(tmp_path, "-m", "art_cli", *work, until="connected to"),
    ):
        driven = subprocess.run(
            [sys.executable, "drive.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120
        )
    assert driven.returncode == 0, driven.stderr
    assert re.fullmatch(r"(step \d: mean reward \d+\.\d\d\n){3}", driven.stdout)
    assert (tmp_path / "run" / "run.sqlite").is_file()
