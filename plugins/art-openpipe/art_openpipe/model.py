"""Model and TrainableModel as scripts know them. Knows nothing about how a model is trained: that is its backend's."""

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
"""Of one model call: while weights are swapped, calls wait."""


class _Held:
    """A client with its address; a copy of the model has one of its own."""

    def __init__(self, base_url: str = "", client: AsyncOpenAI | None = None) -> None:
        self.base_url, self.client = base_url, client

    def __deepcopy__(self, memo: Any) -> _Held:
        return _Held()


class Model(BaseModel, Generic[Config]):
    """A model that rollouts ask: by itself a prompted one, at the address that it is given."""

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
    _held: _Held = PrivateAttr(default_factory=_Held)

    @property
    def trainable(self) -> bool:
        return False

    def backend(self) -> Any:
        """Return where the model is registered."""
        if self._backend is None:
            raise ConfigError(f"the model {self.name!r} is not registered: await model.register(backend) first")
        return self._backend

    async def register(self, backend: Any) -> None:
        """Let ``backend`` keep this model's files."""
        await backend.register(self)

    def openai_client(self) -> AsyncOpenAI:
        """Return a client whose calls this model answers; send ``model=model.get_inference_name()``."""
        if self.inference_base_url is None or self.inference_api_key is None:
            raise ConfigError(
                f"the model {self.name!r} has no address yet: await model.register(backend) first"
                if self.trainable
                else f"the model {self.name!r} has no address: give inference_base_url= and inference_api_key="
            )
        base_url, client = self.inference_base_url, self._held.client
        if client is None or self._held.base_url != base_url or client.is_closed():
            client = AsyncOpenAI(base_url=base_url, api_key=self.inference_api_key, timeout=SECONDS)
            self._held = _Held(base_url, client)
        return client

    async def aclose(self) -> None:
        """Close the client; a model that is asked again gets another one."""
        if self._held.client is not None:
            await self._held.client.close()

    def get_inference_name(self, step: int | None = None) -> str:
        """Return what to send as ``model``. ``step`` may be the newest only: art serves no older checkpoint beside it."""
        if step is not None and self.trainable and step != self.backend().opened(self).run.step:
            raise ConfigError(
                f"get_inference_name(step={step}): art serves the newest weights only; art.evaluate(agent, tasks, "
                f"model='checkpoint folder', reward=...) measures the checkpoint of step {step}"
            )
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the keywords of ``litellm.acompletion`` with which this model answers."""
        name = self.get_inference_name(step)
        prefixed = f"hosted_vllm/{name}" if self.trainable else name
        return {"model": prefixed, "base_url": self.inference_base_url, "api_key": self.inference_api_key}

    async def get_step(self) -> int:
        """Return how many steps the model has been trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Note what runs are worth in ``history.jsonl`` of the model's folder as ``SPLIT/NAME``, and ``metrics`` as they are."""
        given = list(trajectories or ())
        groups = [it for it in given if isinstance(it, TrajectoryGroup)]
        single = [it for it in given if not isinstance(it, TrajectoryGroup)]
        if single:
            groups.append(TrajectoryGroup(single))
        if groups:
            await self.backend().log(self, groups, split, step)
        if metrics:
            self.backend().add_metrics(self, dict(metrics), step)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Keep ``state``, JSON, in ``state.json`` of the model's folder."""
        file = self._state_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dict(state), indent=2))

    write_state = overwrite_state

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Put the keys of ``state`` over those that are kept; return all."""
        merged = {**(self.read_state() or {}), **state}
        self.overwrite_state(merged)
        return merged

    def read_state(self) -> dict[str, Any] | None:
        """Return what is kept; None where nothing was."""
        file = self._state_file()
        return json.loads(file.read_text()) if file.is_file() else None

    def _state_file(self) -> Path:
        backend = self._backend
        folder = folder_of(self.base_path, self.project, self.name) if backend is None else backend.folder(self)
        return folder / "state.json"

    def safe_model_dump(self) -> dict[str, Any]:
        """Return the model as JSON has it, without its key."""
        return self.model_dump(mode="json", exclude={"inference_api_key"})

    def update_wandb_config(self, config: Mapping[str, Any]) -> None:
        """Keep it in ``state.json`` under ``wandb_config``: art trains without W&B."""
        log.warning("update_wandb_config: no W&B run belongs to this model; kept in %s", self._state_file())
        self.merge_state({"wandb_config": {**(self.read_state() or {}).get("wandb_config", {}), **config}})

    def metrics_builder(self, cost_context: str | None = None) -> Any:
        """Refused: art counts no costs of its own."""
        raise ConfigError(_COSTS.format("metrics_builder"))

    def activate_metrics_context(self, context: str) -> Any:
        """Refused: art counts no costs of its own."""
        raise ConfigError(_COSTS.format("activate_metrics_context"))


_COSTS = (
    "{} counts costs, which art does not; put numbers into trajectory.metrics or await model.log(metrics=...). What a RULER "
    "judge costs is counted by art_ruler (judge/cost)"
)


class TrainableModel(Model[Config], Generic[Config]):
    """A model that is trained. ``base_model`` is a folder or a Hugging Face name; ART_MODEL in the environment replaces it."""

    base_model: str
    _internal_config: Any = PrivateAttr(default=None)

    def __init__(self, *, _internal_config: Mapping[str, Any] | None = None, **given: Any) -> None:
        super().__init__(**given)
        self._internal_config = _internal_config

    @property
    def trainable(self) -> bool:
        return True

    async def register(self, backend: Any, _openai_client_config: Any = None) -> None:
        """Open the model's run; from now on it answers, and goes on after its newest step."""
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
        """Take a training step, as earlier releases had it; ``backend.train`` returns what it did."""
        given = {} if config is None else config.model_dump(exclude_unset=True)
        await self.backend().train(self, trajectory_groups, **{**given, **(_config or {}), "verbose": verbose})

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Imitate trajectories: what the model or anybody else said in them."""
        if _config:
            raise ConfigError(f"train_sft: _config={dict(_config)!r} is not there with art; use TrainSFTConfig")
        await self.backend().train_sft(self, trajectories, config or TrainSFTConfig())

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints but the newest and the best one."""
        await self.backend().delete_checkpoints(self, best_checkpoint_metric)

    def set_cost_calculator(self, calculator: Any) -> None:
        """Refused: art counts no costs of its own."""
        raise ConfigError(_COSTS.format("set_cost_calculator"))
