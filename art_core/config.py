"""The settings of a run, and where its start weights are. Knows nothing about what the settings do."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.redaction import without_keys

MODELS = "art.models"
"""Entry points of this group give the folder of a model that a distribution ships, under a name of one word."""

SMALL_MODEL = 10_000_000
"""Parameters below which one thread is right: on cores that others use too, waiting for a second one cost up to 15 times
the step; a higher learning rate is right there as well."""

LORA_FROM = 100_000_000
"""Parameters from which a LoRA adapter is trained where ``lora_rank`` does not say."""
LORA_RANK = 16
"""Of that adapter."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that shapes a run's weights or its serving. Stored in the run folder."""

    model: str = "tiny"
    """``"tiny"``, a folder with a Hugging Face causal LM, or the name of one that is in the local cache or on the hub."""
    steps: int = 20
    tasks_per_step: int = 8
    group_size: int = 8
    dynamic_sampling: bool = False
    """Whether groups without contrast are replaced by groups of other tasks (DAPO, arXiv 2503.14476, section 3.2)."""
    max_extra_rounds: int = 4
    """Of ``dynamic_sampling`` in a step, each with a task for every group that is still missing."""
    max_staleness: int = 0
    """Optimizer steps that the weights which sampled a trained call may be behind those being trained. 0: rollouts and
    learning take turns; from 1 on, rollouts of up to so many later steps run meanwhile."""
    seed: int = 0
    temperature: float = 1.0
    """Of every training rollout, whatever the agent asks for: at temperature 0 a group has nothing to compare."""
    max_concurrent: int = 64
    """Rollouts running at the same time."""
    max_concurrent_scores: int = 16
    """Groups being scored at the same time."""
    rollout_timeout: float | None = 600.0
    """Seconds until a run of the agent counts as failed; None waits for ever."""
    call_timeout: float | None = 600.0
    """Seconds that the engine may take to answer a model call, streaming between two chunks; None waits for ever."""
    score_timeout: float | None = 1800.0
    """Seconds that the scoring of a group may take; its runs are then unscored. None waits for ever."""
    engine_timeout: float | None = 3600.0
    """Seconds that the engine may take to start, to take new weights, or for any other order, before the run ends; None waits
    for ever."""
    tracker_timeout: float = 60.0
    """Seconds that the trackers have at a run's end to send what is left; then they are left behind."""
    watchdog_seconds: float | None = 300.0
    """Seconds in which nothing has ended, after which it is said what the run waits for; None: never."""
    learning_rate: float | None = None
    """Peak of AdamW's; None: 1e-4 for LoRA, 5e-4 for full fine-tuning of models under 10M parameters, else 1e-5."""
    warmup_steps: int = 3
    max_grad_norm: float = 1.0
    max_tokens_per_pass: int | None = None
    """Tokens whose activations the learner keeps at a time: trees are put together up to this many, and a larger one is
    computed in pieces, twice. A model that cannot be computed in pieces says so. None: what a quarter of the memory
    holds, by an estimate."""
    lora_rank: int | None = None
    """0 trains all weights; None: all weights below 100M parameters, else LoRA of rank 16."""
    load_in_4bit: bool | None = None
    """With ``learner="unsloth"`` on a GPU: the frozen weights in 4 bits. None: only where they would take more than half of
    the GPU's memory in 16."""
    kl: float = 0.0
    """Coefficient of the KL term towards the start weights; 0 leaves the reference model out altogether."""
    advantage: str = "mean_std"
    """``mean_std``: (reward - mean) / std of the group; ``mean``: reward - mean; ``leave_one_out``: reward - mean of the
    others."""
    importance_cap: float | None = None
    """Truncates each target's ratio of the learner's probability, before the update, to the engine's (2 is usual); None:
    the loss itself compares the new weights with the engine's logprobs."""
    overlong: str | None = None
    """Calls that were cut off at their token limit: ``train`` or ``drop`` them; None: what the loss asks for (dapo drops)."""
    max_context: int | None = None
    """Prompt plus answer, in tokens; None: what the model's config says."""
    max_tokens: int = 512
    """Of one answer, where the agent asks for none."""
    max_flat_groups: int | None = 160
    """Groups in a row, counted step by step, of which none had contrast, after which training ends; None: never. Groups and not
    steps: one task a step that is seldom solved gives many flat steps in a row."""
    max_unscored_steps: int | None = 3
    """Steps in a row in which no run could be scored, and no call, after which training ends; None: never."""
    collapse_steps: int | None = 10
    """Training ends where the mean reward of so many steps has fallen far below the best of so many earlier ones
    (``guards.collapse``); None: never."""
    max_logprob_gap: float | None = 1.0
    """Mean distance, in nats a token, between the learner's logprobs and those recorded, above which three steps in a row end
    training; None: no bound."""
    max_kl: float | None = None
    """The same for the divergence from the start weights, which is measured where ``kl`` is above 0; None: no bound."""
    checkpoint_every: int = 1
    keep_checkpoints: int | None = 3
    """The newest are kept; None keeps all, which lets every stored call be recomputed with its own weights."""
    host: str = "127.0.0.1"
    port: int = 0
    """Where agents reach the policy; 0 takes a free port."""
    threads: int | None = None
    """Of torch, in the serving process and in the learner; None: 1 for models under 10M parameters, else torch's default."""
    tool_parser: str | None = None
    """The format of the model's tool calls, by vLLM's names (``hermes``, ``llama3_json``, ...); None: what suits the model."""
    reasoning_parser: str | None = None
    """The format of the model's thinking, by vLLM's names (``qwen3``, ...), which is then answered as ``reasoning_content``;
    ``none``: it stays in the content; None: what suits the model."""
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Command-line options for an engine with a server of its own, such as ``{"gpu-memory-utilization": 0.5}``."""
    learner_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options for a learner of a plugin, such as ``{"processes": 8, "sharding": "fsdp"}`` with ``learner="ray"``."""
    executor_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options for an executor of a plugin, such as ``{"workers": 16}`` with ``executor="ray"``."""
    passthrough: tuple[str, ...] = ()
    """Model names that the policy does not answer."""
    train_nodes: tuple[str, ...] = ()
    """Nodes or agents whose calls are trained, as ``Call.made_by`` takes them; empty: all."""
    other_nodes: str = "frozen"
    """Who answers the calls that ``train_nodes`` leaves out. ``frozen``: the start weights, or ``frozen_model``; ``policy``:
    the weights of the moment; ``passthrough``: whoever the agent asks, unrecorded."""
    frozen_model: str | None = None
    """A model folder, a Hugging Face name, or the address of a server (``http://HOST:PORT/v1``); None: the start weights."""
    allow_changes: bool = False
    """Whether a run that was begun with other settings, or another agent, tasks or reward, continues with those that are
    passed; else it is refused. The changes are recorded."""
    command: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What ``art train`` was given and where, for ``art train --resume``; empty where a script began the run."""


LEAST = {
    "steps": 1, "tasks_per_step": 1, "group_size": 1, "max_extra_rounds": 0, "max_staleness": 0, "seed": 0, "temperature": 0,
    "max_concurrent": 1, "max_concurrent_scores": 1, "rollout_timeout": 0, "call_timeout": 0, "score_timeout": 0,
    "engine_timeout": 0, "tracker_timeout": 0, "watchdog_seconds": 0, "learning_rate": 0, "warmup_steps": 0,
    "max_grad_norm": 0, "lora_rank": 0, "kl": 0, "max_context": 1, "max_tokens": 1, "max_tokens_per_pass": 1,
    "checkpoint_every": 1, "keep_checkpoints": 1, "port": 0, "threads": 1, "importance_cap": 1, "max_flat_groups": 1,
    "max_unscored_steps": 1, "collapse_steps": 2, "max_logprob_gap": 0, "max_kl": 0,
}  # fmt: skip
"""The smallest value of every setting that is a number."""
FRACTIONS = {
    "temperature", "rollout_timeout", "call_timeout", "score_timeout", "engine_timeout", "tracker_timeout", "watchdog_seconds",
    "learning_rate", "max_grad_norm", "kl", "importance_cap", "max_logprob_gap", "max_kl",
}  # fmt: skip
PARTS = ("loss", "learner", "engine", "executor", "plugins")
"""What a run is made of beside its config: keywords of ``train`` and ``open_run``."""
CHOICES = {
    "advantage": ("mean_std", "mean", "leave_one_out"),
    "overlong": (None, "train", "drop"),
    "other_nodes": ("frozen", "policy", "passthrough"),
}
"""The values of every setting that is a name."""
EXAMPLES = {
    "engine_args": '{"gpu-memory-utilization": 0.5, "enforce-eager": true}',
    "learner_args": '{"processes": 8, "sharding": "fsdp"}',
    "executor_args": '{"workers": 16}',
}
"""Every setting that is a dict of options, as it is written on the command line."""


def make_config(settings: Mapping[str, Any], caller: Callable[..., Any] | None = None, **known: Any) -> TrainConfig:
    """Return the config; ConfigError for a keyword that is none of its fields, with the nearest that is, also of ``caller``."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in settings:
        if name not in names:
            known_to_caller = inspect.signature(caller).parameters.values() if caller else ()
            others = [it.name for it in known_to_caller if it.kind is not it.VAR_KEYWORD] or PARTS
            near = [] if name in PARTS else difflib.get_close_matches(name, [*names, *others], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names)}"
            raise ConfigError(f"{name!r} is not a setting of a run{hint}")
    values = {**known, **settings}
    for name in ("passthrough", "train_nodes"):
        given = values.get(name) or ()
        values[name] = (given,) if isinstance(given, str) else tuple(given)
    for name, least in LEAST.items():
        value = values.get(name)
        kind = int | float if name in FRACTIONS else int
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not value >= least):
            number = "a number" if name in FRACTIONS else "a whole number"
            raise ConfigError(f"{name}={value!r} cannot be used; give {number} of at least {least}")
    config = TrainConfig(**values)
    _check_flags(config)
    _check_together(config, values)
    return config


