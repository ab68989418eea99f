"""The email agent trains with vLLM as its engine and Unsloth as its learner, and goes on when the server is killed."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from process_marks import marked

from art_core.store import Store

ROOT = Path(__file__).parents[3]
STEPS, RUNS = 8, 64

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_email_agent_gets_better_on_vllm_with_unsloth_and_survives_the_death_of_the_server(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_email.py")), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ART_TEST_MARK": mark},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout.splitlines()[-1])["killed"]) >= 1

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in steps]
    untold = sum(step["cannot_tell"] for step in steps)
    print(f"rewards {rewards}, could not be told {untold:.0f} of {STEPS} steps")
    assert len(rewards) == STEPS and sum(rewards[-4:]) > sum(rewards[:4])
    assert all(step["mismatch"] < 1e-3 for step in steps)
    assert f"({untold:.0f} of {STEPS} changed too little to tell)" in done.stderr

    assert "vLLM died (exit code 137)" in done.stderr and "vLLM is running again" in done.stderr
    with Store(folder / "run.sqlite") as store:
        trajectories = store.trajectories(split="train")
    assert len(trajectories) == STEPS * RUNS, "no rollout is lost"
    assert all(it.reward is not None for it in trajectories)

    until = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left, "nothing is left running"
