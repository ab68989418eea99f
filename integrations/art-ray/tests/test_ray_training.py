"""The email agent trains on a Ray cluster: agents on two nodes, the learner in two processes, one process killed midway."""

import json
import os
import secrets
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from process_marks import marked

from art_core.store import Store

ROOT = Path(__file__).parents[3]
STEPS, TASKS, SIZE = 8, 4, 8

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_email_agent_gets_better_on_a_cluster_and_survives_the_death_of_a_process(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ART_TEST_MARK": mark}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_email_on_ray.py")), str(folder), "1"],
        env={**os.environ, **own, **auth}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout.splitlines()[-1])["killed"]) == 1

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in steps]
    print(f"rewards {[round(reward, 3) for reward in rewards]}")
    assert len(rewards) == STEPS and sum(rewards[-4:]) > 2 * sum(rewards[:2])

    with Store(folder / "run.sqlite") as store:
        rollouts, updates = store.rollouts(), list(store.updates())
    lost = {it.rollout_id for it in rollouts if (it.error or "").startswith("RolloutLost")}
    groups = {}
    for it in rollouts:
        if it.rollout_id not in lost:
            groups.setdefault(it.group, []).append(it.rollout_id)
    assert lost, "the killed process had runs"
    assert len(groups) == STEPS * TASKS and {len(runs) for runs in groups.values()} == {SIZE}, "every group is whole"
    trained = {rollout_id for update in updates for rollout_id, _ in update.trained}
    assert trained and not trained & lost, "no lost attempt was trained"

    until = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left, "nothing is left running"
