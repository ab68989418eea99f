"""Every public name of OpenPipe ART is there, or says why it is not."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import art_openpipe as art
from art_core.errors import ConfigError

TOP = """dev auto_trajectory capture_auto_trajectory gather_trajectories gather_trajectory_groups trajectory_group_batches Backend
LocalBackend LocalTrainResult ServerlessBackend ServerlessTrainResult Messages MessagesAndChoices Tools Model TrainableModel retry
TrainSFTConfig TrainConfig TrainResult Trajectory TrajectoryGroup capture_yielded_trajectory yield_trajectory"""
MODULES = {
    "local": "LocalBackend",
    "local.backend": "LocalBackend",
    "rewards": "ruler ruler_score_group TrajectoryScore Response DEFAULT_RUBRIC",
    "langgraph": "wrap_rollout init_chat_model",
    "pipeline_trainer": "PipelineTrainer make_group_rollout_fn keep_recent_and_top",
    "utils": "iterate_dataset retry limit_concurrency log_http_errors format_message get_model_step",
    "utils.sft": "train_sft_from_file create_sft_dataset_iterator",
    "utils.litellm": "convert_litellm_choice_to_openai",
    "utils.deployment": "deploy_model",
    "mcp": "generate_scenarios complete_task_tool",
    "trajectories": "Trajectory TrajectoryGroup History PydanticException",
    "dev": "InternalModelConfig OpenAIServerConfig TrainConfig",
    "serverless.backend": "ServerlessBackend",
    "tinker": "TinkerBackend",
    "skypilot": "SkyPilotBackend",
}
METHODS = {
    "Model": "openai_client litellm_completion_params get_inference_name register log get_step overwrite_state write_state "
    "merge_state read_state update_wandb_config metrics_builder activate_metrics_context safe_model_dump",
    "TrainableModel": "register delete_checkpoints train_sft set_cost_calculator train",
    "Trajectory": "log finish track_duration messages for_logging",
    "TrajectoryGroup": "__iter__ __len__ log",
    "LocalBackend": "register train close",
}
REFUSED = {
    "ServerlessBackend": lambda: art.ServerlessBackend(api_key="x"),
    "tinker": lambda: importlib.import_module("art_openpipe.tinker").TinkerBackend(),
    "deploy_model": lambda: importlib.import_module("art_openpipe.utils.deployment").deploy_model("together"),
    "generate_scenarios": lambda: importlib.import_module("art_openpipe.mcp").generate_scenarios(tools=[]),
    "complete_task_tool": lambda: importlib.import_module("art_openpipe.mcp").complete_task_tool(),
    "keep_recent_and_top": lambda: importlib.import_module("art_openpipe.pipeline_trainer").keep_recent_and_top(3),
    "_experimental_push_to_s3": lambda: art.LocalBackend()._experimental_push_to_s3,
    "_experimental_pull_from_s3": lambda: art.LocalBackend()._experimental_pull_from_s3,
    "_experimental_fork_checkpoint": lambda: art.LocalBackend()._experimental_fork_checkpoint,
    "metrics_builder": lambda: art.Model(name="m", project="p").metrics_builder("train"),
    "set_cost_calculator": lambda: art.TrainableModel(name="m", project="p", base_model="tiny").set_cost_calculator(0),
    "_internal_config": lambda: art.dev.settings_of({"tinker_args": {"renderer_name": "qwen3"}}),
    "_openai_client_config": lambda: art.dev.refuse_server_config({"server_args": {"port": 1}}),
    "gpu_cost_per_hour_usd": lambda: art.LocalBackend(gpu_cost_per_hour_usd=2.0),
    "skypilot": lambda: importlib.import_module("art_openpipe.skypilot").SkyPilotBackend(),
}


@pytest.mark.parametrize("name", TOP.split())
def test_every_name_of_the_package_is_there(name):
    assert getattr(art, name) is not None and name in art.__all__


@pytest.mark.parametrize(("module", "names"), MODULES.items())
def test_every_name_of_the_modules_is_there(module, names):
    found = importlib.import_module(f"art_openpipe.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(("kind", "names"), METHODS.items())
def test_every_method_is_there(kind, names):
    assert [name for name in names.split() if not hasattr(getattr(art, kind), name)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_art_has_not_is_refused_with_a_reason(name):
    with pytest.raises(ConfigError) as error:
        REFUSED[name]()
    assert len(str(error.value)) > 60


def test_a_name_that_nobody_has_is_told_where_to_look():
    with pytest.raises(AttributeError, match=r"from-openpipe-art\.md"):
        _ = art.Nothing


@pytest.mark.system
def test_importing_the_package_loads_no_client_and_star_loads_all():
    code = (
        "import sys, art_openpipe; light = 'openai' not in sys.modules and 'pydantic' not in sys.modules\n"
        "from art_openpipe import *; print(light, LocalBackend.__name__, Trajectory.__name__)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "True",
        "LocalBackend",
        "Trajectory",
    ]


def test_the_extras_are_those_that_messages_name():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {"ruler", "langgraph"}


def test_the_page_says_of_every_name_what_becomes_of_it():
    page = (Path(__file__).parents[3] / "docs" / "from-openpipe-art.md").read_text()
    names = {name for it in (TOP, *MODULES.values(), *METHODS.values()) for name in it.split()}
    said = {"ServerlessTrainResult": "ServerlessBackend", "DEFAULT_RUBRIC": "ruler", "TrajectoryScore": "ruler"}
    said |= {"Response": "ruler", "OpenAIServerConfig": "_openai_client_config", "generate_scenarios": "art.mcp"}
    said |= {"complete_task_tool": "art.mcp", "__iter__": "TrajectoryGroup", "__len__": "TrajectoryGroup"}
    said |= dict.fromkeys(["finish", "track_duration", "for_logging"], "all fields and methods")
    assert [name for name in sorted(names) if said.get(name, name) not in page] == []
