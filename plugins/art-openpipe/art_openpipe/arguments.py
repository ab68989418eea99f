"""Translates OpenPipe ART's arguments of ``backend.train`` into art's settings, and refuses by name those that art lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from art_core import losses
from art_core.errors import ConfigError
from art_core.types import Loss

USUAL = {
    "learning_rate": None, "loss_fn": "cispo", "loss_fn_config": None, "normalize_advantages": True, "adam_params": None,
    "kl_penalty_coef": 0.0, "kl_penalty_reference_step": None, "kl_ref_adapter_path": None,
    "kl_penalty_source": "current_learner", "epsilon": None, "epsilon_high": None, "advantage_balance": 0.0,
    "scale_rewards": True, "importance_sampling_level": "token", "max_negative_advantage_importance_sampling_weight": None,
    "mask_prob_ratio": False, "kimi_k2_tau": None, "precalculate_logprobs": False, "allow_training_without_logprobs": False,
    "plot_tensors": False, "truncated_importance_sampling": None, "scale_learning_rate_by_reward_std_dev": False,
    "logprob_calculation_chunk_size": 1024, "packed_sequence_length": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0, "save_checkpoint": True, "optimizer_save_interval": 5,
    "final_training_step": None, "grad_accumulation_sequences": None, "verbose": False,
}  # fmt: skip
"""Every argument with OpenPipe ART's default, except that learning_rate=None is art's default for the model's size."""
REFUSED = {
    "loss_fn_config": "OpenPipe ART rejects it as well; use epsilon and epsilon_high",
    "adam_params": "art's AdamW has betas 0.9 and 0.95; LocalBackend(warmup_steps=, max_grad_norm=) can be set",
    "kl_ref_adapter_path": "the reference of the KL term is the start weights; remove it",
    "kl_penalty_reference_step": "the reference of the KL term is the start weights; remove it",
    "kl_penalty_source": "the KL term is that of the learner; remove it",
    "optimizer_save_interval": "the optimizer's state is saved with every checkpoint; remove it",
    "final_training_step": "the last step is saved when the backend is closed; remove it",
    "advantage_balance": "remove it; LocalBackend(advantage='leave_one_out') is another baseline",
    "max_negative_advantage_importance_sampling_weight": "use truncated_importance_sampling, which caps all weights",
    "mask_prob_ratio": "use loss_fn='cispo', which keeps every token's gradient, or 'ppo', which clips",
    "kimi_k2_tau": "use loss_fn='cispo' or 'ppo'",
    "precalculate_logprobs": "use truncated_importance_sampling=2.0, which compares with the learner's own logprobs",
    "allow_training_without_logprobs": "every call that art recorded has logprobs; remove it",
    "plot_tensors": "'art view RUN_FOLDER' (art-server) shows groups, trajectories and tokens",
    "scale_learning_rate_by_reward_std_dev": "pass learning_rate= for this step",
    "packed_sequence_length": "LocalBackend(max_tokens_per_pass=) limits the tokens of a pass without dropping any",
    "num_trajectories_learning_rate_multiplier_power": "pass learning_rate= for this step",
    "grad_accumulation_sequences": "art takes one optimizer step over all trajectories of a call",
}
"""Unsupported argument -> what to use instead."""
OF_LOSS = ("loss_fn", "importance_sampling_level", "epsilon", "epsilon_high")
CLIPS = {"ppo": (0.2, 0.2), "cispo": (1.0, 4.0)}


@dataclass(frozen=True)
class Settings:
    """art's settings of one training step."""

    loss: Loss
    loss_given: bool  # whether the step itself changes the loss
    learning_rate: float | None
    of_run: dict[str, Any]  # fields of the run's config that may differ from step to step
    of_learner: dict[str, Any]  # fields of the run's config that are fixed once the learner is loaded


def settings(arguments: Mapping[str, Any], own: Mapping[str, Any]) -> Settings:
    """Return art's settings of one step; missing arguments default to ``own``, the backend's settings."""
    for name, value in arguments.items():
        if name not in USUAL:
            raise ConfigError(f"backend.train has no argument {name!r}; its arguments: {', '.join(USUAL)}")
        if name in REFUSED and value != USUAL[name]:
            raise ConfigError(f"{name}={value!r} is not supported by art: {REFUSED[name]}")
    complete = {**USUAL, **arguments}
    of_run = {name: own[name] for name in ("advantage", "checkpoint_every")}
    if {"normalize_advantages", "scale_rewards"} & arguments.keys():
        of_run["advantage"] = "mean_std" if complete["normalize_advantages"] and complete["scale_rewards"] else "mean"
    if "save_checkpoint" in arguments:  # if False, only the last step's is saved, when the run is closed
        of_run["checkpoint_every"] = 1 if arguments["save_checkpoint"] else 2**31
    of_learner = {name: own[name] for name in ("kl", "importance_cap")}
    if "kl_penalty_coef" in arguments:
        of_learner["kl"] = float(arguments["kl_penalty_coef"] or 0.0)
    if "truncated_importance_sampling" in arguments:
        of_learner["importance_cap"] = arguments["truncated_importance_sampling"]
    keywords = {name: value for name, value in of_learner.items() if value}
    theirs = any(arguments.get(name) is not None for name in OF_LOSS)
    loss_given = theirs or bool({"kl_penalty_coef", "truncated_importance_sampling"} & arguments.keys())
    loss = partial(_loss(complete) if theirs or own["loss"] is None else own["loss"], **keywords)
    return Settings(loss, loss_given, complete["learning_rate"], of_run, of_learner)


def _loss(arguments: Mapping[str, Any]) -> Loss:
    name, level = arguments["loss_fn"], arguments["importance_sampling_level"]
    if name not in CLIPS:
        raise ConfigError(f"unknown loss_fn={name!r}; use 'cispo' or 'ppo'")
    if level not in ("token", "sequence") or (level == "sequence" and name == "cispo"):
        instead = "use 'token', or 'sequence' with loss_fn='ppo' (GSPO)"
        raise ConfigError(f"importance_sampling_level={level!r} with {name!r} is not supported by art; {instead}")
    if level == "sequence":
        loss, low, high = losses.gspo, 3e-4, 4e-4
    else:
        loss, (low, high) = (losses.grpo if name == "ppo" else losses.cispo), CLIPS[name]
    epsilon, above = arguments["epsilon"], arguments["epsilon_high"]
    if epsilon is not None:
        low, high = epsilon, high if name == "cispo" else epsilon
    return partial(loss, clip_low=low, clip_high=high if above is None else above)
