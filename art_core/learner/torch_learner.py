"""Gradient steps with PyTorch: a transformers model, all weights or LoRA through PEFT, AdamW.

Knows nothing about rewards, groups or which loss it is handed.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from art_core.config import TrainConfig
from art_core.errors import ConfigError, NotFiniteError
from art_core.learner import checkpoint
from art_core.learner.alone import Alone, empty_pass, full_tensor
from art_core.learner.gradients import Measured, Totals, accumulate, tokens_that_fit
from art_core.learner.packing import pack
from art_core.learner.pretrained import has_adapter
from art_core.learner.shared_memory import move, shared_tensors
from art_core.learner.sizes import LORA_FROM, LORA_RANK, SMALL_MODEL
from art_core.learner.torch_threads import torch_threads
from art_core.learner.tree_forward import tree_logprobs, tree_outputs, way_of
from art_core.learner.tree_support import Support
from art_core.runtime.memory import bound_heap
from art_core.token_tree import build_tree
from art_core.types import Call, LearnerBase, Loss, TokenTree, Trajectory, Weights

MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read the weights of these modules past PEFT's adapters, which it refuses there."""
MEASURED_STEPS = 3
"""The first ones, in which a pass is compared with the estimate of its memory."""
TOLERATED = 1.25
"""Of the estimate; a pass that took more shortens those that follow. What took less changes nothing."""

logger = logging.getLogger("art_core.learner")

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer


