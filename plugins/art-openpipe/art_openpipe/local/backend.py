"""LocalBackend: one open run of art per model, in ``.art/PROJECT/models/NAME``. Knows nothing about how rollouts go."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import art_core
import art_openpipe
from art_core.errors import ConfigError, RewardError
from art_core.loop.advice import flat_advice, untrained_advice
from art_core.loop.display import Display
from art_core.loop.rollout import API_KEY
from art_core.loop.run import Run
from art_core.loop.trackers import Tracker, Trackers
from art_core.plugins import Plugins
from art_core.runtime.threads import in_thread
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints
from art_openpipe import dev, sft
from art_openpipe.arguments import Settings, settings
from art_openpipe.handover import Handover
from art_openpipe.history import add_history, best_step, of_groups, of_step
from art_openpipe.record import Record
from art_openpipe.trajectories import Trajectory, TrajectoryGroup
from art_openpipe.types import LocalTrainResult, TrainSFTConfig, folder_of

if TYPE_CHECKING:
    from art_openpipe.model import Model, TrainableModel

log = logging.getLogger("art_openpipe")

LEARNER = "openpipe/learner"
"""Under which the store keeps what the learner was loaded with."""
USUAL = {"keep_checkpoints": None}
"""Settings that differ from art's defaults: checkpoints stay until ``delete_checkpoints``."""
OF_STEP = ("advantage", "checkpoint_every", "kl", "importance_cap")
"""Fields of the config that a step may ask for otherwise."""


@dataclass
class Opened:
    """A model's run while it is open."""

    run: Run
    record: Record
    trackers: Trackers
    own: Mapping[str, Any]
    """The backend's settings of what a step may ask for otherwise."""
    tuned: bool = False
    """Whether the learner has been given a step's settings, and some of them cannot change any more."""
    begun: dict[str, Any] = field(default_factory=dict)
    """With which settings the learner was loaded, where a run goes on."""


