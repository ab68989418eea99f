"""The page "From a provider's model to your own", command by command, against the provider that stands in."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks_of

import art_core as art
from art_core.capture import listen

PAGE = ROOT / "docs" / "howto" / "own-model.md"
SECONDS = 840
SPLITS = ("train", "live", "mine", "worse")
"""The first recording's conversations, the provider's beside a candidate, and the candidates'."""


def commands() -> list[str]:
    """The page's blocks after the installation, those that nobody could run left out."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "sh" and not block.not_run]
    return [block.code for block in blocks[1:]]


def with_free_ports(code: str) -> str:
    """The script with ports that nothing else has, waiting for each server that it starts."""
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        free = {port: str(it.getsockname()[1]) for port, it in (("8500", one), ("8400", other))}
    code = re.sub("|".join(free), lambda it: free[it[0]], code)
    waiting = "until (exec 3<>/dev/tcp/127.0.0.1/{0}) 2> /dev/null; do sleep 0.1; done"
    return re.sub(r"^(.*--port (\d+).*) &$", lambda it: f"{it[1]} &\n{waiting.format(it[2])}", code, flags=re.MULTILINE)


COUNT = """
import sqlite3
rows = sqlite3.connect("runs/production/run.sqlite").execute("SELECT count(*) FROM rollouts WHERE split IN ('live', 'mine')")
print(rows.fetchone()[0])
"""


def without_sleep(script: str) -> str:
    """The script that waits for the second round's weights to be served, however long it takes."""
    [wait] = re.findall(r"^sleep 10 .*\nart route (.*)$", script, flags=re.MULTILINE)
    waiting = f"until art route {wait} | grep -q round-002; do sleep 1; done"
    return re.sub(r"^sleep 10 .*$", waiting, script, flags=re.MULTILINE)


def with_a_killed_gateway(script: str) -> str:
    """The script with the gateway of week 2 killed after a quarter of its questions, and started again by the same command."""
    start = next(line for line in script.splitlines() if "--route mine" in line)
    users = next(line for line in script.splitlines() if "--week 2" in line)
    killing = f"""
{users} &
users=$!
until [ "$(python count.py)" -ge 500 ]; do sleep 0.2; done
kill -9 $GATEWAY
wait $GATEWAY || echo "the gateway was killed"
{start}
GATEWAY=$!
wait $users
"""
    return script.replace(users, killing, 1)


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_the_page_ends_with_a_model_that_costs_less_and_is_not_shown_to_be_worse(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # The servers stop with the script, also if one of its commands fails.
    script = "trap 'kill $(jobs -p)' EXIT\n" + with_a_killed_gateway(
        without_sleep(with_free_ports("\n".join(commands())))
    )
    (tmp_path / "count.py").write_text(COUNT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    printed = done.stdout
    assert done.returncode == 0, printed
    assert "300 questions answered" in printed, printed
    tasks, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "held_out.jsonl")
    )
    assert [len(tasks), len(held_out)] == [64, 42]
    assert not {task["input"].strip() for task in tasks} & {task["input"].strip() for task in held_out}
    assert re.search(r"^(HOLDS|NOT SHOWN)  mine: success >= live - 0.02", printed, flags=re.MULTILINE), printed
    assert re.search(r"^HOLDS  mine: cost <= 0.5 \* live", printed, flags=re.MULTILINE), printed
    # The canary: raised by itself, then a worse one rolled back, and nothing of their answers is lost, although it was killed.
    assert "the gateway was killed" in printed, printed
    assert "mine answers 80% of the conversations" in printed and "because its scores are" in printed, printed
    assert "worse answers 0% of the conversations" in printed and "because its scores are lower" in printed, printed
    splits = {split: len(art.load_trajectories(tmp_path / "runs" / "production", split=split)) for split in SPLITS}
    assert sum(splits.values()) == 300 + 2000 + 100 + 400 and min(splits.values()) > 10, splits
    # Two rounds on what was new, of which the second is offered to users without a restart.
    rounds = json.loads((tmp_path / "runs" / "rounds" / "rounds.json").read_text())
    assert [it["state"] for it in rounds] == ["accepted"] * 2 and min(it["new"] for it in rounds) >= 20, rounds
    assert (
        rounds[1]["start"].endswith("runs/rounds/round-001") and rounds[1]["held_out"] > rounds[0]["held_out"] > 42
    ), rounds
    assert re.search(r"round-002/checkpoints/step-000010: 10%, because it is new$", printed, flags=re.MULTILINE), (
        printed
    )
