"""Every public name of OpenPipe ART 0.5.23 is usable, or says why it is not."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import art_openpipe as art
from art_core.errors import ConfigError
from art_openpipe.refused import Refused

VERSION = "0.5.23"
ALL = [
    "dev",
    "current_trajectory",
    "no_capture",
    "gather_trajectories",
    "gather_trajectory_groups",
    "trajectory_group_batches",
    "Backend",
    "LocalTrainResult",
    "LoRAConfig",
    "LocalServingUnavailableError",
    "MegatronRuntimeConfig",
    "MegatronTopologyConfig",
    "MetricDefinition",
    "PipelineAutotuneConfig",
    "PipelineRuntimeConfig",
    "PIPELINE_RL_DASHBOARD_DEFAULT_METRICS",
    "PIPELINE_RL_METRIC_DEFINITIONS",
    "PIPELINE_RL_SCORE_METRICS",
    "get_megatron_runtime_config",
    "get_tokenizer",
    "init_megatron_runtime_config",
    "ServerlessBackend",
    "ServerlessTrainResult",
    "Messages",
    "MessagesAndChoices",
    "Tools",
    "Model",
    "TrainableModel",
    "retry",
    "TrainSFTConfig",
    "TrainConfig",
    "TrainResult",
    "Trajectory",
    "TrajectoryGroup",
    "tokenize",
    "tensorize",
    "trajectory",
    "trajectory_group",
    "capture_yielded_trajectory",
    "yield_trajectory",
]
"""``art.__all__`` of that version."""
REFUSED = {
    "MegatronRuntimeConfig": "LocalBackend",
    "MegatronTopologyConfig": "LocalBackend",
    "get_megatron_runtime_config": "LocalBackend",
    "init_megatron_runtime_config": "LocalBackend",
    "PipelineAutotuneConfig": "trajectory_group_batches",
    "PipelineRuntimeConfig": "trajectory_group_batches",
    "ServerlessBackend": "LocalBackend",
}
"""Name -> what its reason names instead."""
MODULES = {
    "local": "LocalBackend",
    "local.backend": "LocalBackend",
    "rewards": "ruler ruler_score_group",
    "rewards.ruler": "ruler ruler_score_group TrajectoryScore",
    "utils.iterate_dataset": "iterate_dataset",
    "utils.retry": "retry",
    "langgraph": "wrap_rollout init_chat_model",
    "metrics": "MetricDefinition",
    "model": "Model TrainableModel",
    "utils": "iterate_dataset retry limit_concurrency log_http_errors format_message get_model_step record_provenance",
    "utils.sft": "train_sft_from_file create_sft_dataset_iterator create_lr_schedule iterate_file get_file_row_count SFTChunk",
    "utils.litellm": "convert_litellm_choice_to_openai",
    "utils.deployment": "deploy_model",
    "mcp": "generate_scenarios complete_task_tool",
    "mcp.generate_scenarios": "generate_scenarios preview_scenarios",
    "utils.logging": "info step ok warn err dim",
    "utils.strip_logprobs": "strip_logprobs",
    "utils.benchmarking.charts": "training_progress_chart percentage_comparison_bar_chart",
    "utils.benchmarking.load_trajectories": "load_trajectories",
    "utils.benchmarking.types": "BenchmarkModelKey",
    "megatron": "MegatronBackend",
    "pipeline_trainer": "PipelineTrainer make_group_rollout_fn keep_recent_and_top PipelineRuntimeConfig",
    "trajectories": "Trajectory TrajectoryGroup LegacyHistory ChatCompletionsHistory TrajectoryExchanges PydanticException",
    "dev": "InternalModelConfig OpenAIServerConfig TrainConfig LoRAConfig PeftArgs get_openai_server_config",
    "serverless.backend": "ServerlessBackend",
    "tinker": "TinkerBackend",
    "tinker_native": "TinkerNativeBackend",
}
METHODS = {
    "Model": "openai_client litellm_completion_params get_inference_name register log get_step overwrite_state write_state "
    "merge_state read_state safe_model_dump backend",
    "TrainableModel": "register delete_checkpoints train_sft",
    "Trajectory": "log finish track_duration messages for_logging history histories chat_completions_history "
    "chat_completions_histories tokenize tensorize __enter__ __exit__",
    "TrajectoryGroup": "__iter__ __len__ log tokenize tensorize",
}
FIELDS = {"name": "m", "run_name": "m", "project": "p", "base_model": "tiny"}
LATER = {
    "responses_history": lambda: art.Trajectory().responses_history,
    "anthropic_messages_histories": lambda: art.Trajectory().anthropic_messages_histories,
    "compact_dump": lambda: art.TrajectoryGroup([]).compact_dump,
    "exchanges.responses": lambda: art.Trajectory().exchanges.responses,
    "reconcile_text_equivalent_tokenizations": lambda: art.Trajectory().histories(
        reconcile_text_equivalent_tokenizations=True
    ),
    "tokenizer": lambda: art.Trajectory().tokenize(tokenizer=object()),
    "metrics_builder": lambda: art.Model(name="m", project="p").metrics_builder,
    "update_wandb_config": lambda: art.Model(name="m", project="p").update_wandb_config,
    "set_cost_calculator": lambda: art.TrainableModel(**FIELDS).set_cost_calculator,
    "TrainableModel.train": lambda: art.TrainableModel(**FIELDS).train,
    "entity": lambda: art.TrainableModel(**FIELDS, entity="team"),
    "report_metrics": lambda: art.TrainableModel(**FIELDS, report_metrics=["wandb"]),
    "tinker_args": lambda: art.dev.settings_of({"tinker_args": {"renderer_name": "qwen3"}}),
    "PeftArgs": lambda: art.dev.settings_of({"peft_args": {"r": 8}}),
    "_openai_client_config": lambda: art.dev.refuse_server_config({"server_args": {"port": 1}}),
    "gpu_cost_per_hour_usd": lambda: backend(gpu_cost_per_hour_usd=2.0),
    "enable_expert_replay": lambda: backend(enable_expert_replay=False),
    "_experimental_push_to_s3": lambda: backend()._experimental_push_to_s3,
    "_experimental_fork_checkpoint": lambda: backend()._experimental_fork_checkpoint,
}


def backend(**options):
    return importlib.import_module("art_openpipe.local").LocalBackend(**options)


def test_the_names_are_those_of_the_package_and_no_others():
    assert sorted(art.__all__) == sorted(ALL) and VERSION in art.__doc__


@pytest.mark.parametrize("name", ALL)
def test_every_name_is_usable_or_refused_with_what_to_use_instead(name):
    value = getattr(art, name)
    assert isinstance(value, Refused) == (name in REFUSED)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{name} is not supported.*{REFUSED[name]}"):
            value(api_key="x")


@pytest.mark.parametrize(("module", "names"), MODULES.items())
def test_every_name_of_the_modules_is_there(module, names):
    found = importlib.import_module(f"art_openpipe.{module}")
    assert [name for name in names.split() if getattr(found, name, None) is None] == []


@pytest.mark.parametrize(("kind", "names"), METHODS.items())
def test_every_method_is_there(kind, names):
    assert [name for name in names.split() if not hasattr(getattr(art, kind), name)] == []


@pytest.mark.parametrize("name", LATER)
def test_what_art_has_not_is_refused_by_name_with_a_reason(name):
    with pytest.raises(ConfigError, match=name.rpartition(".")[2]) as error:
        LATER[name]()
    assert len(str(error.value)) > 60


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("auto_trajectory", "current_trajectory"),
        ("capture_auto_trajectory", r"art\.trajectory"),
        ("LocalBackend", r"art_openpipe\.local"),
        ("History", "LegacyHistory"),
    ],
)
def test_names_of_earlier_releases_are_told_their_replacement(name, replacement):
    with pytest.raises(AttributeError, match=replacement):
        getattr(art, name)


def test_a_name_that_nobody_has_is_told_where_to_look():
    with pytest.raises(AttributeError, match=r"from-openpipe-art\.md"):
        _ = art.Nothing


@pytest.mark.parametrize("missing", FIELDS)
def test_a_trainable_model_needs_its_names_and_has_no_others(missing):
    with pytest.raises(ValueError, match=missing):
        art.TrainableModel(**{name: value for name, value in FIELDS.items() if name != missing})
    with pytest.raises(ValueError, match="nonsense"):
        art.TrainableModel(**FIELDS, nonsense=1)


def test_metrics_are_described_by_the_names_under_which_they_are_logged():
    keys = [definition.key for definition in art.PIPELINE_RL_METRIC_DEFINITIONS]
    assert "loss/train" in keys and list(art.PIPELINE_RL_DASHBOARD_DEFAULT_METRICS) == keys
    assert art.PIPELINE_RL_SCORE_METRICS == ()
    own = art.MetricDefinition(
        key="val/win", title="Wins", description="games won", kind="ratio", higher_is_better=True
    )
    assert own.dashboard_default is False


@pytest.mark.system
def test_importing_the_package_loads_no_client_and_star_loads_all():
    code = (
        "import sys, art_openpipe; art_openpipe.redirect_clients()\n"
        "light = 'openai' not in sys.modules and 'pydantic' not in sys.modules\n"
        "from art_openpipe import *; print(light, TrainableModel.__name__, Trajectory.__name__)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "True",
        "TrainableModel",
        "Trajectory",
    ]


def test_the_extras_are_those_that_messages_name():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {"ruler", "langgraph"}


def test_the_page_says_of_every_name_what_becomes_of_it():
    page = (Path(__file__).parents[3] / "docs" / "from-openpipe-art.md").read_text()
    names = {*ALL, *(name for names in MODULES.values() for name in names.split())} - {"dev"}
    names |= {name for names in METHODS.values() for name in names.split() if not name.startswith("__")}
    names -= {"TrajectoryScore", *MODULES["utils.logging"].split()}
    assert [name for name in sorted(names) if f"`{name}" not in page and f".{name}" not in page] == []
    assert VERSION in page