def _check_flags(config: TrainConfig) -> None:
    for name in ("dynamic_sampling", "allow_changes"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r} cannot be used; pass True or False")


def _check_together(config: TrainConfig, values: Mapping[str, Any]) -> None:
    """Refuse what no single number shows."""
    for name in CHOICES:
        check_choice(name, getattr(config, name))
    if config.frozen_model is not None and not (config.train_nodes and config.other_nodes == "frozen"):
        raise ConfigError(
            f"frozen_model={without_keys(repr(config.frozen_model))} answers the nodes that train_nodes= leaves out, with "
            "other_nodes='frozen'; give train_nodes=, or leave it out"
        )
    if config.max_kl is not None and not config.kl:
        raise ConfigError(
            f"max_kl={config.max_kl}: the divergence from the start weights is measured where kl= is above 0; give a small one, "
            "such as kl=1e-4, or leave max_kl out"
        )
    for name, example in EXAMPLES.items():
        if not isinstance(getattr(config, name), Mapping):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} cannot be used; give a dict of options, on the command line as JSON: "
                f"--set '{name}={example}'"
            )
    if config.tracker_timeout is None:
        raise ConfigError("tracker_timeout=None would let a tracker keep a run from ending; give a number of seconds")
    if config.group_size == 1 and "group_size" in values:
        raise ConfigError("group_size=1 has nothing to compare a run with; give at least 2 (8 is usual)")
    if config.temperature <= 0:
        raise ConfigError(f"temperature={config.temperature}: training samples, so it must be above 0 (1.0 is usual)")