class LocalBackend:
    """Trains models on this machine. ``path`` is where their folders are: by default ``ART_PATH``, else ``.art``.

    ``trackers`` are told of every step, as those of ``art_core.train``. ``settings`` are art's own, of every model: ``engine``,
    ``learner`` and the fields of ``art_core.TrainConfig``. A run is closed by ``await backend.close()``, by ``async with``, and
    else when the event loop ends, as at the end of ``asyncio.run``.
    """

    def __init__(
        self,
        *,
        in_process: bool = False,
        path: str | None = None,
        gpu_cost_per_hour_usd: float | None = None,
        trackers: Sequence[str | Tracker] = (),
        **settings: Any,
    ) -> None:
        if gpu_cost_per_hour_usd is not None:
            raise ConfigError("gpu_cost_per_hour_usd: art counts seconds (time/step_wall_s) and no costs; leave it out")
        if in_process:
            log.warning(
                "in_process=True changes nothing: art serves from a process of its own, so that agents never wait for it"
            )
        self._path = path
        self._trackers = tuple(trackers)
        self._settings = settings
        self._opened: dict[Path, Opened] = {}
        self._opening: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        """By folder; each is kept by those who wait for it or hold it."""
        self._lifetimes: list[AsyncIterator[Opened]] = []
        self._told: Path | None = None
        """The folder of the model whose run the tracker objects are told of."""
        _backends.add(self)

    def __deepcopy__(self, memo: Any) -> LocalBackend:
        """Be the backend of a model's copies, too."""
        return self

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the runs to the end of the event loop: a plain ``with`` cannot wait for them."""

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every model's run: serving stops, and everything is on disk."""
        while self._lifetimes:
            await self._lifetimes.pop().aclose()

    def folder(self, model: Model) -> Path:
        """Return the folder of a model, which for a trainable one is its run folder."""
        return folder_of(self._path or os.environ.get("ART_PATH") or model.base_path, model.project, model.name)

    async def register(self, model: Model, _openai_client_config: Any = None) -> None:
        """Open the model's run, where it is trainable, and tell it where it answers."""
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
        folder = self.folder(model)
        self._claim_trackers(folder)
        begun = await asyncio.to_thread(_begun, folder)
        base_model = os.environ.get("ART_MODEL") or model.base_model
        own = dev.settings_of(model._internal_config)
        if own and base_model != model.base_model:
            log.warning(
                "ART_MODEL=%s: the settings %s were for %s, and are left out", base_model, own, model.base_model
            )
            own = {}
        given = {**USUAL, **own, **self._settings}
        whole, plugins = {**given, **begun}, Plugins(art_openpipe)
        opening = art_core.open_run(folder, model=base_model, plugins=plugins, **whole)
        if (arguments := whole.get("engine_args")) and given.get("engine", "embedded") == "embedded":
            log.warning("engine_args=%s are vLLM's, and engine='embedded' reads none", arguments)
        # A generator, because an event loop closes those that are open when it ends: scripts need not close anything.
        lifetime = self._lifetime(model, opening, plugins, begun, given)
        with Display() as screen:
            screen.phase(f"{model.name}: starting the engine", None)
            opened = await anext(lifetime)
        self._lifetimes.append(lifetime)
        return opened

    def _claim_trackers(self, folder: Path) -> None:
        """Note whose tracker objects these are. Raises ConfigError where they are another model's."""
        objects = [type(it).__name__ for it in self._trackers if not isinstance(it, str)]
        if objects and self._told not in (None, folder):
            raise ConfigError(
                f"LocalBackend(trackers=) has objects ({', '.join(objects)}), which are told of the run in {self._told}; they "
                f"cannot be told of that in {folder} too. Give trackers by name, or each model a LocalBackend of its own"
            )
        self._told = folder

    async def _lifetime(
        self,
        model: TrainableModel,
        opening: AbstractAsyncContextManager[Run],
        plugins: Plugins,
        begun: dict[str, Any],
        given: Mapping[str, Any],
    ) -> AsyncIterator[Opened]:
        # The only generator that is open here: a loop that ends closes all of them at the same time.
        found = Trackers.find(plugins, self._trackers)
        async with opening as run:
            own = {name: given.get(name, getattr(art_core.TrainConfig, name)) for name in OF_STEP}
            loss = given.get("loss")
            own["loss"] = run.plugins.choose("register_losses", loss) if isinstance(loss, str) else loss
            trackers = Trackers(found, run.run_dir, run.config, log.warning)
            opened = Opened(run, Record(run, model.name), trackers, own, begun=begun)
            try:
                await opened.record.open()
                yield opened
            finally:
                self._opened.pop(self.folder(model), None)
                await model.aclose()
                await opened.record.close()
                await in_thread(trackers.close)

    def opened(self, model: Model) -> Opened:
        """Return the open run of a model; ConfigError where it is not registered here."""
        folder = self.folder(model)
        if folder not in self._opened:
            raise ConfigError(f"the model {model.name!r} is not registered: await model.register(backend) first")
        return self._opened[folder]

    async def train(
        self, model: TrainableModel, trajectory_groups: Iterable[TrajectoryGroup], **given: Any
    ) -> LocalTrainResult:
        """Take one optimizer step on the groups, serve and save the new weights.

        Keywords are OpenPipe ART's; what art has under another name is mapped, what it has not is refused by name
        (``arguments.py``); what is left out is as ``LocalBackend`` was given it. Raises CaptureError where a choice was not
        answered by this model, ConfigError where there is none.
        """
        opened = self.opened(model)
        wanted = settings(given, opened.own)
        run, groups = opened.run, _checked(trajectory_groups)
        run.config = replace(run.config, **wanted.of_run)
        found = await Handover(opened.record, "train", run.step + 1).groups(groups)
        await self._tune(opened, wanted)
        measured = await run.learn(found)
        for advice in (untrained_advice(run.step, measured), flat_advice([measured], found, at=(1,))):
            if advice:
                log.warning("step %d of %s: %s", run.step, model.name, advice)
        metrics = {**of_groups(groups, "train"), **of_step(measured)}
        add_history(self.folder(model), run.step, metrics)
        opened.trackers.tell("log", run.step, measured)
        opened.trackers.tell("log_groups", run.step, found, "train")
        if given.get("verbose"):
            print(json.dumps({"step": run.step, **metrics}))  # noqa: T201 - what verbose asks for
        return LocalTrainResult(run.step, metrics, self._checkpoint_path(opened))

    async def _tune(self, opened: Opened, wanted: Settings) -> None:
        """Give the learner what this step asks for. Raises ConfigError for what it was loaded without."""
        run, before = opened.run, {name: getattr(opened.run.config, name) for name in wanted.of_learner}
        if opened.tuned or opened.begun:
            changed = {
                name: value for name, value in wanted.of_learner.items() if (value or None) != (before[name] or None)
            }
            if changed:
                raise ConfigError(
                    f"this run began with {before}, and the learner cannot change that half way ({changed} was asked for); keep "
                    "kl_penalty_coef and truncated_importance_sampling, or LocalBackend(kl=, importance_cap=), the same in every "
                    "step, or train under another name"
                )
        else:
            run.config = replace(run.config, **wanted.of_learner)
            run.store.set_meta(LEARNER, wanted.of_learner)
        learner = await run.learner()
        if wanted.loss_given or hasattr(learner, "loss"):
            _set(learner, "loss", wanted.loss)
        if wanted.learning_rate is not None:
            _set(learner, "learning_rate", wanted.learning_rate)
        opened.tuned = True

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig
    ) -> LocalTrainResult:
        """Imitate the trajectories, one pass over them; see ``sft.py``."""
        opened = self.opened(model)
        run = opened.run
        run.config = replace(run.config, **settings({}, opened.own).of_run)
        measured = []
        for batch, rate in sft.batches(list(trajectories), config):
            found = await sft.imitable(opened.record, batch)
            if rate is not None:
                _set(await run.learner(), "learning_rate", rate)
            measured += await run.learn_sft(found, batch_size=len(found))
        metrics = of_step(measured[-1]) if measured else {}
        add_history(self.folder(model), run.step, metrics)
        return LocalTrainResult(run.step, metrics, self._checkpoint_path(opened))

    async def log(self, model: Model, groups: Sequence[TrajectoryGroup], split: str, step: int | None) -> None:
        """Note what the groups are worth, and keep the runs of a trainable model in its store."""
        step = (self.opened(model).run.step if model.trainable else 0) if step is None else step
        if model.trainable and groups:
            opened = self.opened(model)
            found = await Handover(opened.record, "eval", step).groups(groups)
            opened.trackers.tell("log_groups", step, found, "eval")
        add_history(self.folder(model), step, of_groups(groups, split))

    def add_metrics(self, model: Model, metrics: dict[str, float], step: int | None) -> None:
        """Note numbers of the script's own."""
        step = (self.opened(model).run.step if model.trainable else 0) if step is None else step
        add_history(self.folder(model), step, metrics)

    async def delete_checkpoints(self, model: TrainableModel, best_checkpoint_metric: str) -> None:
        """Delete all checkpoints but the newest one and the best by a metric of ``history.jsonl``."""
        folder = self.folder(model)
        kept = checkpoints(folder)[-1:]
        best = best_step(folder, best_checkpoint_metric)
        for checkpoint in checkpoints(folder):
            if checkpoint not in kept and checkpoint_step(checkpoint) != best:
                await asyncio.to_thread(shutil.rmtree, checkpoint)

    def _checkpoint_path(self, opened: Opened) -> str | None:
        """Return the folder of the newest step's checkpoint, where it was saved; trackers are told."""
        run = opened.run
        newest = run.run_dir / "checkpoints" / f"step-{run.step:06d}"
        if not newest.is_dir():
            return None
        opened.trackers.tell("log_checkpoint", run.step, newest)
        return str(newest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_experimental_"):
            raise ConfigError(_EXPERIMENTAL.format(name))
        raise AttributeError(f"LocalBackend has no {name!r}")


_EXPERIMENTAL = (
    "LocalBackend.{} is not there with art. Checkpoints are plain folders in .art/PROJECT/models/NAME/checkpoints: copy them "
    "with any S3 client, take a model elsewhere with 'art export', fork one by base_model='FOLDER OF A CHECKPOINT', another name"
)


def _begun(folder: Path) -> dict[str, Any]:
    """Return what the learner of an earlier process was loaded with."""
    if not (folder / "run.sqlite").is_file():
        return {}
    with Store(folder / "run.sqlite") as store:
        return store.meta(LEARNER) or {}


def _checked(groups: Iterable[Any]) -> list[TrajectoryGroup]:
    found = list(groups)
    for group in found:
        if not isinstance(group, TrajectoryGroup):
            raise ConfigError(
                f"train takes a list of art.TrajectoryGroup, this is a {type(group).__name__}: put the trajectories of one task "
                "into a group"
            )
        if group.awaited:
            raise ConfigError("a TrajectoryGroup has not been run: await art.gather_trajectory_groups(groups) first")
        for trajectory in group.trajectories:
            if not math.isfinite(trajectory.reward):
                raise RewardError(f"a trajectory has the reward {trajectory.reward}; set a finite int or float")
    return found


def _set(learner: Any, name: str, value: Any) -> None:
    if not hasattr(learner, name):
        raise ConfigError(
            f"{type(learner).__name__} cannot be given another {name} at every step; give LocalBackend({name}=) once, and "
            "leave it out of train"
        )
    setattr(learner, name, value)


_backends: WeakSet[LocalBackend] = WeakSet()


def all_opened() -> list[Opened]:
    """Return every trainable model's run that is open in this process."""
    return [opened for backend in _backends for opened in backend._opened.values()]
