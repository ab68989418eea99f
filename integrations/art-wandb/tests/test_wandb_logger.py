"""The logger for loops of one's own: what it is told can be read back from the offline run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from offline_run import runs_in

from art_core.errors import ConfigError
from art_wandb import ARTWandbLogger
from art_wandb.logger import ACTIONS, EPISODES

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).parent / "wandb_integration.py"
CONFIG = {"model_name": "tiny", "agent_type": "email_search", "learning_rate": 1e-5}


def logged(tmp_path, tell, config=CONFIG):
    """Return the run that a logger leaves."""
    logger = ARTWandbLogger("mine", "first")
    logger.initialize_run(config)
    tell(logger)
    logger.finish_run()
    (run,) = runs_in(tmp_path)
    assert run.finished
    return run


def test_an_epoch_has_every_metric_and_zero_where_it_is_missing(tmp_path):
    run = logged(tmp_path, lambda logger: logger.log_training_metrics(3, {"policy_loss": 0.5, "entropy": 1.5}))
    row = {key: value for key, value in run.history[0].items() if not key.startswith("_")}
    assert row == {
        "epoch": 3, "policy_loss": 0.5, "value_loss": 0, "kl_divergence": 0, "entropy": 1.5, "learning_rate": 0,
        "average_reward": 0, "success_rate": 0, "average_episode_length": 0,
    }  # fmt: skip
    assert run.run.project == "mine" and run.run.display_name == "first"
    assert run.tags == ["ART", "GRPO", "tiny"] and run.notes == "ART training with email_search agent"
    assert run.config["learning_rate"] == 1e-5


def test_a_config_without_names_is_of_an_unknown_model_and_agent(tmp_path):
    run = logged(tmp_path, lambda logger: None, config={})
    assert run.tags == ["ART", "GRPO", "unknown"] and run.notes == "ART training with unknown agent"


def test_a_tag_longer_than_wandb_allows_keeps_its_end(tmp_path):
    name = "/home/me/models/" + "x" * 60 + "/final"
    assert logged(tmp_path, lambda logger: None, config={"model_name": name}).tags == ["ART", "GRPO", name[-64:]]


def test_a_model_without_a_name_has_no_tag(tmp_path):
    assert logged(tmp_path, lambda logger: None, config={"model_name": ""}).tags == ["ART", "GRPO"]


def test_episodes_and_their_actions_become_two_tables(tmp_path):
    def tell(logger):
        actions = [
            {"type": "search", "reward": 0.5, "state_description": "s" * 150},
            {"type": "select", "reward": 1},
        ]
        logger.log_episode({
            "episode_id": "e1", "total_reward": 1.5, "steps": 2, "max_steps": 10, "success": True, "accuracy_score": 0.9,
            "actions": actions,
        })  # fmt: skip

    run = logged(tmp_path, tell)
    (episodes,), (actions,) = run.tables("episodes"), run.tables("actions")
    assert episodes["columns"] == EPISODES and episodes["data"] == [["e1", 1.5, 2, True, 0.9, 0.8]]
    assert actions["columns"] == ACTIONS
    assert actions["data"] == [["e1", 0, "search", 0.5, "s" * 100], ["e1", 1, "select", 1, ""]]


def test_nothing_that_an_episode_leaves_out_is_an_error(tmp_path):
    episodes = [
        {},
        {"episode_id": 7, "steps": 5},
        {"steps": 5, "max_steps": None},
        {"steps": 5, "max_steps": 0},
        {"steps": None, "total_reward": None},
        {"steps": 0, "max_steps": 10},
        {"actions": [{}, {"state_description": None}], "rewards": [0.25]},
        {"steps": ["a", "b", "c"], "max_steps": 4},
    ]
    run = logged(tmp_path, lambda logger: [logger.log_episode(it) for it in episodes])
    (table,) = run.tables("episodes")
    assert [(row[0], row[2], row[5]) for row in table["data"]] == [
        ("unknown", 0, 0), (7, 5, 0), ("unknown", 5, 0), ("unknown", 5, 0), ("unknown", 0, 0), ("unknown", 0, 0),
        ("unknown", 2, 0), ("unknown", 3, 0.25),
    ]  # fmt: skip
    (table,) = run.tables("actions")
    assert table["data"] == [["unknown", 0, "unknown", 0.25, ""], ["unknown", 1, "unknown", 0, ""]]


def test_a_checkpoint_is_a_file_or_a_folder(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"one file")
    (tmp_path / "folder" / "adapter").mkdir(parents=True)
    (tmp_path / "folder" / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")

    def tell(logger):
        logger.log_model_artifacts(str(tmp_path / "model.pt"), 1)
        logger.log_model_artifacts(tmp_path / "folder", 2)
        with pytest.raises(ConfigError, match=r"no checkpoint of epoch 3 at .*missing\.pt"):
            logger.log_model_artifacts("missing.pt", 3)

    first, second = logged(tmp_path, tell).models()
    assert (first.name, first.description) == ("model_epoch_1", "ART model checkpoint at epoch 1")
    assert [it.path for it in first.manifest.contents] == ["model.pt"]
    assert second.name == "model_epoch_2"
    assert [it.path for it in second.manifest.contents] == ["adapter/adapter_model.safetensors"]


def test_a_run_ends_also_where_a_table_cannot_be_logged(tmp_path):
    logger = ARTWandbLogger("mine", "first")
    logger.initialize_run(CONFIG)
    logger.log_episode({"episode_id": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        logger.finish_run()
    with pytest.raises(wandb.Error, match="finished"):
        logger.run.log({})
    logger.finish_run()


def test_before_and_after_a_run_nothing_is_logged_and_nothing_fails(tmp_path):
    logger = ARTWandbLogger()
    assert logger.project_name == "art-training" and logger.experiment_name.startswith("art_experiment_2")

    def tell():
        logger.log_training_metrics(0, {})
        logger.log_episode({})
        logger.log_model_artifacts("missing.pt", 0)
        logger.finish_run()

    tell()
    assert logger.run is None and not list(tmp_path.glob("wandb/*"))
    logger.initialize_run({})
    logger.finish_run()
    tell()
    (run,) = runs_in(tmp_path)
    assert [key for row in run.history for key in row if not key.startswith("_")] == ["episodes", "actions"]


def test_a_wandb_run_of_the_program_itself_is_left_alone(tmp_path):
    theirs = wandb.init(mode="offline", project="theirs", settings=wandb.Settings(silent=True))
    logger = ARTWandbLogger("mine")
    logger.initialize_run(CONFIG)
    logger.log_training_metrics(1, {})
    wandb.log({"own": 1})
    logger.finish_run()
    assert wandb.run is theirs
    wandb.finish()
    runs = {run.run.project: run for run in runs_in(tmp_path)}
    assert runs["theirs"].history[0]["own"] == 1 and "epoch" in runs["mine"].history[0]
    assert all("own" not in row for row in runs["mine"].history)


def test_the_classic_program_runs_as_it_is_and_ends_with_nothing_left_behind(tmp_path):
    environment = {**os.environ, "ART_EPOCHS": "5"}
    done = subprocess.run(
        [sys.executable, PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no API key") == 1 and done.stderr.count("wandb sync ") == 1
    (run,) = runs_in(tmp_path)
    assert run.run.project == "email-agent-training" and run.run.display_name == "qwen2.5_email_search_v1"
    assert run.tags == ["ART", "GRPO", "Qwen/Qwen2.5-7B-Instruct"]
    assert run.config["max_steps_per_episode"] == 10 and run.config["batch_size"] == 8
    epochs = [row for row in run.history if "epoch" in row]
    assert [row["epoch"] for row in epochs] == [0, 1, 2, 3, 4]
    assert all(row["average_reward"] == 0.67 and row["value_loss"] == 0 for row in epochs)
    assert run.tables("episodes")[0]["columns"] == EPISODES and run.tables("actions")[0]["columns"] == ACTIONS
