"""The classic API: GRPO for an agent in an environment, and the loss alone.

``GRPOTrainer(agent=, environment=, ...)`` is ``open_run`` under the classic names; ``GRPOTrainer(model, reference_model)``
computes only the loss.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any

from art_classic.action_loss import ActionLoss
from art_classic.agent import Agent, as_json, request_ids
from art_classic.environment import Environment, State
from art_classic.episodes import Actor, Episode, play
from art_core import Run, open_run
from art_core.errors import CaptureError, ConfigError, StoreError
from art_core.plugin_api import check_settings, display, flat_advice, in_thread, untrained_advice
from art_core.store import recorded_settings
from art_core.types import Group, RolloutAddress, Trajectory
from art_embedded.single_file_checkpoint import write_one_file

if TYPE_CHECKING:
    from torch import Tensor

OUTPUT = ("actions", "rewards", "total_reward", "steps", "done")
"""The keys of an episode that are stored as its rollout's output."""
FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
FORMS = "pass agent= and environment= to train an agent, or a model and a reference model for the loss alone"


class GRPOTrainer:
    """Trains the model of ``agent`` in ``environment``: ``collect_episodes``, ``update_policy``, ``save_checkpoint``.

    A batch has ``episodes_per_batch`` episodes in GRPO groups of ``batch_size``: the episodes of a group start in copies of the
    same reset environment and are compared with each other. ``kl_penalty`` is the coefficient of the KL term towards the start
    weights; ``learning_rate=None`` uses the default for the model's size. ``discount=None`` trains every call with its
    episode's total reward; a number trains each call with the discounted sum of the rewards from its action on (0: the reward
    of its action alone), for agents that use ``generate_response``. ``model`` defaults to the agent's. Further keywords are
    those of ``open_run``: ``run_dir``, ``seed``, ``lora_rank``, ``engine`` and so on.

    The run is opened by the first call, and closed by ``aclose``, at the end of ``async with``, or with the event loop. Every
    episode has a copy of the environment (``copy.deepcopy``) and of the agent (``copy.copy``).

    ``GRPOTrainer(model, reference_model, beta=0.1)`` has only ``compute_grpo_loss`` and ``get_log_probs``.
    """

    def __init__(
        self,
        model: Any = None,
        reference_model: Any = None,
        beta: float | None = None,
        *,
        agent: Actor | None = None,
        environment: Environment | None = None,
        learning_rate: float | None = None,
        batch_size: int = 8,
        episodes_per_batch: int = 32,
        max_episode_length: int = 50,
        kl_penalty: float = 0.0,
        discount: float | None = None,
        tokenizer: Any = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        if (agent is None) != (environment is None) or (agent is None) == (reference_model is None):
            raise ConfigError(f"GRPOTrainer has two forms: {FORMS}")
        self._loss: ActionLoss | None = None
        self._holding: asyncio.Task[None] | None = None
        if reference_model is not None:
            _check_loss_alone({
                "learning_rate": learning_rate, "batch_size": batch_size, "episodes_per_batch": episodes_per_batch,
                "max_episode_length": max_episode_length, "kl_penalty": kl_penalty, "discount": discount, **settings,
            })  # fmt: skip
            self._loss = ActionLoss(model, reference_model, 0.1 if beta is None else beta, tokenizer)
            return
        if beta is not None or tokenizer is not None:
            raise ConfigError(
                f"beta= and tokenizer= are for the loss alone; for training an agent, use kl_penalty=: {FORMS}"
            )
        _check_settings(batch_size, episodes_per_batch, max_episode_length, settings)
        self.agent, self.environment = agent, environment
        self.batch_size, self.episodes_per_batch = batch_size, episodes_per_batch
        self.max_episode_length, self.kl_penalty, self.discount = max_episode_length, kl_penalty, discount
        if learning_rate is not None:
            settings["learning_rate"] = learning_rate
        self._groups = -(-episodes_per_batch // batch_size)
        self._settings = {"kl": kl_penalty, "group_size": batch_size, "tasks_per_step": self._groups, **settings}
        self._model = _start(agent, model, settings.get("run_dir"))
        self._screen, self._metrics = display(progress), list[dict[str, float]]()
        self._begun = 0
        self._resetting = asyncio.Lock()

    # the loss alone

    def compute_grpo_loss(
        self, states: Sequence[Any], actions: Sequence[Any], rewards: Any, group_baselines: Any, **more: Any
    ) -> dict[str, Tensor]:
        """Return ``total_loss``, ``policy_loss``, ``kl_loss`` and ``advantages``; see ``ActionLoss.compute``."""
        return self._loss_alone().compute(states, actions, rewards, group_baselines, **more)

    def get_log_probs(self, states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        """Return the log-probability of each action under ``model``; see ``ActionLoss.log_probs``."""
        return self._loss_alone().log_probs(states, actions)

    def _loss_alone(self) -> ActionLoss:
        if self._loss is None:
            raise ConfigError(f"this GRPOTrainer trains an agent, and update_policy computes its loss: {FORMS}")
        return self._loss

    # an agent in an environment

    @property
    def run_dir(self) -> Path | None:
        """The run folder; None before the first call if ``run_dir`` was not passed."""
        run_dir = self._settings.get("run_dir")
        return Path(run_dir).expanduser() if run_dir else None

    async def collect_episodes(self) -> list[Episode]:
        """Play a batch of episodes with the current weights, and return them.

        If the agent or the environment raises, the episode has its ``error`` and all actions up to then. Raises CaptureError if
        no episode called the model, because then there is nothing to train.
        """
        run, played = await self._run(), dict[str, Episode]()
        starts = dict([await self._begin() for _ in range(self._groups)])
        tasks = [{"start": number, "state": json.loads(as_json(state))} for number, (_, state) in starts.items()]

        async def rollout(start: tuple[Environment, State], address: RolloutAddress) -> Any:
            episode = played[address.rollout_id] = Episode()
            agent, (environment, state) = _TracedAgent(copy.copy(self.agent), episode), _copy(start)
            await play(agent, environment, state, episode, self.max_episode_length)
            # Without the states: they are large, and those that the model saw are in the prompts.
            return json.loads(as_json({name: episode[name] for name in OUTPUT}))

        self._screen.phase(f"step {run.step + 1}: episodes", len(tasks) * self.batch_size)
        groups = await run.collect(
            rollout, tasks, group_size=self.batch_size, to_input=lambda task: starts[task["start"]], allow_no_calls=True
        )
        for reason, _ in Counter(t.error for g in groups for t in g.trajectories if t.error).most_common(1):
            self._screen.say_once(f"episodes failed: {reason}; they count with their rewards up to then")
        episodes = [_finished(played, trajectory) for group in groups for trajectory in group.trajectories]
        self._check_captured(episodes)
        return episodes[: self.episodes_per_batch]

    async def update_policy(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Take one optimizer step on the episodes, serve the new weights, and return the step's metrics.

        Among them are ``policy_loss``, ``kl_loss`` (``kl_penalty`` times the estimated divergence from the start weights; the
        loss is the sum of both) and ``avg_reward``. The rewards are the episodes' current ``total_reward`` and, with
        ``discount``, ``rewards``. If within every group all rewards are equal, there is nothing to learn and no step is taken:
        ``groups_with_contrast`` is 0.
        """
        run, groups = await self._run(), _grouped(episodes)
        self._screen.phase(f"step {run.step + 1}: learning", None)
        by_rollout = {episode.trajectory.rollout_id: episode for episode in episodes if episode.trajectory}
        scored = await run.score(groups, functools.partial(_reward, by_rollout, self.discount))
        metrics = await run.learn(scored)
        self._metrics.append(metrics)
        if advice := untrained_advice(run.step, metrics):
            self._screen.say_once(advice, about="skipped" if metrics.get("skipped") else "untrained")
        if advice := flat_advice(self._metrics, scored, at=(1, 3)):
            self._screen.say_once(advice, about=advice.partition(" taught")[0])
        if isinstance(self.agent, Agent):
            self.agent.follow(run.run_dir)  # outside episodes, it answers with the trained weights as well
        kl_loss = self.kl_penalty * metrics.get("kl_ref", 0.0)
        return {
            **metrics,
            "policy_loss": metrics.get("loss", 0.0) - kl_loss,
            "kl_loss": kl_loss,
            "avg_reward": fmean(episode["total_reward"] for episode in episodes),
        }

    async def save_checkpoint(self, path: str | Path) -> None:
        """Write the current weights to ``path``, for ``Agent.load_checkpoint``.

        If it ends in .pt, .pth, .bin, .ckpt or .safetensors, a single file in safetensors format: the adapter if one is trained,
        else all weights. Otherwise a folder that includes the optimizer's state and replaces an existing checkpoint. Raises
        ConfigError if another folder exists there, StoreError if it cannot be written.
        """
        run, path = await self._run(), Path(path).expanduser()
        folder = await run.checkpoint()
        if path.suffix in FILES:
            return await in_thread(write_one_file, folder, str(run.store.meta("model")), path)
        await in_thread(_copy_checkpoint, folder, path)

    async def aclose(self) -> None:
        """Save and close the run; the next call reopens it where it stopped."""
        if self._holding is not None and not self._holding.done():
            self._closing.set()
            await self._holding

    async def __aenter__(self) -> GRPOTrainer:
        await self._run()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self) -> Run:
        """Return the run, opened in this event loop."""
        self._check_form()
        if self._holding is None or self._holding.done():
            self._closing = asyncio.Event()
            self._opened: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._opened))
        return await asyncio.shield(self._opened)

    def _check_form(self) -> None:
        if self._loss is not None:
            raise ConfigError(f"this GRPOTrainer has no agent: {FORMS}")

    async def _hold(self, opened: asyncio.Future[Run]) -> None:
        """Keep the run open until ``aclose``.

        This runs as a task, so the run is closed even if the program just ends: ``asyncio.run`` cancels remaining tasks and waits
        for them.
        """
        try:
            with self._screen:
                self._screen.phase("starting the engine", None)
                async with open_run(model=self._model, **self._settings) as run:
                    self._screen.say(f"run folder: {run.run_dir}")
                    run.on_rollout = self._screen.advance
                    self._settings["run_dir"] = run.run_dir  # to resume the run if it is opened again
                    opened.set_result(run)
                    await self._closing.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)  # raised in every call that waits for the run

    async def _begin(self) -> tuple[int, tuple[Environment, State]]:
        """Reset the environment, and return the start's number with a copy of the environment and its first state.

        The environment itself is reset, not a copy, so that its random generator advances.
        """
        async with self._resetting:
            state = await self.environment.reset()
            self._begun += 1
            return self._begun - 1, _copy((self.environment, state))

    def _check_captured(self, episodes: Sequence[Episode]) -> None:
        if any(episode.trajectory and episode.trajectory.calls for episode in episodes):
            return
        failed = [episode.trajectory for episode in episodes if episode.trajectory and episode.trajectory.error]
        what = f"{type(self.agent).__name__}.select_action made no model call in any of {len(episodes)} episodes"
        if len(failed) == len(episodes):
            raise CaptureError(f"{_reason(failed[0])}: {what}, because all of them failed; this is the first failure")
        some = f"; {len(failed)} of them failed, the first with {_reason(failed[0])}" if failed else ""
        raise CaptureError(
            f"{what}{some}, so there is nothing to train. Call the model with await self.generate_response(...), or with a "
            "client whose plugin is installed ('art plugins' lists them); an agent that computes its actions can't be trained"
        )


def _reason(failed: Trajectory) -> str:
    return f"{failed.error} ({failed.error_at})" if failed.error_at else str(failed.error)


class _TracedAgent:
    """Records the request ids of an agent's model calls for each action."""

    def __init__(self, agent: Any, episode: Episode) -> None:
        self._agent, self._episode = agent, episode

    async def select_action(self, state: State) -> dict[str, Any]:
        with request_ids() as ids:
            self._episode.request_ids.append(ids)
            return await self._agent.select_action(state)


def _check_loss_alone(arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(GRPOTrainer).parameters
    refused = sorted(
        name for name, value in arguments.items() if name not in parameters or value != parameters[name].default
    )
    if refused:
        raise ConfigError(
            f"GRPOTrainer(model, reference_model) does not accept {refused}, which are for training an agent; the loss alone "
            f"has beta= and tokenizer=: {FORMS}"
        )


def _check_settings(
    batch_size: int, episodes_per_batch: int, max_episode_length: int, settings: Mapping[str, Any]
) -> None:
    check_settings(settings, GRPOTrainer)
    if batch_size < 2:
        raise ConfigError(f"batch_size must be at least 2, because episodes of a group are compared, got {batch_size}")
    if episodes_per_batch < batch_size or episodes_per_batch % batch_size:
        raise ConfigError(
            f"episodes_per_batch must be a multiple of batch_size={batch_size}, the number of episodes that start in the same "
            f"state and are compared with each other, got {episodes_per_batch}"
        )
    if max_episode_length < 1:
        raise ConfigError(f"max_episode_length must be at least 1 action, got {max_episode_length}")


def _start(agent: Any, model: Any, run_dir: Any) -> str:
    """Return the model that training starts from; for a resumed run, the one that it was started with."""
    if model is not None:
        return str(model)
    if run_dir and (begun := recorded_settings(run_dir).get("model")):
        return str(begun)
    if not isinstance(agent, Agent):
        raise ConfigError(
            f"cannot infer the model: {type(agent).__name__} is not an art_classic.agent.Agent; pass model="
        )
    return agent.start_model()


def _copy(start: tuple[Any, State]) -> tuple[Any, State]:
    """Copy an environment and its state together, so that references between them stay intact."""
    try:
        return copy.deepcopy(start)
    except TypeError as error:
        raise ConfigError(
            f"{type(start[0]).__name__} cannot be copied ({error}), but every episode needs its own environment: define "
            "__deepcopy__(self, memo), which returns an environment in the same state; it may share read-only data"
        ) from error


def _copy_checkpoint(folder: Path, path: Path) -> None:
    """Copy a checkpoint's folder to ``path`` atomically."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    if path.exists() and not (path / "learner.json").is_file():
        raise ConfigError(
            f"{path} exists but is not a checkpoint; pass another path, or one that ends in .pt for a single file"
        )
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder, unfinished)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise StoreError(f"cannot write {path}: {error}; check free space and permissions") from error


def _finished(played: Mapping[str, Episode], trajectory: Trajectory) -> Episode:
    episode = played.get(trajectory.rollout_id) or Episode()
    episode["error"], episode.trajectory = trajectory.error, trajectory
    return episode


def _grouped(episodes: Sequence[Episode]) -> list[Group]:
    """Return the episodes' trajectories, grouped by their start."""
    groups: dict[int, list[Trajectory]] = {}
    for episode in episodes:
        trajectory = getattr(episode, "trajectory", None)
        if trajectory is None:
            raise ConfigError("update_policy accepts only episodes that collect_episodes returned")
        groups.setdefault(trajectory.task["start"], []).append(trajectory)
    if not groups:
        raise ConfigError("update_policy got no episodes")
    return [Group(task=members[0].task, trajectories=tuple(members)) for members in groups.values()]


def _reward(episodes: Mapping[str, Episode], discount: float | None, trajectory: Trajectory) -> float:
    """Return an episode's total reward; with ``discount``, also set the rewards of the calls behind each action."""
    episode = episodes[trajectory.rollout_id]
    if discount is not None:
        returns = _returns(episode["rewards"], discount)
        action_of = {request_id: action for action, ids in enumerate(episode.request_ids) for request_id in ids}
        for index, call in enumerate(trajectory.calls):
            if call.request_id not in action_of:
                raise ConfigError(
                    "discount= needs an agent that calls the model only with await self.generate_response(...)"
                )
            action = action_of[call.request_id]
            # An action that raised has no reward.
            trajectory.call_rewards[index] = returns[action] if action < len(returns) else 0.0
    return float(episode["total_reward"])


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return for each reward the discounted sum of the rewards from it on."""
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]
