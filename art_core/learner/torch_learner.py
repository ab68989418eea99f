"""Gradient steps with PyTorch: a transformers model, all weights or LoRA through PEFT, AdamW."""

from __future__ import annotations

import inspect
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from art_core.config import SMALL_BELOW, TrainConfig
from art_core.errors import ConfigError, NotFiniteError
from art_core.learner import checkpoint
from art_core.learner.alone import Alone, empty_pass, full_tensor
from art_core.learner.gradients import MeasuredForward, Totals, accumulate, pack, tokens_that_fit, with_targets
from art_core.learner.pretrained import has_adapter, load_causal_lm, load_teacher
from art_core.learner.sizes import LORA_FROM, LORA_RANK, SMALL_MODEL
from art_core.learner.tree_forward import tree_logprobs, tree_outputs, way_of
from art_core.learner.tree_support import Support
from art_core.runtime.cpu import onednn_products, torch_threads
from art_core.runtime.memory import return_freed_memory
from art_core.token_tree import build_tree
from art_core.types import Call, LearnerBase, Loss, TokenTree, Trajectory, Weights

if TYPE_CHECKING:
    from peft import PeftModel

    from art_core.learner.adapters import AdaptedWeight

MEASURED_STEPS = 3  # in this many first steps the memory of a pass is compared with its estimate
TOLERATED_RATIO = 1.25
"""A pass that takes more than this times the estimate shortens the following passes. Taking less changes nothing."""
SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps shared memory; a process that writes more than fits is killed. Other systems have no such limit."""
SHARED_MEMORY_SHARE = 0.9  # share of the free space that may be used
ALIGNMENT = 16  # in float32 numbers: 64 bytes, at which torch aligns its own tensors

logger = logging.getLogger("art_core.learner")


class TorchLearner(LearnerBase):
    """Trains the causal LM in ``model_folder`` (a folder or a hub name) on token trees. Weights are float32.

    Dropout is off, so before the first step a target's new logprob equals its old one. Raises ConfigError if ``config.kl`` or
    ``config.importance_cap`` is set and ``loss`` has no such parameter, and for a teacher with other tokens. In a ``group`` each
    process has such a learner, all call the same methods with the same arguments, and the first process writes.
    """

    def __init__(self, model_folder: str | Path, config: TrainConfig, loss: Loss, group: Alone | None = None) -> None:
        torch.manual_seed(config.seed)
        self.group = group or Alone()
        self.version = 0
        self.config = config
        self.model_folder = str(model_folder)
        self.loss = with_settings(loss, kl=config.kl, importance_cap=config.importance_cap)
        model = self._load().eval()
        self._size = size = model.num_parameters()
        rank = self._rank(size)
        usual_rate = (5e-4 if size < SMALL_BELOW else 1e-4) if rank else 5e-4 if size < SMALL_MODEL else 1e-5
        self.learning_rate = usual_rate if config.learning_rate is None else config.learning_rate
        self._threads = config.threads or (1 if size < SMALL_MODEL else torch.get_num_threads())
        self._reference = self._load_reference(model, rank)
        self.model: PreTrainedModel | PeftModel = model
        self._adapted: dict[str, AdaptedWeight] = {}
        if rank:
            from art_core.learner.adapters import adapted_weights

            self.model = self._add_adapter(model, rank).eval()
            self._adapted = adapted_weights(model)
        self._compute = self.group.place(self.model)
        self._compute_reference = self._compute if self._reference is None else self.group.place(self._reference)
        self._set_pass_tokens(1.0)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), betas=(0.9, 0.95), weight_decay=0.0)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with torch_threads(self._threads), onednn_products() if self._size >= SMALL_MODEL else nullcontext():
            yield

    def _load(self) -> PreTrainedModel:
        if self.config.load_in_4bit:
            raise ConfigError("load_in_4bit=True needs learner='unsloth'; leave it out for the torch learner")
        return load_causal_lm(self.model_folder).to(self.group.device)

    def _load_reference(self, model: PreTrainedModel, rank: int) -> PreTrainedModel | None:
        """Return the teacher, or for a KL term without one a copy of ``model``; None if switching an adapter off is enough."""
        if self.config.teacher:
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            return load_teacher(self.config.teacher, self.model_folder, dtype).to(self.group.device)
        return deepcopy(model).requires_grad_(False) if self.config.kl and not rank else None

    def _rank(self, size: int) -> int:
        """Return the adapter's rank for a model of ``size`` parameters; 0 trains all weights."""
        if self.config.lora_rank is not None:
            return self.config.lora_rank
        return 0 if size < LORA_FROM else LORA_RANK

    def _add_adapter(self, model: PreTrainedModel, rank: int) -> PeftModel:
        from art_core.learner.adapters import add_adapter

        return add_adapter(model, rank)

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step on all ``trees`` together, in passes of up to ``max_tokens_per_pass`` tokens.

        ``loss`` replaces the learner's own and gets no reference logprobs.
        Metrics: ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``tokens`` (unique), ``targets`` and
        ``trajectories`` (those trained), ``passes``, ``logprob_gap`` (mean |new - old logprob|), ``entropy`` (mean, in nats,
        of the distributions the targets were sampled from; missing if the model's own code computes the logits),
        ``seconds``, ``tokens_per_second``, and the loss function's own. Trees without trained targets are left out; if no
        tree has any, no step is taken and the metrics are ``skipped`` = 1. Raises ValueError for an empty list, and
        NotFiniteError, with everything unchanged, if the loss or the gradient isn't finite.
        """
        trees = with_targets(trees)
        if not trees:
            return {"skipped": 1.0}
        started = time.perf_counter()
        with self._settings():
            metrics = self._accumulate(trees, loss)
            metrics |= self._update(metrics)
        return_freed_memory()
        if self.model.device.type == "cuda" and not self.config.max_staleness:
            torch.cuda.empty_cache()  # an engine on the same GPU needs the memory of the step's activations
        seconds = time.perf_counter() - started
        return metrics | {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Return the seconds of a forward and backward pass over ``trees``; no weight changes."""
        started = time.perf_counter()
        with self._settings():
            self._accumulate(with_targets(trees))
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def weights(self) -> Weights:
        """Return this version's weights in memory.

        ``live`` holds the plain model's parameters that training changes (with LoRA the adapted ones, merged), on the CPU in
        shared memory, the same tensors at every call. On a GPU, and with ``max_staleness``, they are a copy that only this
        call updates. ``live`` is None if they don't fit in shared memory; call ``publish`` instead.
        """
        if self._live is not None and not self._serves_in_place:
            with torch.no_grad():
                for name, weight in self._served.items():
                    self._live[name].copy_(weight.merged() if self._adapted else weight)
        return Weights(version=self.version, path=None, live=self._live)

    @cached_property
    def _live(self) -> dict[str, Tensor] | None:
        """Shared memory for ``_served``, allocated at first use; None if it is too small or no process has whole weights.

        If the engine reads what is trained, the parameters move there.
        """
        if self.group.shards:
            return None
        live = _shared_tensors({name: weight.shape for name, weight in self._served.items()})
        if live is not None and self._serves_in_place:
            for name, parameter in self._served.items():
                live[name].copy_(parameter.detach())
                # Through NumPy each gets a storage of its own: transformers treats parameters that share one as tied.
                parameter.data = torch.from_numpy(live[name].numpy())
        return live

    @cached_property
    def _served(self) -> Mapping[str, Any]:
        """The plain model's parameters that training changes."""
        return self._adapted or dict(self.model.named_parameters())

    @property
    def _serves_in_place(self) -> bool:
        """Whether the engine reads the very memory that is trained; not if it answers during a step."""
        return self.model.device.type == "cpu" and not self.config.max_staleness and not self._adapted

    def publish(self, folder: Path) -> Weights:
        """Replace ``folder`` with a Hugging Face model folder with its tokenizer, or with LoRA a folder with the adapter in
        ``folder/adapter``. Raises StoreError if it can't be written."""
        self._write(Path(folder), {})
        return Weights(self.version, Path(folder, checkpoint.ADAPTER) if has_adapter(self.model) else Path(folder))

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob in nats, at temperature 1, of every token of ``ids`` but the first."""
        call = Call(prompt_ids=tuple(ids[:1]), sampled_ids=tuple(ids[1:]), logprobs=(0.0,) * (len(ids) - 1))
        with torch.no_grad(), self._settings():
            tree = build_tree([Trajectory(task=None, calls=(call,))])
            return self._compute(tree_logprobs, self.model, tree).tolist()

    def save(self, folder: Path) -> None:
        """Replace ``folder`` with a checkpoint: what ``publish`` writes, optimizer and random state; float32, nothing pickled.

        Raises StoreError if it can't be written.
        """
        in_4bit = bool(getattr(self.model, "is_loaded_in_4bit", False))
        moments = checkpoint.optimizer_state(self._optimizer, self._trained)
        self._write(Path(folder), {"in_4bit": in_4bit, "memory_ratio": self._memory_ratio}, moments)

    def _write(self, folder: Path, state: Mapping[str, Any], moments: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights and, if given, the optimizer's state from the first process."""
        adapter = has_adapter(self.model)
        weights = self.group.whole(self._trained if adapter else _state(self.model))
        moments = None if moments is None else self.group.whole(moments)
        if not self.group.rank:
            state = {"version": self.version, "base_model": self.model_folder, **state}
            with checkpoint.writing(folder, state) as unfinished:
                if adapter:
                    checkpoint.write_adapter(unfinished, self.model, weights)
                else:
                    checkpoint.write_model(unfinished, self.model, self.model_folder, weights)
                if moments is not None:
                    checkpoint.write_optimizer(unfinished, moments)
        self.group.wait()

    def restore(self, folder: Path) -> None:
        """Continue from ``save(folder)``; the following steps are the same bit for bit.

        Raises StoreError if a file is missing, damaged or of another model.
        """
        folder = Path(folder)
        state = checkpoint.read_state(folder)
        read = checkpoint.read_adapter if has_adapter(self.model) else checkpoint.read_model
        read(folder, self.model, self.group.laid_out)
        checkpoint.read_optimizer(folder, self._optimizer, self._trained, self.group.laid_out)
        self.version = state["version"]
        self._set_pass_tokens(state.get("memory_ratio", 1.0))

    def _accumulate(self, trees: Sequence[TokenTree], loss: Loss | None = None) -> dict[str, float]:
        """Accumulate the gradients of the loss over ``trees`` and return the metrics of all processes."""
        self._optimizer.zero_grad()  # an exception may have ended the last step
        self._check_depths(trees)
        totals, passes = Totals.of(trees), self._passes(self.group.share(trees))
        forward = partial(self._compute, tree_outputs, self.model, weighted_only=True, max_tokens=self._pass_tokens)
        measured = MeasuredForward(self.model, forward, self._pass_tokens if self._measures else 0)
        refers = not loss and (self.config.kl or self.config.teacher)
        reference = self._reference_logprobs if refers else lambda _: None
        proximal = self.config.importance_cap is not None
        metrics = accumulate(
            passes, totals, loss or self.loss, forward=measured, reference=reference, proximal=proximal
        )
        for _ in range(self.group.idle(lambda share: len(self._passes(share)), trees)):
            empty_pass(self.model, self._compute, reference)
        self.group.add_up(list(self._trained.values()))
        metrics |= {"passes": float(len(passes)), "memory_ratio_max": measured.ratio}
        metrics = self.group.joined(metrics)
        self._correct_estimate(metrics.pop("memory_ratio_max"))
        return metrics | {name: float(getattr(totals, name)) for name in ("tokens", "targets", "trajectories")}

    @property
    def _measures(self) -> bool:
        """Whether memory decides the length of passes. Sharded processes recompute what others keep."""
        return self.version < MEASURED_STEPS and not self.config.max_tokens_per_pass and not self.group.shards

    def _correct_estimate(self, ratio: float) -> None:
        """Shorten the following passes on all processes if one took ``ratio`` times the estimated memory."""
        if ratio <= TOLERATED_RATIO * self._memory_ratio:
            return
        before = self._pass_tokens
        self._set_pass_tokens(ratio)
        if self._pass_tokens < before and not self.group.rank:
            logger.warning(
                "a pass kept %.1f times the estimated activations, so passes now have at most %d tokens instead of %d; to "
                "choose another limit, set max_tokens_per_pass", ratio, self._pass_tokens, before,
            )  # fmt: skip

    def _set_pass_tokens(self, ratio: float) -> None:
        self._memory_ratio = ratio
        """A token's activations over the estimate of ``tokens_that_fit``."""
        self._pass_tokens = self.group.least(self.config.max_tokens_per_pass or tokens_that_fit(self.model, ratio))

    def _passes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return pack(trees, self._pass_tokens) if self._way.packs else list(trees)

    @cached_property
    def _way(self) -> Support:
        return self._compute(way_of, self.model)

    def _check_depths(self, trees: Sequence[TokenTree]) -> None:
        """Refuse on all processes a tree that one would compute path by path while the others wait at a layer."""
        limit, depth = self._way.positions, max(int(tree.depths.max(initial=0)) for tree in trees)
        if self.group.shards and limit and depth >= limit:
            raise ConfigError(
                f"a call of {depth + 1} tokens is computed path by path with this model (from {limit} on its rotary embedding "
                "depends on a row's length), and sharding='fsdp' can't do that; set max_context, or use sharding='ddp'"
            )

    @torch.no_grad()
    def _reference_logprobs(self, tree: TokenTree) -> Tensor:
        if self._reference is not None:
            return self._compute_reference(tree_logprobs, self._reference, tree, weighted_only=True)
        with self.model.disable_adapter():
            return self._compute(tree_logprobs, self.model, tree, weighted_only=True)

    def _update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        rate = self.learning_rate * self.config.rate_share(self.version + 1, self.run_step)
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = full_tensor(total).item()
        self._check_finite(metrics, norm)
        torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self.config.max_grad_norm or np.inf, total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def _check_finite(self, metrics: Mapping[str, float], norm: float) -> None:
        """Raise NotFiniteError before anything changes, on all processes or none: the values are those of all processes."""
        if np.isfinite(norm) and np.isfinite(metrics["loss"]):
            return
        norms = {name: torch.linalg.vector_norm(p.grad) for name, p in self._trained.items() if p.grad is not None}
        broken = [name for name, its in norms.items() if not np.isfinite(full_tensor(its).item())]
        self._optimizer.zero_grad()
        values = {name: metrics[name] for name in ("loss", "logprob_gap") if name in metrics} | {"grad_norm": norm}
        raise NotFiniteError(
            f"the {'loss' if np.isfinite(norm) else 'gradient'} of step {self.version + 1} is not finite (loss "
            f"{metrics['loss']}, gradient norm {norm}), so the weights are unchanged; look for infinite logprobs or "
            "advantages in this step's calls, or lower learning_rate",
            {"values": {name: str(it) for name, it in values.items() if not np.isfinite(it)}, "gradients": broken},
        )


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a model folder holds: parameters, tied ones under each name, and the buffers saved with them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: parameters.get(name, value) for name, value in model.state_dict().items()}


