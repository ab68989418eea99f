"""The page "From a provider's model to your own", command by command, against the provider that stands in."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks_of

from art_core.capture import listen

PAGE = ROOT / "docs" / "howto" / "own-model.md"
SECONDS = 600


def commands() -> list[str]:
    """The page's blocks after the installation, those that nobody could run left out."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "sh" and not block.not_run]
    return [block.code for block in blocks[1:]]


def with_free_ports(code: str) -> str:
    """The script with ports that nothing else has, waiting for each server that it starts."""
    for port in ("8500", "8400"):
        free = listen("127.0.0.1", 0)
        code = code.replace(port, str(free.getsockname()[1]))
        free.close()
    waiting = "until (exec 3<>/dev/tcp/127.0.0.1/{0}) 2> /dev/null; do sleep 0.1; done"
    return re.sub(r"^(.*--port (\d+).*) &$", lambda it: f"{it[1]} &\n{waiting.format(it[2])}", code, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which somebody followed the page, what was printed, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("journey")
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    with subprocess.Popen(
        ["bash", "-ec", with_free_ports("\n".join(commands()))], cwd=folder, env=os.environ | {"PATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as shell:  # fmt: skip
        printed = []
        try:
            for line in shell.stdout:
                printed.append(line)
                if line.startswith(("HOLDS", "FAILS", "NOT SHOWN")) and "cost" in line:
                    break
        finally:  # the servers, which run until then
            os.killpg(shell.pid, signal.SIGTERM)
    return folder, "".join(printed), time.monotonic() - began


@pytest.mark.engines
@pytest.mark.timeout(SECONDS)
def test_the_page_ends_with_a_model_that_costs_less_and_is_not_shown_to_be_worse(followed):
    folder, printed, _ = followed
    assert "300 questions answered" in printed, printed
    tasks, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "held_out.jsonl")
    )
    assert [len(tasks), len(held_out)] == [64, 42]
    assert not {task["input"].strip() for task in tasks} & {task["input"].strip() for task in held_out}
    assert re.search(r"^(HOLDS|NOT SHOWN)  mine: success >= live - 0.02", printed, flags=re.MULTILINE), printed
    assert re.search(r"^HOLDS  mine: cost <= 0.5 \* live", printed, flags=re.MULTILINE), printed
