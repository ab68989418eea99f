"""Run an agent on held-out tasks: ``evaluate``, and the evaluations of a training run."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.config import LIVE, check_tasks, make_config
from art_core.errors import ArtError, ConfigError
from art_core.loop.advice import say_elsewhere
from art_core.loop.display import Display, display, plural
from art_core.loop.metrics import timed_separately
from art_core.loop.open_run import opened
from art_core.loop.report import Report
from art_core.loop.resume_checks import ExpectedExperiment, changed_at, experiment
from art_core.loop.rewards import reward_name, score_rest
from art_core.loop.rollout import task_id, task_input
from art_core.loop.run import Run
from art_core.loop.setup import Setup
from art_core.plugins import Plugins
from art_core.redaction import without_access
from art_core.runtime.threads import run_alone
from art_core.scoring import why_unscored
from art_core.serving.policy_engine import is_address
from art_core.store import recorded_settings
from art_core.store.run_folder import checkpoint_step, last_checkpoint, new_run_dir
from art_core.types import Engine, GroupReward, Reward, Sampling, Weights

EVALUATION = "evaluation"
"""The name of the result of ``evaluate``; those of a training run are ``before``, ``step N`` and ``after``."""
SERVING = (
    "train_nodes", "other_nodes", "frozen_model", "tool_parser", "tool_format", "reasoning_parser", "engine_args", "lora_rank",
    "max_context", "max_tokens",
)  # fmt: skip
"""Settings that the evaluation of a run's model takes from the run."""


@dataclass
class Evaluator:
    """Runs the held-out tasks with the current weights and stores the results."""

    run: Run
    agent: object
    tasks: Sequence[Any] | None
    reward: Any
    temperatures: tuple[float | None, ...]
    screen: Display
    convert: Mapping[str, Any]
    """The arguments ``to_input`` and ``to_output``."""
    notify: Callable[..., None] = lambda *_: None
    """``Trackers.notify``: accepts the name of a tracker's method and its arguments."""

    async def run_or_reuse(self, name: str) -> Report | None:
        """Evaluate at every temperature, unless an interrupted run stored the report, and return the first report.

        A stored report with unscored rollouts is measured again if the weights are still the same. Returns None without
        tasks, or if no report is stored and none can be measured: the reward's budget is spent, or ``"before"`` is wanted
        of weights that were trained since.
        """
        if self.tasks is None:
            return None
        reports = [await self._stored_or_measured(name, temperature) for temperature in self.temperatures]
        return reports[0]

    async def _stored_or_measured(self, name: str, temperature: float | None) -> Report | None:
        now = self.run.step
        step = 0 if name == "before" else now
        stored = self._stored(name, temperature, step)
        if stored and (step != now or not stored.unscored):
            return stored
        reason = f"the weights are those of step {now}" if step != now else self.run.rewards.exhausted(self.reward)
        if reason:
            self.screen.say(f"evaluation {name!r} is skipped: {reason}")
            return stored
        return await self.measure(name, temperature)

    def _stored(self, name: str, temperature: float | None, step: int) -> Report | None:
        """Return the stored report of the same tasks, if any."""
        store, task_ids = self.run.store, [task_id(task) for task in self.tasks or ()]
        for row in store.meta("evaluations", []):
            if (row["name"], row["temperature"], row["step"]) == (name, temperature, step):
                trajectories = tuple(map(store.trajectory, row["rollout_ids"]))
                if [task_id(trajectory.task) for trajectory in trajectories] == task_ids:
                    return Report(trajectories, temperature, self.run.run_dir)
        return None

    async def measure(
        self, name: str, temperature: float | None, *, key: str | None = None, rescore: bool = False
    ) -> Report:
        """Run and score the tasks and store the result as ``name``, replacing an earlier one: in its place if of the same step.

        Rollouts are collected under ``key``. ``rescore`` ignores stored scores, because another reward gave them.
        """
        run, tasks, step = self.run, self.tasks or (), self.run.step
        at = "the agent's own temperature" if temperature is None else f"temperature {temperature:g}"
        self.screen.phase(f"evaluating{'' if name == EVALUATION else f', {name}'}: {at}", len(tasks))
        rescore = rescore or changed_at(run.store, step, "eval_reward")
        with timed_separately():
            groups = await run.collect(
                self.agent, tasks, group_size=1, split="eval",
                sampling=Sampling() if temperature is None else Sampling.plain(temperature),
                key=key or f"{name} at {temperature}, step {step}",
                scored_by=None if rescore else reward_name(run.reward(self.reward)), **self.convert,
            )  # fmt: skip
            say_elsewhere(name, groups, self.screen)
            groups = await score_rest(groups, lambda rest: run.score(rest, self.reward), run.config.advantage)
        report = Report(tuple(group.trajectories[0] for group in groups), temperature, run.run_dir)
        unscored = f", {plural(report.unscored, 'unscored rollout')}" if report.unscored else ""
        self.screen.say(f"{name}, {at}: {report} on {plural(len(groups), 'task')}{unscored}")
        for reason in why_unscored(groups):
            self.screen.say_once(f"rollouts could not be scored: {reason}")
        result = {"name": name, "step": step, **report.as_json()}
        rows = {(row["name"], row["temperature"], row["step"]): row for row in run.store.meta("evaluations", [])}
        rows[name, temperature, step] = {**result, "rollout_ids": [t.rollout_id for t in report.trajectories]}
        kept = [row for key, row in rows.items() if key[:2] != (name, temperature) or key[2] == step]
        run.store.set_meta("evaluations", kept)
        self.notify("log_groups", step, groups, "eval")
        self.notify("log_evaluation", step, result)
        return report


