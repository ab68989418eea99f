"""Gradient steps on a server: an adapter, trained with the losses of art_core.

The API has losses of its own. This learner needs none of them: it asks for the logprobs of the targets, computes the loss and
its derivative by each logprob here, and sends the derivatives as advantages of the policy gradient at the same weights, where the
probability ratio is 1. So the gradient on the server is that of the loss, whatever the loss is.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types

from art_core import TrainConfig
from art_core.errors import ConfigError, DamagedCheckpoint, NotFiniteError, StoreError
from art_core.learner import checkpoint
from art_core.learner.gradients import Totals, accumulate, join, with_targets
from art_core.learner.sizes import LORA_RANK
from art_core.learner.torch_learner import with_settings
from art_core.learner.tree_forward import TreeOutputs
from art_core.types import LearnerBase, Loss, TokenTree, Weights
from art_tinker.rows import Row, rows_of
from art_tinker.service import SAMPLER, STATE, address, begin, delete, download, wait

LEARNING_RATE = 1e-4
LOSS = "importance_sampling"
PUBLISHED_SECONDS = 7 * 86_400
"""How long a server keeps weights that were published for sampling; those of checkpoints stay until the checkpoint goes."""
ARGUMENTS = {"download": True, "averages": False}
"""``learner_args`` and their defaults."""

log = logging.getLogger("art_core.learner")


class TinkerLearner(LearnerBase):
    """Trains an adapter of ``model_folder`` (a name that the server knows) on token trees, on the server."""

    def __init__(self, model_folder: str, config: TrainConfig, loss: Loss) -> None:
        _refuse(config)
        self.version = 0
        self.config = config
        self.model_folder = model_folder
        self.loss = with_settings(loss, importance_cap=config.importance_cap)
        self.learning_rate = LEARNING_RATE if config.learning_rate is None else config.learning_rate
        self._rank = LORA_RANK if config.lora_rank is None else config.lora_rank
        self.choice = f"learner='tinker': an adapter of rank {self._rank} of {model_folder} on the server"
        self._arguments = ARGUMENTS | dict(config.learner_args)
        self._service = tinker.ServiceClient()
        self._saved: dict[Path, list[str]] = {}
        """Folder of a checkpoint -> what the server keeps for it."""
        self._warned = False

    @cached_property
    def _model(self) -> tinker.TrainingClient:
        """A new adapter on the server."""
        make = partial(self._service.create_lora_training_client, self.model_folder, self._rank, self.config.seed)
        return wait(begin(make), f"make an adapter of rank {self._rank} of {self.model_folder}")

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step on all ``trees`` together.

        Metrics are those of the torch learner, without ``entropy`` and ``passes``, and ``trained_tokens``: tokens of the rows
        that the server computed gradients for. Raises NotFiniteError, with everything unchanged, if the loss or its derivative
        isn't finite.
        """
        trees = with_targets(trees)
        if not trees:
            return {"skipped": 1.0}
        started = time.perf_counter()
        totals, tree = Totals.of(trees), join(trees)
        rows = rows_of(tree)
        logprobs = self._logprobs(rows, totals.targets)
        metrics = accumulate(
            [tree], totals, loss or self.loss, forward=lambda _: TreeOutputs(logprobs, None), reference=lambda _: None,
            proximal=self.config.importance_cap is not None,
        )  # fmt: skip
        assert logprobs.grad is not None
        _check_finite(metrics["loss"], logprobs.grad, self.version + 1)
        metrics |= self._update(rows, logprobs.detach().numpy(), -logprobs.grad.numpy())
        metrics |= {name: float(getattr(totals, name)) for name in ("tokens", "targets", "trajectories")}
        seconds = time.perf_counter() - started
        return metrics | {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}

    def _logprobs(self, rows: Sequence[Row], targets: int) -> torch.Tensor:
        """Return the targets' logprobs, to be differentiated by."""
        answer = wait(self._model.forward([_datum(row.ids) for row in rows], LOSS), "compute logprobs")
        logprobs = np.empty(targets, dtype=np.float32)
        for row, outputs in zip(rows, answer.loss_fn_outputs, strict=True):
            logprobs[row.targets] = np.asarray(outputs["logprobs"].data, dtype=np.float32)[row.places]
        return torch.from_numpy(logprobs).requires_grad_()

    def _update(self, rows: Sequence[Row], logprobs: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
        data = [
            _datum(row.ids, row.logprobs(logprobs), row.sums(advantages) * self._scale(row, len(rows))) for row in rows
        ]
        rate = self.learning_rate * self.config.rate_share(self.version + 1, self.run_step)
        adam = types.AdamParams(learning_rate=rate, beta2=0.95, grad_clip_norm=self.config.max_grad_norm)
        # Both are sent before either is awaited: the server then computes them in one turn. From here on weights may change.
        gradient, update = self._model.forward_backward(data, LOSS), self._model.optim_step(adam)
        self.version += 1
        self._warn_of_averages(wait(gradient, "compute gradients").metrics)
        answer = wait(update, "update the weights")
        norms = [value for name, value in (answer.metrics or {}).items() if name.endswith("grad_norm")]
        return {
            "learning_rate": rate,
            "trained_tokens": float(sum(len(row.ids) - 1 for row in rows)),
            **({"grad_norm": float(norms[0])} if norms else {}),
        }

    def _scale(self, row: Row, rows: int) -> float:
        """Return what undoes the means of a server that averages over the tokens of a row, and over rows."""
        return float(rows * (len(row.ids) - 1)) if self._arguments["averages"] else 1.0

    def _warn_of_averages(self, metrics: Mapping[str, float]) -> None:
        if self._arguments["averages"] or self._warned or any(name.endswith(":sum") for name in metrics):
            return
        self._warned = True
        log.warning(
            "%s doesn't report that it adds up losses, as the API has it; if it averages over a row's tokens (SkyRL's JAX "
            "backend does), pass learner_args={'averages': True}, else long rows count less", address(),
        )  # fmt: skip

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Return three times the seconds of the forward pass: the server has no backward pass that leaves nothing behind."""
        started = time.perf_counter()
        tree = join(with_targets(trees))
        self._logprobs(rows_of(tree), int(np.count_nonzero(tree.weights)))
        return 3 * (time.perf_counter() - started)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the logprob in nats, at temperature 1, of every token of ``ids`` but the first."""
        answer = wait(self._model.forward([_datum(np.asarray(ids, dtype=np.int64))], LOSS), "compute logprobs")
        return [float(it) for it in answer.loss_fn_outputs[0]["logprobs"].data]

    def weights(self) -> Weights:
        """Return this version's weights: ``publish`` has them."""
        return Weights(self.version, path=None)

    def publish(self, folder: Path) -> Weights:
        """Keep the weights for sampling on the server for a week, and write their path to ``folder``."""
        sampler = self._save_sampler(PUBLISHED_SECONDS)
        with checkpoint.writing(Path(folder), self._state() | {SAMPLER: sampler}):
            return Weights(self.version, Path(folder))

    def save(self, folder: Path) -> None:
        """Keep weights and optimizer on the server, and write their paths to ``folder``, with the adapter.

        What the server keeps for earlier checkpoints is deleted there if their folders are gone. Raises StoreError.
        """
        state = wait(self._model.save_state(self._name()), "save the weights").path
        sampler = self._save_sampler(None)
        with checkpoint.writing(Path(folder), self._state() | {SAMPLER: sampler, STATE: state}) as unfinished:
            if self._arguments["download"]:
                self._download(sampler, unfinished / checkpoint.ADAPTER)
        for gone in [it for it in self._saved if not it.exists()]:
            for path in self._saved.pop(gone):
                delete(self._service, path)
        self._saved[Path(folder)] = [state, sampler]

    def _download(self, sampler: str, folder: Path) -> None:
        try:
            download(self._service, sampler, folder)
        except (StoreError, ConfigError) as error:  # the server has the weights, so the checkpoint is good
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("the checkpoint has no adapter here, so its calls can't be audited: %s", error)

    def restore(self, folder: Path) -> None:
        """Continue from ``save(folder)``. Raises DamagedCheckpoint, or ConfigError if the server doesn't have it."""
        state = checkpoint.read_state(Path(folder))
        if STATE not in state:
            raise ConfigError(f"{folder} has no weights on a Tinker server; it was trained with another learner")
        self.__dict__.pop("_model", None)  # servers load only into a new adapter
        wait(self._model.load_state_with_optimizer(state[STATE]), f"load {state[STATE]}")
        self.version = state["version"]
        for kept in Path(folder).parent.glob("step-*"):  # of this run, before it was interrupted
            with suppress(DamagedCheckpoint):
                manifest = checkpoint.read_manifest(kept)
                self._saved[kept] = [manifest[name] for name in (STATE, SAMPLER) if name in manifest]

    def close(self) -> None:
        """End the session, so that the server frees the adapter."""
        self._service.holder.close()

    def _save_sampler(self, seconds: int | None) -> str:
        name = self._name()
        return str(wait(self._model.save_weights_for_sampler(name, seconds), "save the weights for sampling").path)

    def _name(self) -> str:
        # A resumed run reaches a version twice.
        return f"art-{self.version:06d}-{uuid.uuid4().hex[:8]}"

    def _state(self) -> dict[str, int | str]:
        return {"version": self.version, "base_model": self.model_folder}


def _refuse(config: TrainConfig) -> None:
    """Raise ConfigError for settings that no server of this API has."""
    if unknown := sorted(set(config.learner_args) - set(ARGUMENTS)):
        raise ConfigError(f"learner='tinker' has no learner_args {', '.join(unknown)}; it has {', '.join(ARGUMENTS)}")
    refused = {
        "kl": config.kl,
        "teacher": config.teacher,
        "load_in_4bit": config.load_in_4bit,
        "max_tokens_per_pass": config.max_tokens_per_pass,
        "lora_rank": config.lora_rank == 0,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(f"learner='tinker' can't use {name}={getattr(config, name)!r}; omit it")
    if {config.temperature, config.max_temperature} != {1.0}:
        raise ConfigError(
            "a Tinker server reports and trains logprobs at temperature 1; pass temperature=1 and no max_temperature"
        )


def _datum(ids: np.ndarray, logprobs: np.ndarray | None = None, advantages: np.ndarray | None = None) -> types.Datum:
    """Return a row as the API has it: its tokens, and two numbers for each but the first."""
    zeros = np.zeros(len(ids) - 1, dtype=np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": zeros if logprobs is None else logprobs,
            "advantages": zeros if advantages is None else advantages,
        },
    )


def _check_finite(loss: float, derivatives: torch.Tensor, step: int) -> None:
    if np.isfinite(loss) and bool(torch.isfinite(derivatives).all()):
        return
    raise NotFiniteError(
        f"the loss of step {step} or its derivative is not finite (loss {loss}), so the weights are unchanged; look for infinite "
        "logprobs or advantages in this step's calls",
        {"values": {"loss": str(loss)}, "gradients": []},
    )
