"""OpenPipe ART's Model and TrainableModel. Training itself is up to the backend."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from openai import AsyncOpenAI
from pydantic import BaseModel, PrivateAttr

from art_core.errors import ConfigError
from art_core.store.run_folder import write_whole
from art_openpipe.trajectories import Trajectory, TrajectoryGroup
from art_openpipe.types import TrainConfig, TrainSFTConfig, folder_of

log = logging.getLogger("art_openpipe")

Config = TypeVar("Config")
SECONDS = 1200.0
"""Timeout of a model call: calls wait while new weights are loaded."""


class _CachedClient:
    """A client with its address; a copy of the model does not share it."""

    def __init__(self, base_url: str = "", client: AsyncOpenAI | None = None) -> None:
        self.base_url, self.client = base_url, client

    def __deepcopy__(self, memo: Any) -> _CachedClient:
        return _CachedClient()


class Model(BaseModel, Generic[Config]):
    """A model that rollouts call; this base class is a model that is only prompted, at ``inference_base_url``."""

    name: str
    project: str
    entity: str | None = None
    id: str | None = None
    config: Config | None = None
    inference_api_key: str | None = None
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    report_metrics: list[str] | None = None
    _backend: Any = PrivateAttr(default=None)
    _client: _CachedClient = PrivateAttr(default_factory=_CachedClient)

    @property
    def trainable(self) -> bool:
        return False

    def backend(self) -> Any:
        """Return the backend of the model; ConfigError if it is not registered."""
        if self._backend is None:
            raise ConfigError(f"the model {self.name!r} is not registered: await model.register(backend) first")
        return self._backend

    async def register(self, backend: Any) -> None:
        """Register the model with ``backend``, which stores its files."""
        await backend.register(self)

    def openai_client(self) -> AsyncOpenAI:
        """Return a client whose calls this model answers; pass ``model=model.get_inference_name()`` in each call."""
        if self.inference_base_url is None or self.inference_api_key is None:
            raise ConfigError(
                f"the model {self.name!r} has no address yet: await model.register(backend) first"
                if self.trainable
                else f"the model {self.name!r} has no address: pass inference_base_url= and inference_api_key="
            )
        base_url, client = self.inference_base_url, self._client.client
        if client is None or self._client.base_url != base_url or client.is_closed():
            client = AsyncOpenAI(base_url=base_url, api_key=self.inference_api_key, timeout=SECONDS)
            self._client = _CachedClient(base_url, client)
        return client

    async def aclose(self) -> None:
        """Close the client; the next call creates a new one."""
        if self._client.client is not None:
            await self._client.client.close()

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name to pass as ``model``. ``step`` can only be the newest, because art serves no older checkpoints."""
        if step is not None and self.trainable and step != self.backend().opened(self).run.step:
            raise ConfigError(
                f"get_inference_name(step={step}): art serves the newest weights only; to evaluate that checkpoint, use "
                "art.evaluate(agent, tasks, model='checkpoint folder', reward=...)"
            )
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the keywords with which ``litellm.acompletion`` calls this model."""
        name = self.get_inference_name(step)
        prefixed = f"hosted_vllm/{name}" if self.trainable else name
        return {"model": prefixed, "base_url": self.inference_base_url, "api_key": self.inference_api_key}

    async def get_step(self) -> int:
        """Return the number of training steps so far."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Append means over the trajectories as ``SPLIT/NAME``, and ``metrics`` unchanged, to the model's ``history.jsonl``."""
        items = list(trajectories or ())
        groups = [item for item in items if isinstance(item, TrajectoryGroup)]
        single = [item for item in items if not isinstance(item, TrajectoryGroup)]
        if single:
            groups.append(TrajectoryGroup(single))
        if groups:
            await self.backend().log(self, groups, split, step)
        if metrics:
            self.backend().add_metrics(self, dict(metrics), step)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Write the JSON-able ``state`` to ``state.json`` in the model's folder."""
        file = self._state_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dict(state), indent=2))

    write_state = overwrite_state

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Update the stored state with the keys of ``state``; return the result."""
        merged = {**(self.read_state() or {}), **state}
        self.overwrite_state(merged)
        return merged

    def read_state(self) -> dict[str, Any] | None:
        """Return the stored state; None if there is none."""
        file = self._state_file()
        return json.loads(file.read_text()) if file.is_file() else None

    def _state_file(self) -> Path:
        backend = self._backend
        folder = folder_of(self.base_path, self.project, self.name) if backend is None else backend.folder(self)
        return folder / "state.json"

    def safe_model_dump(self) -> dict[str, Any]:
        """Return the model as JSON values, without its API key."""
        return self.model_dump(mode="json", exclude={"inference_api_key"})

    def update_wandb_config(self, config: Mapping[str, Any]) -> None:
        """Store it in ``state.json`` under ``wandb_config``, because the model has no W&B run."""
        log.warning("update_wandb_config: this model has no W&B run; stored in %s", self._state_file())
        self.merge_state({"wandb_config": {**(self.read_state() or {}).get("wandb_config", {}), **config}})

    def metrics_builder(self, cost_context: str | None = None) -> Any:
        """Not supported: art does not track costs."""
        raise ConfigError(_COSTS.format("metrics_builder"))

    def activate_metrics_context(self, context: str) -> Any:
        """Not supported: art does not track costs."""
        raise ConfigError(_COSTS.format("activate_metrics_context"))


_COSTS = (
    "{} is not supported, because art does not track costs; use trajectory.metrics or await model.log(metrics=...). art_ruler "
    "tracks the cost of a RULER judge (judge/cost)"
)


class TrainableModel(Model[Config], Generic[Config]):
    """A model to train. ``base_model`` is a folder or a Hugging Face name; the environment variable ART_MODEL overrides it."""

    base_model: str
    _internal_config: Any = PrivateAttr(default=None)

    def __init__(self, *, _internal_config: Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self._internal_config = _internal_config

    @property
    def trainable(self) -> bool:
        return True

    async def register(self, backend: Any, _openai_client_config: Any = None) -> None:
        """Open the model's run, or resume it after its newest step; from now on the model answers."""
        await backend.register(self, _openai_client_config)

    async def get_step(self) -> int:
        return self.backend().opened(self).run.step

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Take a training step, with the interface of earlier releases; ``backend.train`` returns its result."""
        settings = {} if config is None else config.model_dump(exclude_unset=True)
        await self.backend().train(self, trajectory_groups, **{**settings, **(_config or {}), "verbose": verbose})

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Train to imitate all assistant messages in the trajectories, whoever wrote them."""
        if _config:
            raise ConfigError(f"train_sft: _config={dict(_config)!r} is not supported by art; use TrainSFTConfig")
        await self.backend().train_sft(self, trajectories, config or TrainSFTConfig())

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints except the newest and the best."""
        await self.backend().delete_checkpoints(self, best_checkpoint_metric)

    def set_cost_calculator(self, calculator: Any) -> None:
        """Not supported: art does not track costs."""
        raise ConfigError(_COSTS.format("set_cost_calculator"))