def check_choice(name: str, value: object) -> None:
    """Raise ConfigError where ``value`` is none of the ``CHOICES`` of the setting ``name``."""
    if value not in CHOICES[name]:
        *others, last = (repr(choice) for choice in CHOICES[name])
        raise ConfigError(f"{name}={value!r} is unknown; use {', '.join(others)} or {last}")


@functools.cache
def shipped_model(name: str) -> Path | None:
    """Return the folder of a model that an installed distribution ships under ``name``; None if there is none."""
    return next((entry.load() for entry in importlib.metadata.entry_points(group=MODELS, name=name)), None)


def model_folder(model: str) -> str:
    """Return the folder of ``model``, or its hub name where it is not a folder.

    Raises ConfigError for a path that is not a model folder.
    """
    if (shipped := shipped_model(model)) is not None:
        return str(shipped)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} is a folder without config.json, so it is not a Hugging Face model; "
                "give a folder that save_pretrained wrote, or model='tiny'"
            )
        return str(path)
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or path.parent.is_dir():
        raise ConfigError(
            f"there is no model folder {model}; give an existing folder, a Hugging Face name such as "
            "'Qwen/Qwen2.5-0.5B-Instruct', or 'tiny', which comes with the embedded engine"
        )
    return model


def weights_hash(folder: str | Path) -> str:
    """Return the SHA-256 of the safetensors files in ``folder``, in the order of their names; of the name if no folder."""
    digest = hashlib.sha256()
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        digest.update(str(folder).encode())
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_tasks(tasks: Sequence[Any], name: str = "tasks") -> None:
    """Raise ConfigError where there is nothing to run, or what is no list of tasks."""
    if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Sequence):
        file = "; 'art train' on the command line takes a file of tasks" if isinstance(tasks, str) else ""
        raise ConfigError(f"{name} is {tasks!r:.80}, and must be a list, one task per item (any JSON-able value){file}")
    if len(tasks) == 0:
        raise ConfigError(f"{name}: the task list is empty; give at least one task (any JSON-able value)")
