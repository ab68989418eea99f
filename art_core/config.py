"""The settings of a run, each with the values it accepts, and where the start weights are."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError

MODELS = "art.models"
"""Entry points of this group give the folder of a model under a name of one word: a path, or a function that returns it."""
MODEL_FILES = "art.model_files"
"""Entry points of this group, named by a file's suffix, turn such a file, or a folder that has one, into a model folder."""
LIVE = "live"
"""The ``model`` of an evaluation whose calls the agent's own providers answer, and the engine that records them."""
PRETRAINED_FROM, SMALL_BELOW = 10_000_000, 1_000_000_000
"""Parameters: pretrained models between these sizes are small ones, for which other defaults hold."""
PARTS = ("loss", "learner", "engine", "executor", "plugins")
"""Keywords of ``train`` and ``open_run`` beside the config: what a run is made of."""


def at_least(least: float, default: float | None) -> Any:
    """Return the field of a number that must be at least ``least``; the annotation says whether it may have a fraction."""
    return dataclasses.field(default=default, metadata={"least": least})


def one_of(*choices: str | None, default: str | None) -> Any:
    """Return the field of a setting with these values."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def options(example: str) -> Any:
    """Return the field of a dict of options, with an example as it is written on the command line."""
    return dataclasses.field(default_factory=dict, metadata={"example": example})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that shapes a run's weights or its serving. Stored in the run folder."""

    model: str = "tiny"
    """A shipped model such as ``"tiny"``, a folder with a Hugging Face causal LM, or a name in the local cache or on the hub."""
    steps: int = at_least(1, 20)
    """Optimizer steps."""
    tasks_per_step: int = at_least(1, 8)
    group_size: int = at_least(1, 8)
    """Rollouts per task."""
    dynamic_sampling: bool = False
    """Replace groups without contrast by groups of other tasks (DAPO, arXiv 2503.14476, section 3.2)."""
    max_extra_rounds: int = at_least(0, 4)
    """Extra rounds of ``dynamic_sampling`` in a step, each with one task for every group that is still missing."""
    max_staleness: int = at_least(0, 0)
    """Optimizer steps by which the weights that sampled a trained call may be older than those being trained. 0: rollouts and
    learning take turns; from 1 on, rollouts of up to that many later steps run meanwhile."""
    seed: int = at_least(0, 0)
    temperature: float | None = at_least(0, None)
    """Of every training rollout, whatever the agent asks for: at temperature 0 a group has nothing to compare. None: 0.6 for a
    pretrained model of less than 1B parameters, which samples nonsense too often at 1 to learn from it, else 1.0."""
    max_temperature: float | None = at_least(0, None)
    """The temperature rises by 0.05 up to this after each step whose entropy is below half of the first steps': a policy that has
    become sure of itself has groups without contrast. None: 1.0 if ``temperature`` is 0.6 by default, else it stays."""
    max_concurrent: int = at_least(1, 64)
    """Rollouts running at the same time."""
    max_concurrent_scores: int = at_least(1, 16)
    """Groups being scored at the same time."""
    rollout_timeout: float | None = at_least(0, 600.0)
    """Seconds until a rollout counts as failed; None: no limit."""
    call_timeout: float | None = at_least(0, 600.0)
    """Seconds for the engine to answer a model call, or between two chunks of a stream; None: no limit."""
    score_timeout: float | None = at_least(0, 1800.0)
    """Seconds for scoring a group; its rollouts are unscored afterwards. None: no limit."""
    engine_timeout: float | None = at_least(0, 3600.0)
    """Seconds for the engine to start, to load new weights, or for any other command before the run ends; None: no limit."""
    tracker_timeout: float = at_least(0, 60.0)
    """Seconds for the trackers to send the rest at the end of a run; they are abandoned afterwards."""
    watchdog_seconds: float | None = at_least(0, 300.0)
    """Seconds without progress after which the log says what the run waits for; None: never."""
    learning_rate: float | None = at_least(0, None)
    """Peak learning rate of AdamW; None: for LoRA 5e-4 below 1B parameters, else 1e-4; for full fine-tuning 5e-4 below 10M
    parameters, else 1e-5."""
    warmup_steps: int = at_least(0, 3)
    decay_steps: int | None = at_least(0, None)
    """Last steps over which the learning rate falls linearly, to 1 / (decay_steps + 1) of its peak at the last one. None: 10 for
    a pretrained model of less than 1B parameters, else 0."""
    max_grad_norm: float = at_least(0, 1.0)
    """Longer gradients are cut to this norm; 0: none are."""
    max_tokens_per_pass: int | None = at_least(1, None)
    """Tokens whose activations the learner keeps at a time. Trees are packed up to this size; a larger tree is computed in
    pieces, twice, or as a whole if the model can't be computed in pieces. None: about what a quarter of the memory holds."""
    lora_rank: int | None = at_least(0, None)
    """0 trains all weights; None: all weights below 100M parameters, else LoRA of rank 16."""
    load_in_4bit: bool | None = None
    """With ``learner="unsloth"`` on a GPU: keep the frozen weights in 4 bits. None: only if they would take more than half of the
    GPU's memory in 16 bits."""
    kl: float = at_least(0, 0.0)
    """Coefficient of the KL term towards the teacher, or without one towards the start weights; 0: no such term."""
    teacher: str | None = None
    """A model folder or a Hugging Face name, with the model's tokenizer, for ``loss="distill"`` and ``kl``."""
    advantage: str = one_of("mean_std", "mean", "leave_one_out", "branch", default="mean_std")
    """``mean_std``: (reward - mean) / std of the group; ``mean``: reward - mean; ``leave_one_out``: reward - mean of the
    others; ``branch``: each call's, against the rollouts that shared its context."""
    importance_cap: float | None = at_least(1, None)
    """Truncates each target's ratio of the learner's probability, before the update, to the engine's (2 is usual); None:
    the loss itself compares the new weights with the engine's logprobs."""
    overlong: str | None = one_of(None, "train", "drop", default=None)
    """Calls that were cut off at their token limit: ``train`` or ``drop`` them; None: as the loss prefers (dapo drops)."""
    max_context: int | None = at_least(1, None)
    """Prompt plus answer, in tokens; None: the limit in the model's config."""
    max_tokens: int = at_least(1, 512)
    """Of one answer, if the agent sets no limit."""
    max_flat_groups: int | None = at_least(1, 160)
    """Consecutive groups without contrast, counted step by step, after which training ends; None: never. Groups and not steps:
    one task per step that is seldom solved gives many flat steps in a row."""
    max_unscored_steps: int | None = at_least(1, 3)
    """Consecutive steps in which no rollout and no call could be scored, after which training ends; None: never."""
    collapse_steps: int | None = at_least(2, 10)
    """Training ends if the mean reward of that many steps has fallen far below the best of as many earlier ones
    (``stopping.collapse``); None: never."""
    max_logprob_gap: float | None = at_least(0, 1.0)
    """Mean distance, in nats per token, between the learner's logprobs and the recorded ones; three consecutive steps above it
    end training. None: no bound."""
    max_kl: float | None = at_least(0, None)
    """The same for the divergence from the start weights, which is measured if ``kl`` is above 0; None: no bound."""
    checkpoint_every: int = at_least(1, 1)
    keep_checkpoints: int | None = at_least(1, 3)
    """The newest ones are kept; None keeps all, so that every stored call can be recomputed with its own weights."""
    host: str = "127.0.0.1"
    port: int = at_least(0, 0)
    """Where agents reach the policy; 0 takes a free port."""
    threads: int | None = at_least(1, None)
    """Of torch, in the serving process and in the learner; None: 1 for models under 10M parameters, else torch's default."""
    tool_parser: str | None = None
    """Format of the model's tool calls, by vLLM's names (``hermes``, ``llama3_json``, ...); None: what suits the model."""
    tool_format: str | None = one_of(None, "hermes", "none", default=None)
    """How tools are written into the prompt: None leaves it to the chat template, or, if that has no tools, is ``hermes``."""
    reasoning_parser: str | None = None
    """Format of the model's thinking, by vLLM's names (``qwen3``, ...), which is then answered as ``reasoning_content``;
    ``none`` leaves it in the content; None: what suits the model."""
    engine_args: Mapping[str, Any] = options('{"gpu-memory-utilization": 0.5, "enforce-eager": true}')
    """Command-line options for an engine with a server of its own."""
    learner_args: Mapping[str, Any] = options('{"processes": 8, "sharding": "fsdp"}')
    """Options for a learner of a plugin."""
    executor_args: Mapping[str, Any] = options('{"workers": 16}')
    """Options for an executor of a plugin."""
    passthrough: tuple[str, ...] = ()
    """Model names that the policy doesn't answer."""
    train_nodes: tuple[str, ...] = ()
    """Nodes or agents whose calls are trained, in the form of ``Call.made_by``; empty: all."""
    other_nodes: str = one_of("frozen", "policy", "passthrough", default="frozen")
    """Who answers the calls that ``train_nodes`` leaves out. ``frozen``: the start weights, or ``frozen_model``; ``policy``:
    the current weights; ``passthrough``: whoever the agent asks, unrecorded."""
    frozen_model: str | None = None
    """A model folder, a Hugging Face name, or the address of a server (``http://HOST:PORT/v1``); None: the start weights."""
    allow_changes: bool = False
    """Continue a run that was started with other settings, or another agent, tasks or reward, with those that are passed; without
    it, it is refused. The changes are recorded."""
    command: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The arguments and folder of ``art train``, for ``art train --resume``; empty if a script began the run."""

    def rate_share(self, update: int, step: int | None = None) -> float:
        """Return the learning rate of an optimizer update as a share of its peak: warm-up, constant, decay (arXiv 2404.06395).

        ``update`` is its number, ``step`` the run's step that it is taken in, both from 1; None: they are the same.
        """
        left = max(1, self.steps + 1 - (update if step is None else step))
        return min(1.0, update / max(1, self.warmup_steps), left / (min(self.decay_steps or 0, self.steps) + 1))


FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def make_config(settings: Mapping[str, Any], caller: Callable[..., Any] | None = None, **known: Any) -> TrainConfig:
    """Return the config. Raises ConfigError for an unknown setting, with the nearest known one, and for an invalid value."""
    for name in [name for name in settings if name not in FIELDS]:
        caller_keywords = inspect.signature(caller).parameters.values() if caller else ()
        others = [p.name for p in caller_keywords if p.kind is not p.VAR_KEYWORD] or PARTS
        near = [] if name in PARTS else difflib.get_close_matches(name, [*FIELDS, *others], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the settings are: {', '.join(FIELDS)}"
        raise ConfigError(f"{name!r} is not a setting of a run{hint}")
    values = {**known, **settings}
    for name in ("passthrough", "train_nodes"):
        names = values.get(name) or ()
        values[name] = (names,) if isinstance(names, str) else tuple(names)
    for name, value in values.items():
        _check_value(FIELDS[name], value)
    config = TrainConfig(**values)
    _check_together(config, values)
    return config


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    least, name = field.metadata.get("least"), field.name
    fraction, optional = "float" in str(field.type), "None" in str(field.type)
    if least is not None and not (value is None and (optional or name == "tracker_timeout")):
        kind = int | float if fraction else int
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            raise ConfigError(f"{name} must be {'a number' if fraction else 'an integer'} >= {least}, got {value!r}")
    if "choices" in field.metadata and value not in (choices := field.metadata["choices"]):
        *others, last = map(repr, choices)
        raise ConfigError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    if field.type == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    if "example" in field.metadata and not isinstance(value, Mapping):
        example = field.metadata["example"]
        raise ConfigError(
            f"{name} must be a dict of options, got {value!r}; on the command line write JSON: --set '{name}={example}'"
        )


def _check_together(config: TrainConfig, values: Mapping[str, Any]) -> None:
    """Refuse what no single value shows."""
    if config.frozen_model is not None and not (config.train_nodes and config.other_nodes == "frozen"):
        raise ConfigError(
            "frozen_model= answers the nodes that train_nodes= leaves out, with other_nodes='frozen'; pass "
            "train_nodes=, or drop frozen_model="
        )
    if config.max_kl is not None and (config.teacher or not config.kl):
        raise ConfigError(
            f"max_kl={config.max_kl}: the divergence from the start weights is measured if kl= is above 0 and teacher= is unset; "
            "pass a small kl=, such as 1e-4, and no teacher=, or drop max_kl="
        )
    if config.tracker_timeout is None:
        raise ConfigError("tracker_timeout=None would let a tracker keep a run from ending; pass a number of seconds")
    if config.group_size == 1 and "group_size" in values:
        raise ConfigError("group_size=1 leaves nothing to compare a rollout with; pass at least 2 (8 is usual)")
    if config.temperature is not None and config.temperature <= 0:
        raise ConfigError(
            f"temperature={config.temperature}: training samples, so it must be above 0 (0.6 to 1.0 is usual)"
        )


def check_settings(settings: Mapping[str, Any], caller: Callable[..., Any]) -> None:
    """Raise ConfigError for a keyword of ``caller`` that ``open_run`` doesn't accept, or for a wrong value of a setting."""
    make_config({name: value for name, value in settings.items() if name not in (*PARTS, "run_dir")}, caller)


