"""Names of OpenPipe ART that art does not support: they can be imported, and raise an error with the reason when used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from art_core.errors import ConfigError


class Refused:
    """An unsupported name: calling it, or looking up anything in it, raises ConfigError with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{self._name} is not supported by art: {self._reason}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self()


_LOCAL = "use LocalBackend of art_openpipe.local"
REASONS = {
    "ServerlessBackend": f"it trains at W&B's service, with an account and weights there; {_LOCAL}, or art_server.connect(url) "
    "for a GPU machine that runs 'art serve'",
    "TinkerBackend TinkerNativeBackend": f"it trains at Thinking Machines' service; {_LOCAL}",
    "MegatronBackend MegatronRuntimeConfig MegatronTopologyConfig get_megatron_runtime_config init_megatron_runtime_config": (
        f"art's own learner shares prefixes without Megatron; {_LOCAL}, whose max_tokens_per_pass= limits memory"
    ),
    "PipelineTrainer make_group_rollout_fn PipelineRuntimeConfig PipelineAutotuneConfig": "model calls wait during a training "
    "step, so a pipeline gains nothing over a loop: 'async for groups in art.trajectory_group_batches(...): await "
    "backend.train(model, groups)'; art_core.train(agent, tasks, max_staleness=4) overlaps rollouts and training",
    "deploy_model": "art does not upload to providers; 'art export RUN_FOLDER' writes the model, and the command to serve it",
    "generate_scenarios": "write the tasks yourself or with any model; art only needs a list of JSON values",
    "complete_task_tool": "an agent ends by returning; if it must say so, give it a tool of your own",
    "preview_scenarios info step ok warn err dim": "it prints to a notebook; use print",
    "load_trajectories training_progress_chart percentage_comparison_bar_chart BenchmarkModelKey": "'art view RUN_FOLDER' "
    "(art-server) shows charts and rollouts; history.jsonl and metrics.jsonl in the folder have the numbers",
    "keep_recent_and_top": "await model.delete_checkpoints(best_checkpoint_metric) keeps the newest and the best",
    "record_provenance": "LocalBackend(trackers=['wandb']) records a run's settings and checkpoints",
    "PeftArgs": "it has become TrainableModel(lora_config={...}), where r is rank, and lora_alpha, lora_dropout and "
    "init_lora_weights have lost their prefix",
    "get_openai_server_config is_dedicated_mode is_external_vllm_mode validate_dedicated_config": "art starts its engine itself; "
    "LocalBackend(engine='vllm', engine_args={...}) sets its options",
}
MODULES = {
    "serverless": "ServerlessBackend",
    "serverless.backend": "ServerlessBackend",
    "tinker": "TinkerBackend",
    "tinker_native": "TinkerNativeBackend",
    "megatron": "MegatronBackend",
    "utils.deployment": "deploy_model",
    "pipeline_trainer": "PipelineTrainer make_group_rollout_fn PipelineRuntimeConfig PipelineAutotuneConfig keep_recent_and_top",
    "mcp": "generate_scenarios complete_task_tool",
    "mcp.generate_scenarios": "generate_scenarios preview_scenarios",
    "utils.logging": "info step ok warn err dim",
    "utils.benchmarking": "",
    "utils.benchmarking.charts": "training_progress_chart percentage_comparison_bar_chart",
    "utils.benchmarking.load_trajectories": "load_trajectories",
    "utils.benchmarking.types": "BenchmarkModelKey",
}
"""Modules with nothing but refused names."""
globals().update({name: Refused(name, reason) for names, reason in REASONS.items() for name in names.split()})


def add_modules(package: str) -> None:
    """Let the modules be imported."""
    for path, names in MODULES.items():
        module = sys.modules[f"{package}.{path}"] = ModuleType(f"{package}.{path}", "Refused.")
        vars(module).update({name: globals()[name] for name in names.split()}, __path__=[], __all__=names.split())
