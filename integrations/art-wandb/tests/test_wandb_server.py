"""What reaches a W&B server: online at once, from offline runs by ``wandb sync``; one run for one run folder, either way."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import wandb
from offline_run import runs_in
from short_training import train
from wandb_server import serving

# Each starts wandb several times.
pytestmark = pytest.mark.engines


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()


def check_four_steps(server, folder):
    """The server has one run, with all that a training of two steps and then of two more told."""
    ((run, lines),) = server.rows.items()
    assert run == json.loads((folder / "wandb.json").read_text())["id"]
    rows = [json.loads(line) for line in lines]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert [row["step"] for row in rows if "train/reward" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 2, 4]
    assert sum(name.startswith(f"{run}/media/table/trajectories/train") for name in server.files) == 4
    assert server.artifacts[f"checkpoint-{run}"] == [{"latest", "step-2"}, {"latest", "step-4"}]
    assert json.loads(server.files[f"checkpoint-{run}/version.json"]) == 4
    assert json.loads(server.summaries[run])["report"]["steps"] == 4


async def test_online_a_folder_that_goes_on_is_one_run_of_the_server(server, tmp_path, capfd):
    folder = tmp_path / "run"
    await train(folder, eval_tasks=["x"])
    wandb.teardown()
    await train(folder, eval_tasks=["x"], steps=4)
    wandb.teardown()
    check_four_steps(server, folder)
    assert f"{server.url}/team/art-training/runs/" in capfd.readouterr().err


async def test_offline_runs_of_a_folder_become_one_run_by_wandb_sync(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    await train(folder, eval_tasks=["x"])
    wandb.teardown()
    await train(folder, eval_tasks=["x"], steps=4)
    wandb.teardown()
    assert not server.asked
    shutil.rmtree(folder / "checkpoints")
    offline = sorted(map(str, folder.glob("wandb/offline-run-*")))
    assert len(offline) == 2
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", *offline], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    check_four_steps(server, folder)


async def test_a_key_that_the_server_refuses_leaves_the_run_offline(server, tmp_path, capfd):
    server.status = 401
    await train(tmp_path / "run")
    (run,) = runs_in(tmp_path / "run")
    assert [step for step, _ in run.values("train/reward")] == [1, 2]
    said = capfd.readouterr().err
    assert "W&B cannot be used online (" in said and f"wandb sync {run.folder}" in said


async def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path, monkeypatch, capfd):
    with serving() as server:
        environment = server.environment()
    for name, value in {**environment, "WANDB_INIT_TIMEOUT": "2"}.items():
        monkeypatch.setenv(name, value)
    await train(tmp_path / "run")
    (run,) = runs_in(tmp_path / "run")
    assert [step for step, _ in run.values("train/reward")] == [1, 2]
    assert "W&B cannot be used online (" in capfd.readouterr().err
