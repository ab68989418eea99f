"""LocalBackend: trains each model in a run of its own, in ``.art/PROJECT/models/NAME``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import art_core
import art_openpipe
from art_core import Run
from art_core.errors import ConfigError, RewardError
from art_core.plugin_api import API_KEY, Display, Plugins, Tracker, Trackers, flat_advice, in_thread, untrained_advice
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints
from art_openpipe import dev, sft
from art_openpipe.arguments import Settings, settings
from art_openpipe.handover import Handover
from art_openpipe.metrics import add_history, best_step, of_groups, of_step
from art_openpipe.record import Record
from art_openpipe.trajectories import Trajectory, TrajectoryGroup
from art_openpipe.types import LocalTrainResult, TrainSFTConfig, folder_of

if TYPE_CHECKING:
    from art_openpipe.model import Model, TrainableModel

log = logging.getLogger("art_openpipe")

LEARNER = "openpipe/learner"  # the store's key for the settings that the learner was loaded with
REFUSED = {
    "gpu_cost_per_hour_usd": (None, "art tracks seconds (time/step_wall_s) but no costs"),
    "enable_expert_replay": (True, "art does not replay experts at all"),
}
"""Argument of OpenPipe ART -> the value that changes nothing, and why others are refused."""
OF_STEP = ("advantage", "checkpoint_every", "kl", "importance_cap")  # fields of the config that a step may override


@dataclass
class Opened:
    """A model's open run."""

    run: Run
    record: Record
    trackers: Trackers
    own: Mapping[str, Any]  # the backend's defaults for what a step may override
    tuned: bool = False  # whether a step's settings have been applied to the learner, which fixes some of them
    loaded_with: dict[str, Any] = field(default_factory=dict)  # the learner's settings, if the run was resumed