class TorchLearner(LearnerBase):
    """Trains the causal LM in ``model_folder`` (a folder or a hub name) on token trees. Weights are float32.

    Dropout is off, so that a target's new logprob is its old one before the first step. Raises ConfigError where
    ``config.kl`` or ``config.importance_cap`` is set and ``loss`` takes no such keyword. In a ``group`` of processes each
    has such a learner, and all call the same methods with the same arguments; the first one writes.
    """

    choice = ""
    """Why ``learner="auto"`` took this learner, for people; empty where it has nothing to say."""

    def __init__(self, model_folder: str | Path, config: TrainConfig, loss: Loss, group: Alone | None = None) -> None:
        bound_heap()
        torch.manual_seed(config.seed)
        self.group = group or Alone()
        self.version = 0
        self.config = config
        self.model_folder = str(model_folder)
        self.loss = _with_keywords(loss, kl=config.kl, importance_cap=config.importance_cap)
        model = self._load().eval()
        size = model.num_parameters()
        rank = self._rank(size)
        self.learning_rate = _learning_rate(config, rank, size)
        self._threads = config.threads or (1 if size < SMALL_MODEL else torch.get_num_threads())
        self._reference = deepcopy(model).requires_grad_(False) if config.kl and not rank else None
        self.model: PreTrainedModel | PeftModel = model
        if rank:
            self.model = self._add_adapter(model, rank).eval()
        self._compute = self.group.place(self.model)
        self._compute_reference = self._compute if self._reference is None else self.group.place(self._reference)
        self._set_pass_tokens(1.0)
        self._adapted = _adapted(model) if rank else {}
        self._live: dict[str, Tensor] | None = None
        self._asked = False
        """Whether ``weights`` was called: what they need of shared memory is not taken for an engine that loads files."""
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), betas=(0.9, 0.95), weight_decay=0.0)

    def _load(self) -> PreTrainedModel:
        if self.config.load_in_4bit:
            raise ConfigError("load_in_4bit=True needs learner='unsloth'; leave it out for the torch learner")
        model = checkpoint.load_model(self.model_folder)
        return model.to(self.group.device)

    def _rank(self, size: int) -> int:
        """Return the rank of the adapter for a model of ``size`` parameters, 0 where all weights are trained."""
        if self.config.lora_rank is not None:
            return self.config.lora_rank
        return 0 if size < LORA_FROM else LORA_RANK

    def _add_adapter(self, model: PreTrainedModel, rank: int) -> PeftModel:
        from art_core.learner import adapters

        return adapters.add_adapter(model, rank)

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step on all ``trees`` together, in passes of up to ``max_tokens_per_pass`` tokens.

        ``loss`` counts instead of the learner's own; it is given no reference logprobs.
        Metrics: ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``tokens`` (unique), ``targets`` and
        ``trajectories`` (those trained), ``passes``, ``logprob_gap`` (mean |new - old logprob|), ``entropy`` (mean, in
        nats, of the distributions that the targets were sampled from; not where the model's own code computes the logits),
        ``seconds``, ``tokens_per_second``, and the loss function's own. Trees without trained targets are left out; where
        all are, no step is taken and the metrics are ``skipped`` = 1. Raises ValueError for an empty list, and NotFiniteError,
        with everything as it was, where the loss or the gradient is not finite.
        """
        if not trees:
            raise ValueError("step() was given no token trees; leave the step out where no group teaches anything")
        trees = [tree for tree in trees if tree.weights.any()]
        if not trees:
            return {"skipped": 1.0}
        started = time.perf_counter()
        with torch_threads(self._threads):
            metrics = self._accumulate(trees, loss)
            metrics |= self._update(metrics)
        if self.model.device.type == "cuda" and not self.config.max_staleness:
            torch.cuda.empty_cache()  # an engine on the same GPU needs what the step's activations had
        seconds = time.perf_counter() - started
        return metrics | {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Return the seconds that the forward and backward passes over ``trees`` take; no weight changes."""
        started = time.perf_counter()
        with torch_threads(self._threads):
            self._accumulate([tree for tree in trees if tree.weights.any()])
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def weights(self) -> Weights:
        """Return the weights of this version in memory.

        ``live`` holds those of the plain model's parameters that training changes (with LoRA the adapted ones, merged), on
        the CPU in shared memory, the same at every call. On a GPU, and with ``max_staleness``, they are a copy that only this
        call changes. It is None where they do not fit in shared memory; ``publish`` them then.
        """
        if not self._asked:
            self._asked, self._live = True, self._share()
        if self._live is not None:
            with torch.no_grad():
                for name, weight in self._copied_weights():
                    self._live[name].copy_(weight)
        return Weights(version=self.version, path=None, live=self._live)

    def publish(self, folder: Path) -> Weights:
        """Write ``folder``, replacing it as a whole: a Hugging Face model folder with its tokenizer, or with LoRA the adapter
        in ``folder/adapter``. Raises StoreError where it cannot be written."""
        folder = Path(folder)
        self._write(folder, {"version": self.version, "base_model": self.model_folder})
        return Weights(self.version, folder / checkpoint.ADAPTER if has_adapter(self.model) else folder)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob of every token of ``ids`` but the first, at temperature 1, in nats."""
        call = Call(prompt_ids=tuple(ids[:1]), sampled_ids=tuple(ids[1:]), logprobs=(0.0,) * (len(ids) - 1))
        with torch.no_grad(), torch_threads(self._threads):
            tree = build_tree([Trajectory(task=None, calls=(call,))])
            return self._compute(tree_logprobs, self.model, tree).tolist()

    def save(self, folder: Path) -> None:
        """Write ``folder``, replacing it as a whole: weights, optimizer, random state; float32, nothing pickled.

        Where all weights are trained it is a Hugging Face model folder with its tokenizer; with LoRA the adapter is in
        ``folder/adapter``. Raises StoreError where it cannot be written.
        """
        in_4bit = bool(getattr(self.model, "is_loaded_in_4bit", False))
        state = {"version": self.version, "base_model": self.model_folder, "in_4bit": in_4bit}
        state["memory_ratio"] = self._memory_ratio
        self._write(Path(folder), state, checkpoint.optimizer_state(self._optimizer, self._trained))

    def _write(self, folder: Path, state: Mapping[str, Any], moments: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights and, where it is given, the optimizer's state, by the first process."""
        adapter = has_adapter(self.model)
        mine = self._trained if adapter else _state(self.model)
        weights = self.group.whole(mine)
        moments = None if moments is None else self.group.whole(moments)
        if not self.group.rank:
            with checkpoint.writing(folder, state) as unfinished:
                if adapter:
                    checkpoint.write_adapter(unfinished, self.model, weights)
                else:
                    checkpoint.write_model(unfinished, self.model, self.model_folder, weights)
                if moments is not None:
                    checkpoint.write_optimizer(unfinished, moments)
        self.group.wait()

    def restore(self, folder: Path) -> None:
        """Continue where ``save(folder)`` was: the steps that follow are the same to the bit.

        Raises StoreError where a file is missing, damaged or of another model.
        """
        folder = Path(folder)
        state = checkpoint.read_state(folder)
        if has_adapter(self.model):
            checkpoint.read_adapter(folder, self.model, self.group.laid_out)
        else:
            checkpoint.read_model(folder, self.model, self.group.laid_out)
        checkpoint.read_optimizer(folder, self._optimizer, self._trained, self.group.laid_out)
        self.version = state["version"]
        self._set_pass_tokens(state.get("memory_ratio", 1.0))

    def _accumulate(self, trees: Sequence[TokenTree], loss: Loss | None = None) -> dict[str, float]:
        """Add up the gradients of the trees' parts of the loss; return the metrics of the whole."""
        self._optimizer.zero_grad()  # of a step that an exception ended
        self._check_depths(trees)
        totals, passes = Totals.of(trees), self._passes(self.group.share(trees))
        forward = partial(self._compute, tree_outputs, self.model, weighted_only=True, max_tokens=self._pass_tokens)
        measured = Measured(self.model, forward, self._pass_tokens if self._measures else 0)
        reference = self._reference_logprobs if self.config.kl and not loss else lambda _: None
        metrics = accumulate(
            passes,
            totals,
            loss or self.loss,
            forward=measured,
            reference=reference,
            proximal=self.config.importance_cap is not None,
        )
        for _ in range(self.group.idle(lambda share: len(self._passes(share)), trees)):
            empty_pass(self.model, self._compute, reference)
        self.group.add_up(list(self._trained.values()))
        metrics |= {"passes": float(len(passes)), "memory_ratio_max": measured.ratio}
        metrics = self.group.joined(metrics)
        self._correct(metrics.pop("memory_ratio_max"))
        return metrics | totals.metrics

    @property
    def _measures(self) -> bool:
        """Whether memory decides about passes. Processes that have a part of the weights recompute what others keep."""
        return self.version < MEASURED_STEPS and not self.config.max_tokens_per_pass and not self.group.shards

    def _correct(self, ratio: float) -> None:
        """Shorten the passes that follow if one took ``ratio`` times the estimate; the same on all processes."""
        if ratio <= TOLERATED * self._memory_ratio:
            return
        before = self._pass_tokens
        self._set_pass_tokens(ratio)
        if self._pass_tokens < before and not self.group.rank:
            logger.warning(
                "a pass kept %.1f times the activations that were estimated, so passes now have at most %d tokens instead of "
                "%d; max_tokens_per_pass sets another number", ratio, self._pass_tokens, before,
            )  # fmt: skip

    def _set_pass_tokens(self, ratio: float) -> None:
        self._memory_ratio = ratio
        """What a token's activations take, over what ``tokens_that_fit`` estimates."""
        self._pass_tokens = self.group.least(
            self.config.max_tokens_per_pass or tokens_that_fit(self.model, self._memory_ratio)
        )

    def _passes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return pack(trees, self._pass_tokens) if self._way.packs else list(trees)

    @cached_property
    def _way(self) -> Support:
        return self._compute(way_of, self.model)

    def _check_depths(self, trees: Sequence[TokenTree]) -> None:
        """Refuse on all processes what some of them would compute path by path, while the others wait at a layer."""
        limit, depth = self._way.positions, max(int(tree.depths.max(initial=0)) for tree in trees)
        if self.group.shards and limit and depth >= limit:
            raise ConfigError(
                f"a call of {depth + 1} tokens is computed path by path with this model (from {limit} on its rotary embedding "
                "depends on a row's length), and sharding='fsdp' cannot do that; give max_context, or sharding='ddp'"
            )

    @torch.no_grad()
    def _reference_logprobs(self, tree: TokenTree) -> Tensor:
        if self._reference is not None:
            return self._compute_reference(tree_logprobs, self._reference, tree, weighted_only=True)
        with self.model.disable_adapter():
            return self._compute(tree_logprobs, self.model, tree, weighted_only=True)

    def _update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        rate = self.learning_rate * min(1.0, (self.version + 1) / max(1, self.config.warmup_steps))
        gradients = [it.grad for it in self._trained.values() if it.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = full_tensor(total).item()
        self._check_finite(metrics, norm)
        torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self.config.max_grad_norm, total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def _check_finite(self, metrics: Mapping[str, float], norm: float) -> None:
        """Raise NotFiniteError before anything has changed. All processes do or none, because the numbers are all processes'."""
        if np.isfinite(norm) and np.isfinite(metrics["loss"]):
            return
        broken = [
            name
            for name, it in self._trained.items()
            if it.grad is not None and not np.isfinite(full_tensor(torch.linalg.vector_norm(it.grad)).item())
        ]
        self._optimizer.zero_grad()
        numbers = {name: metrics[name] for name in ("loss", "logprob_gap") if name in metrics} | {"grad_norm": norm}
        raise NotFiniteError(
            f"the {'loss' if np.isfinite(norm) else 'gradient'} of step {self.version + 1} is not finite (loss "
            f"{metrics['loss']}, gradient norm {norm}), so the weights were left as they were; look for infinite logprobs or "
            "advantages in this step's calls, or lower learning_rate",
            {"values": {name: str(it) for name, it in numbers.items() if not np.isfinite(it)}, "gradients": broken},
        )

    def _share(self) -> dict[str, Tensor] | None:
        """Return shared memory for the plain model's parameters that training changes; on the CPU move them there.

        None where no process has them whole.
        """
        if self.group.shards:
            return None
        if self._adapted:
            from art_core.learner import adapters

            return shared_tensors({name: adapters.plain_shape(module) for name, module in self._adapted.items()})
        parameters = dict(self.model.named_parameters())
        live = shared_tensors({name: parameter.shape for name, parameter in parameters.items()})
        if live is not None and self._serves_in_place():
            move(parameters, live)
        return live

    def _serves_in_place(self) -> bool:
        """Whether the engine reads the very weights that are trained: not where it answers while a step is under way."""
        return self.model.device.type == "cpu" and not self.config.max_staleness

    def _copied_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain model's parameters that training changes and that are not in shared memory themselves."""
        if self._adapted:
            from art_core.learner import adapters

            for name, module in self._adapted.items():
                yield name, adapters.merged_weight(module)
        elif not self._serves_in_place():
            yield from self.model.named_parameters()


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a model folder holds: parameters, tied ones under each name, and what else is saved with them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: parameters.get(name, value) for name, value in model.state_dict().items()}


def _adapted(model: PreTrainedModel) -> dict[str, LoraLayer]:
    from art_core.learner import adapters

    return dict(adapters.adapted(model))


def _with_keywords(loss: Loss, **settings: float | None) -> Loss:
    """Return ``loss`` with those of the run's settings that are set."""
    given = {name: value for name, value in settings.items() if value}
    for name, value in given.items():
        taken = inspect.signature(loss).parameters
        if name not in taken and all(
            parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in taken.values()
        ):
            called = getattr(loss, "__name__", repr(loss))
            raise ConfigError(
                f"{name}={value} was asked for, but the loss {called} takes no argument {name}; leave {name} out, or "
                "give one of the built-in losses, such as loss='grpo'"
            )
    return partial(loss, **given) if given else loss


def _learning_rate(config: TrainConfig, rank: int, size: int) -> float:
    if config.learning_rate is not None:
        return config.learning_rate
    if rank:
        return 1e-4
    return 5e-4 if size < SMALL_MODEL else 1e-5