async def evaluate(
    agent: object,
    tasks: Sequence[Any],
    *,
    model: str | Path,
    reward: str | Reward | GroupReward,
    temperature: float | None = None,
    run_dir: str | Path | None = None,
    engine: str | Engine = "embedded",
    to_input: Callable[[Any], Any] = task_input,
    to_output: Callable[[Any], Any] | None = None,
    progress: bool | Display = True,
    plugins: Plugins | None = None,
    **settings: Any,
) -> Report:
    """Run ``agent`` once on every task and return the rewards.

    ``model`` is a name, a model folder, a run folder, whose newest checkpoint is then evaluated, or ``"live"``: the agent's own
    providers answer, and their calls are recorded as text. ``temperature=None`` keeps the agent's own sampling. A run's model is
    served as in the run: with its limits and formats and, if the run trained only some nodes, with the same model for the others;
    ``settings``, fields of ``TrainConfig``, override that. Everything is recorded in ``run_dir`` (default: a new folder under
    ``runs/``), which the report names. The same call with the ``run_dir`` of an interrupted evaluation reuses the answers and
    scores recorded there; after a finished one, it evaluates again.
    """
    check_tasks(tasks)
    if model == LIVE:
        if temperature is not None or engine not in ("embedded", LIVE):
            raise ConfigError("model='live' runs the agent as it is; drop temperature= and engine=")
        engine = LIVE
    served, weights = _served(model, settings, at_address=is_address(engine))
    if weights is None and run_dir and last_checkpoint(Path(run_dir).expanduser()):
        raise ConfigError(f"{run_dir} holds a trained run; pass it as model= to evaluate it, or another run_dir=")
    config = make_config(served, evaluate)
    screen = display(progress)
    setup = Setup(run_dir or new_run_dir(f"eval-{Path(model).name}"), config, engine=engine, plugins=plugins)
    setup.expected = ExpectedExperiment(names=())
    scored_by = setup.rewards.find(reward)  # refuses a misspelt name and what isn't a reward before anything runs
    convert = {"to_input": to_input, "to_output": to_output}
    identities = experiment(agent, tasks, scored_by, **convert, prompts=setup.plugins.prompts)
    identities |= {"temperature": temperature, "weights": str(weights)}
    with screen:
        if model != LIVE and weights is None and recorded_settings(model).get("model") == config.model:
            screen.say(f"{model} has no checkpoint yet: evaluating its start weights")
        screen.phase("starting the gateway" if model == LIVE else "starting the engine", None)
        async with opened(setup) as run:
            run.on_rollout = screen.advance
            run.store.set_meta("reward", reward_name(scored_by))
            if weights is not None:
                await run.serving.swap(weights)
            key, rescore = _begin_or_continue(run, identities, screen)
            evaluator = Evaluator(run, agent, tasks, reward, (temperature,), screen, convert)
            try:
                report = await evaluator.measure(EVALUATION, temperature, key=key, rescore=rescore)
            except (asyncio.CancelledError, ArtError):
                screen.say(
                    f"stopped; to continue, repeat the call with run_dir={str(run.run_dir)!r}, which has the answers so far"
                )
                raise
            run.store.set_meta("evaluating", None)
            screen.say(f"recorded in {run.run_dir}")
            return report


def evaluate_sync(*args: Any, **kwargs: Any) -> Report:
    """``evaluate`` for scripts, in which no event loop runs; the arguments are the same."""
    return run_alone(evaluate, *args, **kwargs)


def _begin_or_continue(run: Run, identities: Mapping[str, Any], screen: Display) -> tuple[str, bool]:
    """Return the key to collect under, and whether to score again.

    An interrupted evaluation with the same identities and settings passes on its key.
    """
    served = without_access({name: getattr(run.config, name) for name in SERVING})
    call = json.loads(json.dumps({**served, **identities}, default=str))
    reward, evaluation = call.pop("reward"), run.store.meta("evaluating") or {}
    if evaluation.get("call") == call:
        screen.say(f"{run.run_dir}: continuing with the answers recorded before")
    else:
        evaluation = {"key": uuid.uuid4().hex, "call": call, "reward": reward}
    rescore = evaluation["reward"] != reward
    # Scores of both may be stored from now on, so no later call uses them.
    run.store.set_meta("evaluating", {**evaluation, "reward": "several"} if rescore else evaluation)
    return evaluation["key"], rescore


def _served(
    model: str | Path, settings: Mapping[str, Any], *, at_address: bool
) -> tuple[dict[str, Any], Weights | None]:
    """Return the settings that serve a name, model folder or run folder, and the weights to load, if any.

    A server ``at_address`` has already started with other weights, so even a whole checkpoint must be loaded into it.
    """
    begun = {} if model == LIVE else recorded_settings(model)
    if begun.get("model") == LIVE:
        raise ConfigError(
            f"{model} records how the agent did with its own provider, so it has no model; pass model='live'"
        )
    if not begun:
        return {**settings, "model": str(model)}, None
    served = {name: value for name, value in begun["config"].items() if name in SERVING and value not in (None, [], {})}
    served |= {"model": begun["model"], **settings}
    weights = None
    if newest := last_checkpoint(Path(model).expanduser()):
        weights = Weights(checkpoint_step(newest), newest / "adapter")
        if (newest / "config.json").is_file():  # all weights, not an adapter
            served["model"], weights = str(newest), Weights(weights.version, newest) if at_address else None
    frozen = served.get("train_nodes") and served.get("other_nodes", "frozen") == "frozen"
    if frozen and not served.get("frozen_model") and served["model"] != begun["model"]:
        served["frozen_model"] = begun["model"]  # the start weights answered the other nodes in the run
    return served, weights
