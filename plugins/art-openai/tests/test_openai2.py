"""The tests of this folder pass with openai 2.x as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / ".openai2"


@pytest.mark.engines
def test_everything_but_the_agents_sdk_works_with_openai_2():
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path}
    version = [sys.executable, "-c", "import openai; print(openai.VERSION)"]
    assert subprocess.check_output(version, env=env, text=True).startswith("2."), (
        f"pip install --no-deps --target {FOLDER} --group openai2"
    )
    # The SDK needs openai 3.
    left_out = [f"--ignore={HERE / 'test_openai_agents.py'}", "-m", "not engines"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *left_out, str(HERE)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
