"""``train(trackers=["wandb"])``: a run folder is one W&B run, which can be read back from what is kept offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from offline_run import runs_in
from short_training import train

import art_core as art
from art_core.config import TrainConfig
from art_core.types import Call, Group, Trajectory
from art_wandb import WandbTracker
from art_wandb.tables import CHARACTERS, COLUMNS, ROWS

pytestmark = pytest.mark.system


def stored(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_can_be_read_back(tmp_path):
    folder = tmp_path / "first"
    result = await train(folder, eval_tasks=["x", "y", "z"], eval_every=1)
    (run,) = runs_in(folder)
    assert run.run.project == "art-training" and run.run.display_name == "first" and run.finished
    assert run.tags == ["ART", "tiny"]
    assert run.config["tasks_per_step"] == 2 and run.config["loss"] == "grpo" and run.config["art_core"]
    for row in stored(folder):
        step = row.pop("step")
        assert len(row) > 10
        assert {(step, name): value for name, value in row.items()} == {
            (step, name): dict(run.values(f"train/{name}"))[step] for name in row
        }
    found = result.report["evaluations"]
    assert run.values("eval/success") == [(it["step"], it["success"]) for it in found]
    assert [it["step"] for it in found] == [0, 1, 2] == [step for step, _ in run.values("eval/low")]
    assert run.metrics["*"].step_metric == "step"
    assert run.summary["report"]["after"]["success"] == result.report["after"]["success"]
    assert run.summary["report"]["steps"] == 2 and "evaluations" not in run.summary["report"]


async def test_wandbs_own_viewer_reads_what_these_tests_read(tmp_path):
    await train(tmp_path / "run", eval_tasks=["x"])
    (run,) = runs_in(tmp_path / "run")
    viewer = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", run.file]
    shown = [json.loads(line) for line in subprocess.check_output(viewer, text=True, timeout=60).splitlines()]
    assert [it["type"] for it in shown] == [it.WhichOneof("record_type") for it in run.records]
    assert [it["history"]["item"].get("train/reward") for it in shown if it["type"] == "history"] == [
        row.get("train/reward") for row in run.history
    ]


async def test_every_scored_run_is_a_row_of_its_steps_table(tmp_path):
    result = await train(tmp_path / "run", eval_tasks=["x"])
    (run,) = runs_in(tmp_path / "run")
    train_tables, eval_tables = run.tables("trajectories/train"), run.tables("trajectories/eval")
    assert [len(it["data"]) for it in train_tables] == [4, 4] and [len(it["data"]) for it in eval_tables] == [1, 1]
    rows = [dict(zip(COLUMNS, row, strict=True)) for table in train_tables for row in table["data"]]
    assert {row["step"] for row in rows} == {1, 2} and {row["task"] for row in rows} == {"a", "b"}
    for row in rows:
        assert row["reward"] == float(int(row["output"]) % 2) == json.loads(row["metrics"])["success"]
        assert row["notes"] == f"why: {row['output']} is what it is" and row["error"] is None
        assert row["calls"] == 1 and row["prompt_tokens"] > 0 and row["sampled_tokens"] > 0
    assert {row["rollout_id"] for row in rows} <= {t.rollout_id for t in art.load_trajectories(result.run_dir)}


async def test_a_run_folder_that_goes_on_is_the_same_run(tmp_path):
    folder = tmp_path / "run"
    await train(folder, eval_tasks=["x"])
    await train(folder, eval_tasks=["x"], steps=4)
    first, second = runs_in(folder)
    assert first.run.run_id == second.run.run_id == json.loads((folder / "wandb.json").read_text())["id"]
    assert [step for step, _ in first.values("train/reward")] == [1, 2]
    assert [step for step, _ in second.values("train/reward")] == [3, 4]
    numbers = [row["_step"] for run in (first, second) for row in run.history]
    assert numbers == sorted(set(numbers))


async def test_the_environment_says_what_wandb_is_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "named")
    monkeypatch.setenv("WANDB_TAGS", "night,shift")
    monkeypatch.setenv("WANDB_NOTES", "words")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    await train(tmp_path / "run", steps=1)
    (run,) = runs_in(tmp_path / "run")
    assert (run.run.project, run.run.display_name, run.run.run_id) == ("theirs", "named", "r1")
    assert run.tags == ["ART", "tiny", "night", "shift"] and run.notes == "words"


async def test_disabled_nothing_is_kept_and_nothing_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    result = await train(tmp_path / "run", eval_tasks=["x"])
    assert result.report["steps"] == 2 and not list((tmp_path / "run").glob("wandb/*"))
    assert capfd.readouterr().err == ""


async def test_what_is_said_is_one_line_with_the_command_that_uploads(tmp_path, capfd):
    await train(tmp_path / "run")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    lines = [line for line in capfd.readouterr().err.splitlines() if "eave" not in line]  # an advertisement of wandb's
    assert len(lines) == 1 and "no API key (set WANDB_API_KEY" in lines[0] and lines[0].endswith(f"wandb sync {folder}")


CALL = Call(prompt_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.5, -0.5))


def told(folder, *telling, **config):
    """A tracker of ``folder`` that was told these, and its run."""
    folder.mkdir(exist_ok=True)
    tracker = WandbTracker(folder, TrainConfig(model="tiny", **config))
    for method, *arguments in (("log", 1, {"reward": 0.5}), *telling):
        getattr(tracker, method)(*arguments)
    tracker.close()
    return runs_in(folder)[-1]


def test_settings_that_give_access_stay_here(tmp_path):
    run = told(
        tmp_path / "run",
        frozen_model="http://me:hidden@host:8000/v1",
        engine_args={"api-key": "hidden", "tokenizer": "mine", "served": ["https://hidden@there/x", "a@b"]},
        learner_args={"env": {"HF_TOKEN": "hidden", "lines": 3}, "keys": ["hidden"]},
        executor_args={"Password": "hidden", "client_secret": {"a": "hidden"}, "workers": 16},
    )
    assert b"hidden" not in Path(run.file).read_bytes()
    assert run.config["frozen_model"] == "http://host:8000/v1" and run.config["max_tokens"] == 512
    assert run.config["engine_args"] == {
        "api-key": "left out",
        "tokenizer": "mine",
        "served": ["https://there/x", "a@b"],
    }
    assert run.config["learner_args"] == {"env": {"HF_TOKEN": "left out", "lines": 3}, "keys": "left out"}
    assert run.config["executor_args"] == {"Password": "left out", "client_secret": "left out", "workers": 16}


def test_tables_have_a_most_of_rows_and_cells_a_most_of_characters(tmp_path):
    runs = [Trajectory(task={"input": "q"}, calls=(CALL, CALL), output="o" * 5000, reward=None, error="E" * 3000)]
    groups = [Group(task="q", trajectories=tuple(runs * 40), advantages=(0.5,) * 40)] * 2
    (table,) = told(tmp_path / "run", ("log_groups", 1, groups, "train")).tables("trajectories/train")
    assert len(table["data"]) == ROWS == 64
    row = dict(zip(COLUMNS, table["data"][0], strict=True))
    assert row["task"] == '{"input": "q"}' and row["reward"] is None and row["advantage"] == 0.5
    assert row["output"] == "o" * CHARACTERS + " [... 3000 characters left out]" and len(row["error"]) < 2100
    assert (row["calls"], row["prompt_tokens"], row["sampled_tokens"]) == (2, 6, 4)


def test_a_cell_that_json_cannot_say_is_its_repr(tmp_path):
    ring = {}
    ring["self"] = ring
    groups = [Group(task="q", trajectories=(Trajectory({(0, 1): "x"}, (CALL,), output=ring), Trajectory("q", (CALL,))))]
    (table,) = told(tmp_path / "run", ("log_groups", 1, groups, "train")).tables("trajectories/train")
    assert [row[1:3] for row in table["data"]] == [["{(0, 1): 'x'}", "{'self': {...}}"], ["q", "null"]]


def test_an_evaluation_at_another_temperature_has_curves_of_its_own(tmp_path):
    found = {
        "name": "after",
        "step": 3,
        "success": 0.5,
        "counts_successes": True,
        "temperature": 0.7,
        "mean_reward": None,
    }
    run = told(tmp_path / "run", ("log_evaluation", 3, found))
    assert {key: value for key, value in run.history[1].items() if not key.startswith("_")} == {
        "step": 3, "eval at 0.7/success": 0.5,
    }  # fmt: skip


def checkpoint(folder, step, *, size, adapter):
    folder = folder / f"step-{step:06d}"
    model = folder / "adapter" if adapter else folder
    model.mkdir(parents=True)
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(size)
    (model / "config.json").write_text(f"{{{step}}}")
    (folder / "optimizer.state").write_bytes(b"o")
    (folder / "learner.json").write_text("{}")
    return "log_checkpoint", step, folder


@pytest.mark.parametrize(
    ("asked", "adapter", "size", "steps"),
    [
        ("", True, 65 * 2**20, [2]), ("", False, 1000, [2]), ("", False, 65 * 2**20, []), ("end", False, 65 * 2**20, [2]),
        ("checkpoint", True, 10, [1, 2]), ("false", True, 10, []),
    ],
)  # fmt: skip
def test_checkpoints_become_artifacts_where_they_are_wanted(tmp_path, monkeypatch, asked, adapter, size, steps):
    monkeypatch.setenv("WANDB_LOG_MODEL", asked)
    run = told(tmp_path / "run", *[checkpoint(tmp_path / "kept", step, size=size, adapter=adapter) for step in (1, 2)])
    assert [json.loads(it.metadata)["step"] for it in run.models()] == steps
    for it, step in zip(run.models(), steps, strict=True):
        assert it.name == f"checkpoint-{run.run.run_id}" and set(it.aliases) == {"latest", f"step-{step}"}
        assert sorted(file.path for file in it.manifest.contents) == ["config.json", "model.safetensors"]
        # The checkpoint may be removed before it is uploaded: what is uploaded is in the run folder.
        assert all(file.local_path.startswith(str(tmp_path / "run")) for file in it.manifest.contents)


def test_plugins_are_loaded_without_wandb():
    code = "import sys; from art_core.plugins import Plugins; Plugins(); import art_wandb; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