@functools.cache
def shipped_model(name: str) -> Path | None:
    """Return the folder of a model that an installed distribution provides under ``name``; None if there is none."""
    folder = next((entry.load() for entry in importlib.metadata.entry_points(group=MODELS, name=name)), None)
    return folder() if callable(folder) else folder


def model_folder(model: str) -> str:
    """Return the folder of ``model``, or its hub name. Raises ConfigError for a path that is not a model folder."""
    if (shipped := shipped_model(model)) is not None:
        return str(shipped)
    if model == LIVE:
        return LIVE
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    suffixes = {file.suffix for file in ([path] if path.is_file() else path.glob("*.*"))}
    for entry in importlib.metadata.entry_points(group=MODEL_FILES):
        if f".{entry.name}" in suffixes:
            return str(entry.load()(path))
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder without config.json, so it is not a Hugging Face model; "
            "pass a folder that save_pretrained wrote, or model='tiny'"
        )
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or path.parent.is_dir():
        raise ConfigError(
            f"there is no model folder {model}; pass an existing folder, a Hugging Face name such as "
            "'Qwen/Qwen2.5-0.5B-Instruct', or 'tiny', which comes with the embedded engine (other files: docs/models.md)"
        )
    return model


def with_model_defaults(config: TrainConfig, folder: str) -> TrainConfig:
    """Return ``config`` with the settings that depend on the size of the model in ``folder``, which may be a hub name."""
    temperature, most, decay_steps = config.temperature, config.max_temperature, config.decay_steps
    unset = folder != LIVE and (temperature is None or decay_steps is None)
    small = unset and PRETRAINED_FROM <= (parameter_count(folder) or 0) < SMALL_BELOW
    if most is None:
        most = 1.0 if temperature is None else temperature
    if temperature is None:
        temperature = 0.6 if small else 1.0
    if decay_steps is None:
        decay_steps = 10 if small else 0
    if most < temperature:
        raise ConfigError(
            f"max_temperature={most:g} is below the temperature, {temperature:g}; pass a higher one, or drop it"
        )
    return dataclasses.replace(config, temperature=temperature, max_temperature=most, decay_steps=decay_steps)


def parameter_count(folder: str) -> int | None:
    """Return the number of weights of the model in ``folder``, or of a hub name; None if neither files nor the hub say."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not Path(folder).is_dir():
        import httpx

        # The library may be missing, the network too, and an engine may know names that the hub doesn't.
        with contextlib.suppress(ImportError, OSError, ValueError, httpx.HTTPError):
            from huggingface_hub import model_info, try_to_load_from_cache

            cached = try_to_load_from_cache(folder, "model.safetensors")
            if not isinstance(cached, str):
                return getattr(model_info(folder, timeout=10).safetensors, "total", None)
            files = [Path(cached)]
    return sum(map(_count_weights, files)) if files else None


def _count_weights(file: Path) -> int:
    """Return the number of weights in a safetensors file, which begins with the length of its JSON header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


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
    """Raise ConfigError unless ``tasks`` is a list with at least one task."""
    if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Sequence):
        file = "; 'art train' on the command line takes a file of tasks" if isinstance(tasks, str) else ""
        raise ConfigError(f"{name} must be a list, one JSON-serializable task per item, got {tasks!r:.80}{file}")
    if len(tasks) == 0:
        raise ConfigError(f"{name}: the task list is empty; pass at least one task (any JSON-serializable value)")