class LocalBackend:
    """Trains models on this machine. ``path`` contains their folders; default: ``ART_PATH``, or else ``.art``.

    ``trackers`` receive every step, as in ``art_core.train``. ``settings`` are art's, for all models: ``engine``, ``learner`` and
    the fields of ``art_core.TrainConfig``. Runs end with ``close``, with ``async with``, or with the event loop.
    """

    def __init__(self, *, path: str | None = None, trackers: Sequence[str | Tracker] = (), **settings: Any) -> None:
        settings.pop("in_process", None)  # where training runs; results are the same
        for name, (usual, why) in REFUSED.items():
            if (value := settings.pop(name, usual)) != usual:
                raise ConfigError(f"LocalBackend({name}={value!r}) is not supported: {why}; remove it")
        self._path = path
        self._trackers = tuple(trackers)
        self._settings = settings
        self._opened: dict[Path, Opened] = {}
        self._opening: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        """By folder; a lock lives as long as someone waits for it or holds it."""
        self._lifetimes: list[asyncio.Task[None]] = []
        self._tracked: Path | None = None  # the folder of the run that the tracker objects receive

    def __deepcopy__(self, memo: Any) -> LocalBackend:
        """Copies of a model share its backend."""
        return self

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the runs open until the event loop ends, because a plain ``with`` can't await."""

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every model's run: serving stops, and everything is saved."""
        while self._lifetimes:
            lifetime = self._lifetimes.pop()
            lifetime.cancel()
            await lifetime

    def folder(self, model: Model) -> Path:
        """Return a model's folder; for a trainable model, it is the run folder."""
        base = self._path or os.environ.get("ART_PATH") or model.base_path
        return folder_of(base, model.project, model._storage_name())

    async def register(self, model: Model, _openai_client_config: Any = None) -> None:
        """Set the model's backend; if it is trainable, open its run and set its address."""
        dev.refuse_server_config(_openai_client_config)
        model._backend = self
        if not model.trainable:
            return
        folder = self.folder(model)
        async with self._opening.setdefault(folder, asyncio.Lock()):
            if folder not in self._opened:
                self._opened[folder] = await self._open(model)
        model.inference_base_url, model.inference_api_key = self._opened[folder].record.base_url, API_KEY
        model.inference_model_name = model.name

    async def _open(self, model: TrainableModel) -> Opened:
        opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
        # A task, because an event loop that ends cancels its tasks and awaits them; so scripts need not close anything.
        lifetime = asyncio.create_task(self._lifetime(model, opened))
        try:
            with Display() as screen:
                screen.phase(f"{model.name}: starting the engine", None)
                await asyncio.wait((lifetime, opened), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            lifetime.cancel()
            await asyncio.wait([lifetime])
            raise
        if lifetime.done():  # it failed
            await lifetime
        self._lifetimes.append(lifetime)
        return opened.result()

    def _settings_of(self, model: TrainableModel, base_model: str) -> dict[str, Any]:
        own = dev.settings_of(model._internal_config, model.lora_config)
        if own and base_model != model.base_model:
            log.warning("ART_MODEL=%s: ignoring the settings %s, which are for %s", base_model, own, model.base_model)
            own = {}
        if self._settings.get("engine", "embedded") == "embedded":
            if "engine_args" in self._settings:
                raise ConfigError("engine_args are vLLM's: pass LocalBackend(engine='vllm'), or remove them")
            if arguments := own.pop("engine_args", None):
                log.warning("engine_args=%s are vLLM's and ignored; LocalBackend(engine='vllm') uses them", arguments)
        return {"keep_checkpoints": None, **own, **self._settings}  # kept until delete_checkpoints

    def _claim_trackers(self, folder: Path) -> None:
        """Assign the tracker objects to this model. Raises ConfigError if they belong to another model."""
        objects = [type(tracker).__name__ for tracker in self._trackers if not isinstance(tracker, str)]
        if objects and self._tracked not in (None, folder):
            tracking = f"LocalBackend(trackers=) has objects ({', '.join(objects)}) that already track {self._tracked}"
            raise ConfigError(f"{tracking}. Pass trackers by name, or use a separate LocalBackend for each model")
        self._tracked = folder

    async def _lifetime(self, model: TrainableModel, ready: asyncio.Future[Opened]) -> None:
        """Open the model's run and keep it open until cancelled."""
        folder = self.folder(model)
        self._claim_trackers(folder)
        loaded_with = await asyncio.to_thread(_loaded_with, folder)
        base_model = os.environ.get("ART_MODEL") or model.base_model
        settings, plugins = self._settings_of(model, base_model), Plugins(art_openpipe)
        factories = Trackers.find(plugins, self._trackers)
        async with art_core.open_run(folder, model=base_model, plugins=plugins, **{**settings, **loaded_with}) as run:
            own = {name: settings.get(name, getattr(art_core.TrainConfig, name)) for name in OF_STEP}
            loss = settings.get("loss")
            own["loss"] = run.plugins.choose("register_losses", loss) if isinstance(loss, str) else loss
            trackers = Trackers(factories, run.run_dir, run.config, log.warning)
            opened = Opened(run, Record(run, model.name), trackers, own, loaded_with=loaded_with)
            try:
                await opened.record.open()
                ready.set_result(opened)
                with suppress(asyncio.CancelledError):
                    await asyncio.Future()
            finally:
                self._opened.pop(self.folder(model), None)
                await model.aclose()
                await opened.record.close()
                await in_thread(trackers.close)

    def opened(self, model: Model) -> Opened:
        """Return a model's open run; ConfigError if it is not registered with this backend."""
        folder = self.folder(model)
        if folder not in self._opened:
            raise ConfigError(f"the model {model.name!r} is not registered: await model.register(backend) first")
        return self._opened[folder]

    async def train(
        self, model: TrainableModel, trajectory_groups: Iterable[TrajectoryGroup], **arguments: Any
    ) -> LocalTrainResult:
        """Take one optimizer step on the groups, then save and serve the new weights. Logs nothing: see ``model.log``.

        ``arguments.py`` maps the arguments. Raises CaptureError if a choice was not answered by this model.
        """
        opened = self.opened(model)
        step_settings = settings(arguments, opened.own)
        run, groups = opened.run, _checked(trajectory_groups)
        run.config = replace(run.config, **step_settings.of_run)
        scored = await Handover(opened.record, "train", run.step + 1).groups(groups)
        await self._tune(opened, step_settings)
        measured = await run.learn(scored)
        for advice in (untrained_advice(run.step, measured), flat_advice([measured], scored, at=(1,))):
            if advice:
                log.warning("step %d of %s: %s", run.step, model.name, advice)
        metrics = {**of_groups(groups, "train"), **of_step(measured)}
        opened.trackers.notify("log", run.step, measured)
        opened.trackers.notify("log_groups", run.step, scored, "train")
        if arguments.get("verbose"):
            print(json.dumps({"step": run.step, **metrics}))  # noqa: T201 - verbose output
        return LocalTrainResult(run.step, metrics, self._checkpoint_path(opened))

    async def _tune(self, opened: Opened, step_settings: Settings) -> None:
        """Apply a step's settings to the learner. Raises ConfigError if they differ from those that are fixed by now."""
        run, of_learner = opened.run, step_settings.of_learner
        before = {name: getattr(run.config, name) for name in of_learner}
        if opened.tuned or opened.loaded_with:
            changed = {name: value for name, value in of_learner.items() if (value or None) != (before[name] or None)}
            if changed:
                raise ConfigError(
                    f"this run was started with {before}, and the learner cannot change them half way (requested: {changed}); "
                    "keep kl_penalty_coef and truncated_importance_sampling the same in every step, or use another run_name"
                )
        else:
            run.config = replace(run.config, **of_learner)
            run.store.set_meta(LEARNER, of_learner)
        learner = await run.learner()
        if step_settings.loss_given or hasattr(learner, "loss"):
            _set(learner, "loss", step_settings.loss)
        if step_settings.learning_rate is not None:
            _set(learner, "learning_rate", step_settings.learning_rate)
        opened.tuned = True

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig
    ) -> LocalTrainResult:
        """Train to imitate the trajectories, in one pass over them; see ``sft.py``. The rates are those of this call alone."""
        opened = self.opened(model)
        run = opened.run
        run.config = replace(run.config, **settings({"save_checkpoint": False}, opened.own).of_run)
        batches, measured = list(sft.batches(list(trajectories), config)), []
        learner = await run.learner()
        rate_before = getattr(learner, "learning_rate", None)
        try:
            for batch, rate in batches:
                imitable = await sft.imitable(opened.record, batch, config.assistant_turns)
                if rate is not None:
                    _set(learner, "learning_rate", rate)
                measured += await run.learn_sft(imitable, batch_size=len(imitable))
        finally:
            if rate_before is not None:
                learner.learning_rate = rate_before
        await run.checkpoint()  # one for all batches: hundreds would fill the disk
        return LocalTrainResult(run.step, of_step(*measured), self._checkpoint_path(opened))

    async def log(
        self, model: Model, groups: Sequence[TrajectoryGroup], split: str, metrics: dict[str, float], step: int | None
    ) -> None:
        """Add means and the script's own metrics to the history, and to the run the rollouts that ``train`` does not add."""
        step = (self.opened(model).run.step if model.trainable else 0) if step is None else step
        if model.trainable and groups and split != "train":
            opened = self.opened(model)
            scored = await Handover(opened.record, "eval", step).groups(groups)
            opened.trackers.notify("log_groups", step, scored, "eval")
        of_all = of_groups(groups, split) if groups else {}
        add_history(self.folder(model), split, step, {**of_all, **metrics})

    async def delete_checkpoints(self, model: TrainableModel, best_checkpoint_metric: str) -> None:
        """Delete all checkpoints except the newest and the best by a metric in ``history.jsonl``."""
        best = best_step(self.folder(model), best_checkpoint_metric)
        for checkpoint in checkpoints(self.folder(model))[:-1]:
            if checkpoint_step(checkpoint) != best:
                await asyncio.to_thread(shutil.rmtree, checkpoint)

    def _checkpoint_path(self, opened: Opened) -> str | None:
        """Return the newest step's checkpoint and pass it to the trackers; None if it was not saved."""
        newest = opened.run.run_dir / "checkpoints" / f"step-{opened.run.step:06d}"
        if not newest.is_dir():
            return None
        opened.trackers.notify("log_checkpoint", opened.run.step, newest)
        return str(newest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_experimental_"):
            raise ConfigError(
                f"LocalBackend.{name} is not supported by art: checkpoints are plain folders in .art/PROJECT/models/RUN_NAME/"
                "checkpoints; copy them with any S3 client, export one with 'art export', or fork one with base_model='FOLDER'"
            )
        raise AttributeError(f"LocalBackend has no {name!r}")


def _loaded_with(folder: Path) -> dict[str, Any]:
    """Return the settings that the learner of an earlier process was loaded with."""
    if not (folder / "run.sqlite").is_file():
        return {}
    with Store(folder / "run.sqlite") as store:
        return store.meta(LEARNER) or {}


def _checked(groups: Iterable[Any]) -> list[TrajectoryGroup]:
    checked = list(groups)
    for group in checked:
        if not isinstance(group, TrajectoryGroup):
            kind = type(group).__name__
            raise ConfigError(f"train got a {kind}; put the trajectories of one task into an art.TrajectoryGroup")
        if group.awaited:
            raise ConfigError("a TrajectoryGroup has not run yet; await art.gather_trajectory_groups(groups) first")
        for reward in (trajectory.reward for trajectory in group if not math.isfinite(trajectory.reward)):
            raise RewardError(f"the reward of a trajectory must be a finite number, got {reward}")
    return checked


def _set(learner: Any, name: str, value: Any) -> None:
    if not hasattr(learner, name):
        kind = type(learner).__name__
        raise ConfigError(f"{kind} can't change {name} from step to step; pass LocalBackend({name}=) instead")
    setattr(learner, name, value)