def with_settings(loss: Loss, **settings: float | None) -> Loss:
    """Return ``loss`` with the settings that are set as keyword arguments."""
    keywords = {name: value for name, value in settings.items() if value}
    if not keywords:
        return loss
    parameters = inspect.signature(loss).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in keywords.items():
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{name}={value} is set, but the loss {getattr(loss, '__name__', repr(loss))} takes no argument {name}; "
                f"leave {name} out, or use a built-in loss, such as loss='grpo'"
            )
    return partial(loss, **keywords)


def _shared_tensors(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor] | None:
    """Return a float32 tensor of zeros for each of ``shapes``; if they don't fit, log a warning and return None.

    All are views of one piece of memory, so sending them needs one file descriptor.
    """
    padded = [-(-shape.numel() // ALIGNMENT) * ALIGNMENT for shape in shapes.values()]
    size = 4 * sum(padded)
    if SHARED_MEMORY.is_dir() and size > SHARED_MEMORY_SHARE * (free := shutil.disk_usage(SHARED_MEMORY).free):
        logger.warning(
            "the weights to share with the engine (%.0f MB) don't fit in %s (%.0f MB free), so every step writes a folder "
            "for the engine to load, which is slower; allow more space, in Docker with --shm-size",
            size / 1e6, SHARED_MEMORY, free / 1e6,
        )  # fmt: skip
        return None
    pieces = torch.zeros(sum(padded)).share_memory_().split(padded)
    placed = zip(shapes.items(), pieces, strict=True)
    return {name: piece[: shape.numel()].view(shape) for (name, shape), piece in placed}
