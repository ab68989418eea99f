"""OpenPipe ART's Model and TrainableModel. Training itself is up to the backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from openai import APIConnectionError, AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, PrivateAttr

from art_core.errors import ConfigError
from art_core.store.run_folder import write_whole
from art_openpipe.histories import ChatCompletionsExchange
from art_openpipe.record import BASE, calling_scope, current_scope
from art_openpipe.trajectories import Trajectory, TrajectoryGroup
from art_openpipe.types import LocalServingUnavailableError, TrainSFTConfig, folder_of

Config = TypeVar("Config")
State = TypeVar("State")
SECONDS = 1200.0  # calls wait while new weights are loaded
_TRACKED = "W&B is told of a run by LocalBackend(trackers=['wandb']), and by W&B's own variables, such as WANDB_ENTITY"
_COSTS = "art does not track costs; use trajectory.metrics or await model.log(metrics=...), which keep any number"
REFUSED = {
    **dict.fromkeys(["entity", "id", "run_id", "report_metrics", "update_wandb_config"], _TRACKED),
    **dict.fromkeys(["metrics_builder", "activate_metrics_context", "cost_calculator", "set_cost_calculator"], _COSTS),
    "train": "OpenPipe ART has removed it; use await backend.train(model, groups, ...)",
}  # unsupported fields and methods -> why


class _Client(AsyncOpenAI):
    """Notes answers of prompted models, which no server of ours records, and says if a trainable model's server is gone."""

    trainable = property(lambda self: str(self.base_url).rstrip("/").endswith(BASE))

    async def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        try:
            answer = await super().request(cast_to, options, **kwargs)
        except APIConnectionError as error:
            if not self.trainable:
                raise
            message = f"the model's address {self.base_url} can't be reached ({error}); register the model again"
            raise LocalServingUnavailableError(message) from error
        if isinstance(answer, ChatCompletion) and not self.trainable and (scope := current_scope()):
            scope.noted.append(ChatCompletionsExchange(request=dict(options.json_data), response=answer))
        return answer


_clients: dict[tuple[str | None, str | None], _Client] = {}  # by address and key


class Model(BaseModel, Generic[Config, State]):
    """A model that rollouts call; this base class is a model that is only prompted, at ``inference_base_url``."""

    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    config: Config | None = None
    inference_api_key: str | None = None
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    trainable: ClassVar[bool] = False
    _backend: Any = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        for name in REFUSED.keys() & fields.keys():
            if value := fields.pop(name):
                raise ConfigError(f"{type(self).__name__}({name}={value!r}) is not supported by art: {REFUSED[name]}")
        super().__init__(**fields)

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise ConfigError(f"{type(self).__name__}.{name} is not supported by art: {REFUSED[name]}")
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic defines it

    def backend(self) -> Any:
        """Return the backend of the model; ConfigError if it is not registered."""
        if self._backend is None:
            raise ConfigError(f"the model {self.name!r} is not registered: await model.register(backend) first")
        return self._backend

    async def register(self, backend: Any, _openai_client_config: Any = None) -> None:
        """Register the model with ``backend``, which stores its files. A trainable model's run is opened or resumed."""
        await backend.register(self, _openai_client_config)

    def openai_client(self) -> AsyncOpenAI:
        """Return a client whose calls this model answers; pass ``model=model.get_inference_name()`` in each call."""
        base_url, api_key = self.inference_base_url, self.inference_api_key
        if base_url is None or api_key is None:
            missing = "inference_base_url and inference_api_key, or model.register(backend)"
            raise ConfigError(f"the model {self.name!r} has no address: it needs {missing}")
        client = _clients.get((base_url, api_key))
        if client is None or client.is_closed():
            client = _clients[base_url, api_key] = _Client(base_url=base_url, api_key=api_key, timeout=SECONDS)
        return client

    async def aclose(self) -> None:
        """Close the client; ``openai_client`` creates a new one."""
        if client := _clients.pop((self.inference_base_url, self.inference_api_key), None):
            await client.close()

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name to pass as ``model``. ``step`` can only be the newest, because art serves no older checkpoints."""
        if step is not None and self.trainable and step != self.backend().opened(self).run.step:
            raise ConfigError(f"step={step} is not served, but the newest weights only; see art_core.evaluate(model=)")
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the keywords with which ``litellm.acompletion`` calls this model."""
        name = self.get_inference_name(step)
        params = {"base_url": self.inference_base_url, "api_key": self.inference_api_key, "temperature": 1.0}
        if scope := calling_scope():  # LiteLLM's client is not redirected, so it can't add the header by itself
            params["extra_headers"] = {"x-art-agent": scope}
        return {"model": f"hosted_vllm/{name}" if self.trainable else name, **params}

    async def get_step(self) -> int:
        """Return the number of training steps so far."""
        return self.backend().opened(self).run.step if self.trainable else 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Append a line to the model's ``history.jsonl``: means over the trajectories, and ``metrics``."""
        items = list(trajectories or ())
        groups = [item for item in items if isinstance(item, TrajectoryGroup)]
        if single := [item for item in items if not isinstance(item, TrajectoryGroup)]:
            groups.append(TrajectoryGroup(single))
        if groups or metrics:
            await self.backend().log(self, groups, split, dict(metrics or {}), step)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Write the JSON-serializable ``state`` to ``state.json`` in the model's folder."""
        self._state_file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._state_file(), json.dumps(dict(state), indent=2))

    write_state = overwrite_state

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Update the stored state with ``state``, dicts inside it too; return the result."""
        merged = _merged(self.read_state() or {}, state)
        self.overwrite_state(merged)
        return merged

    def read_state(self) -> dict[str, Any] | None:
        """Return the stored state; None if there is none."""
        file = self._state_file()
        return json.loads(file.read_text()) if file.is_file() else None

    def _storage_name(self) -> str:
        return self.run_name if self.trainable else self.name

    def _state_file(self) -> Path:
        own = folder_of(self.base_path, self.project, self._storage_name())
        return (own if self._backend is None else self._backend.folder(self)) / "state.json"

    def safe_model_dump(self) -> dict[str, Any]:
        """Return the model as JSON values, without its API key."""
        return self.model_dump(mode="json", exclude={"inference_api_key"})


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


class TrainableModel(Model[Config, State], Generic[Config, State]):
    """A model to train. ``run_name`` names its folder; the environment variable ART_MODEL overrides ``base_model``."""

    run_name: str
    base_model: str
    lora_config: dict[str, Any] | None = None
    trainable: ClassVar[bool] = True
    _internal_config: Any = PrivateAttr(default=None)

    def __init__(self, *, _internal_config: Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self._internal_config = _internal_config

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        verbose: bool = False,
        log_metrics: bool = True,
    ) -> None:
        """Train to imitate the assistant messages in the trajectories, whoever wrote them."""
        result = await self.backend().train_sft(self, trajectories, config or TrainSFTConfig())
        if log_metrics:
            await self.log(metrics=result.metrics, split="train", step=result.step)
        if verbose:
            print(json.dumps({"step": result.step, **result.metrics}))  # noqa: T201 - verbose output

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints except the newest and the best."""
        await self.backend().delete_checkpoints(self, best_checkpoint_metric)
