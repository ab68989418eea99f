"""Held-out tasks -> success with its standard error, and the ``report.json`` of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.config import check_tasks, make_config
from art_core.errors import ArtError, ConfigError
from art_core.loop.display import Display, display, plural
from art_core.loop.identity import experiment
from art_core.loop.metrics import Z, apart, wilson_interval
from art_core.loop.resume_checks import Terms, changed_at
from art_core.loop.rewards import name_of, score_rest
from art_core.loop.rollout import task_id, task_input
from art_core.loop.run import Run
from art_core.loop.stopping import say_elsewhere
from art_core.plugins import Plugins
from art_core.redaction import without_access
from art_core.runtime.threads import run_alone
from art_core.scoring import why_unscored
from art_core.serving.policy_engine import is_address
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, last_checkpoint, new_run_dir, store_file, write_whole
from art_core.types import Engine, GroupReward, Reward, Sampling, Trajectory, Weights

EVALUATION = "evaluation"
"""The name of what ``evaluate`` finds, beside a run's ``before``, ``after`` and ``step N``."""


@dataclass(frozen=True)
class Report:
    """What an evaluation found."""

    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """One per task, in order."""
    temperature: float | None
    """That was imposed; None: the agent's own."""
    run_dir: Path | None = None
    """Where the runs of the agent are recorded."""

    @property
    def mean_reward(self) -> float:
        """Over the scored runs; NaN where none was scored."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return sum(rewards) / len(rewards) if rewards else math.nan

    @property
    def counts_successes(self) -> bool:
        """Whether there is a success to speak of: a reward set ``metrics["success"]``, or all rewards are 0 or 1."""
        rewards = {t.reward for t in self.trajectories if t.reward is not None}
        return any("success" in t.metrics for t in self.trajectories) or rewards <= {0.0, 1.0}

    @property
    def successes(self) -> list[float]:
        """One number per run: ``metrics["success"]``, 0 where a run has none; the rewards where no run has any."""
        if any("success" in t.metrics for t in self.trajectories):
            return [t.metrics.get("success", 0.0) for t in self.trajectories]
        return [t.reward if t.reward is not None else 0.0 for t in self.trajectories]

    @property
    def success(self) -> float:
        """The mean of ``successes``: a share of the runs where ``counts_successes``, else a mean reward."""
        values = self.successes
        return sum(values) / len(values)

    @property
    def stderr(self) -> float:
        """Standard error of ``success`` over the tasks; 0 for a single one."""
        values, mean = self.successes, self.success
        if len(values) < 2:
            return 0.0
        variance = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
        return math.sqrt(variance / len(values))

    @property
    def unscored(self) -> int:
        """Runs without a reward."""
        return sum(t.reward is None for t in self.trajectories)

    def __str__(self) -> str:
        low, high = self.interval
        if self.counts_successes:
            graded = any(t.reward not in (None, 0, 1) for t in self.trajectories)
            reward = f", mean reward {self.mean_reward:.3g}" if graded else ""
            return f"success {self.success:.1%} (95 %: {low:.1%} to {high:.1%}){reward}"
        return f"mean reward {self.success:.3g} (95 %: {low:.3g} to {high:.3g})"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of ``success``: Wilson's where every run is 0 or 1, else the normal one."""
        values = self.successes
        return interval(self.success, self.stderr, len(values), binary=set(values) <= {0.0, 1.0})

    def as_json(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "counts_successes": self.counts_successes,
            "n": len(self.trajectories),
            "stderr": self.stderr,
            "interval": self.interval,
            "mean_reward": None if math.isnan(self.mean_reward) else self.mean_reward,
            "temperature": self.temperature,
            "unscored": self.unscored,
        }


def interval(mean: float, stderr: float, n: int, *, binary: bool) -> tuple[float, float]:
    """Return a 95 % confidence interval: Wilson's where the values are 0 or 1, else the normal one."""
    return wilson_interval(mean, n) if binary else (mean - Z * stderr, mean + Z * stderr)


@dataclass
class Evaluator:
    """Runs the held-out tasks with the weights of the moment and keeps what it found in the run's store."""

    run: Run
    agent: object
    tasks: Sequence[Any] | None
    reward: Any
    temperatures: tuple[float | None, ...]
    screen: Display
    shape: Mapping[str, Any]
    tell: Callable[..., None] = lambda *_: None
    """Told what trackers are told of evaluations: the name of their method and its arguments."""
    key: str | None = None
    """What ``EVALUATION`` is collected under; the others have keys of their own."""
    rescore: bool = False
    """Whether what was scored before does not count, because it was by another reward."""

    async def once(self, name: str) -> Report | None:
        """Evaluate at every temperature and return the first's report; what an interrupted run has found is kept.

        Measured again is what was kept with unscored runs, where the weights are still the same. None without tasks, where
        the reward can score nothing more, and for ``"before"`` where the weights have been trained already; unless it was kept.
        """
        if self.tasks is None:
            return None
        reports = [await self._kept_or_measured(name, temperature) for temperature in self.temperatures]
        return reports[0]

    async def _kept_or_measured(self, name: str, temperature: float | None) -> Report | None:
        step = 0 if name == "before" else self.run.step
        kept = self._kept(name, temperature, step)
        if kept is not None and (not kept.unscored or step != self.run.step):
            return kept
        if step != self.run.step:
            self.screen.say(f"{name}: cannot be measured any more, the weights are those of step {self.run.step}")
            return None
        if reason := self.run.rewards.exhausted(self.reward):
            self.screen.say(f"{name}: cannot be measured: {reason}")
            return kept
        return await self.measure(name, temperature)

    def _kept(self, name: str, temperature: float | None, step: int) -> Report | None:
        """Return what was found on the same tasks before."""
        store, asked = self.run.store, [task_id(task) for task in self.tasks or ()]
        for it in store.meta("evaluations", []):
            if (it["name"], it["temperature"], it["step"]) == (name, temperature, step):
                found = tuple(store.trajectory(rollout_id) for rollout_id in it["rollout_ids"])
                kept = Report(found, temperature, self.run.run_dir)
                if [task_id(t.task) for t in kept.trajectories] == asked:
                    return kept
        return None

    async def measure(self, name: str, temperature: float | None) -> Report:
        """Run the tasks, score the runs and keep the result as ``name``, in place of an earlier one."""
        at = "the agent's own temperature" if temperature is None else f"temperature {temperature:g}"
        assert self.tasks is not None
        when = "" if name == EVALUATION else f", {name}"
        self.screen.phase(f"evaluating{when}: {at}", len(self.tasks))
        sampling = Sampling() if temperature is None else Sampling(temperature, top_p=1.0, top_k=0)
        step = self.run.step
        key = self.key if name == EVALUATION else f"{name} at {temperature}, step {step}"
        other = self.rescore or changed_at(self.run.store, step, "eval_reward")
        by = None if other else name_of(self.run.reward(self.reward))
        with apart():
            groups = await self.run.collect(
                self.agent,
                self.tasks,
                group_size=1,
                split="eval",
                sampling=sampling,
                key=key,
                scored_by=by,
                **self.shape,
            )
            say_elsewhere(name, groups, self.screen)
            groups = await score_rest(groups, lambda rest: self.run.score(rest, self.reward), self.run.config.advantage)
        report = Report(tuple(g.trajectories[0] for g in groups), temperature, self.run.run_dir)
        unscored = f", unscored runs {report.unscored}" if report.unscored else ""
        self.screen.say(f"{name}, {at}: {report} on {plural(len(groups), 'task')}{unscored}")
        for reason in why_unscored(groups):
            self.screen.say_once(f"runs could not be scored: {reason}")
        kept = self.run.store.meta("evaluations", [])
        others = [it for it in kept if (it["name"], it["temperature"]) != (name, temperature)]
        ids = [t.rollout_id for t in report.trajectories]
        found = {"name": name, "step": self.run.step, **report.as_json(), "rollout_ids": ids}
        self.run.store.set_meta("evaluations", [*others, found])
        self.tell("log_groups", self.run.step, groups, "eval")
        self.tell(
            "log_evaluation", self.run.step, {name: value for name, value in found.items() if name != "rollout_ids"}
        )
        return report


OF_TRAINING = ("seconds", "seed", "model", "loss", "learner", "reward", "config")
"""Of a report: what no evaluation changes."""


def write_report(run: Run) -> dict[str, Any]:
    """Write ``report.json`` from what the store holds, and return it.

    If no step was taken since it was written, what it says of training stays; if nothing was measured either, all of it does.
    """
    shown = [
        {key: value for key, value in it.items() if key != "rollout_ids"} for it in run.store.meta("evaluations", [])
    ]

    def named(name: str) -> dict[str, Any] | None:
        return next((it for it in shown if it["name"] == name), None)

    history, stopped = run.history(), run.store.meta("stopped", {})
    report = {
        "before": named("before"),
        "after": named("after"),
        "evaluations": shown,
        "seconds": sum(metrics.get("seconds", 0.0) for _, metrics in history),
        "steps": run.step,
        "seed": run.config.seed,
        "model": run.config.model,
        "start_weights": run.store.meta("start_weights"),
        "loss": run.store.meta("loss"),
        "learner": run.store.meta("learner"),
        "reward": run.store.meta("reward"),
        "account": run.rewards.account(),
        "exhausted": run.rewards.exhausted(),
        "stopped": stopped if stopped.get("step") == run.step else None,
        "calls_elsewhere": run.store.meta("calls_elsewhere", {"refused": {}, "passed": {}}),
        "changes": run.store.meta("changes", []),
        "config": without_access(dataclasses.asdict(run.config)),
    }
    file = run.run_dir / "report.json"
    written = json.loads(file.read_text()) if file.is_file() else {}
    if written.get("steps") == run.step:
        report |= {name: written[name] for name in OF_TRAINING if name in written}
        if all(written.get(name) == json.loads(json.dumps(report[name])) for name in ("evaluations", "stopped")):
            return written
    write_whole(file, json.dumps(report, indent=2) + "\n")
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

    ``model`` is a name, a model folder, or the folder of a run, whose newest checkpoint is taken. ``temperature=None``
    keeps the agent's own sampling. A run's model is served as it was in the run, with its limits and formats, and where the
    run trained some nodes only, the others are answered as they were then, unless ``settings`` say otherwise. What was
    recorded is kept in ``run_dir`` (default: a new one under ``runs/``), which the report names. With the ``run_dir`` of an
    interrupted evaluation, the same call uses what was answered and scored there; what is finished is measured anew.
    """
    check_tasks(tasks)
    begun = begun_with(model)
    base, weights = _served(model, begun, at_address=is_address(engine))
    config = make_config({**_settings_of_run(begun, base, settings), **settings}, evaluate, model=base)
    screen = display(progress)
    run = Run(run_dir or new_run_dir(f"eval-{Path(model).name}"), config, engine=engine, plugins=plugins)
    run.terms = Terms(names=(), until=0)
    name = name_of(run.reward(reward))  # what is misspelt, missing or no reward is refused before anything runs
    with screen:
        if begun and base == begun.get("model") and weights is None:
            screen.say(f"{model} has no checkpoint, so nothing was trained there yet: its start weights are measured")
        screen.phase("starting the engine", None)
        async with run:
            run.on_rollout = screen.advance
            run.store.set_meta("reward", name)
            if weights is not None:
                await run.door.swap(weights)
            shape = {"to_input": to_input, "to_output": to_output}
            key, rescore = _begin_or_continue(
                run,
                experiment(agent, tasks, run.reward(reward), **shape)
                | {"temperature": temperature, "weights": str(weights)},
                screen,
            )
            evaluator = Evaluator(run, agent, tasks, reward, (temperature,), screen, shape, key=key, rescore=rescore)
            try:
                report = await evaluator.measure(EVALUATION, temperature)
            except (asyncio.CancelledError, ArtError):
                screen.say(
                    f"stopped: {run.run_dir} holds what was answered; the same call with it as run_dir continues"
                )
                raise
            run.store.set_meta("evaluating", None)
            screen.say(f"recorded in {run.run_dir}")
            return report


def _begin_or_continue(run: Run, held_to: Mapping[str, Any], screen: Display) -> tuple[str, bool]:
    """Return the key of the evaluation, that of an interrupted one if it was the same, and whether another reward scored that."""
    served = without_access({name: getattr(run.config, name) for name in CARRIED})
    held_to = json.loads(json.dumps({**served, **held_to}, default=str))
    reward = held_to.pop("reward")
    open_ = run.store.meta("evaluating") or {}
    if open_.get("held_to") == held_to:
        screen.say(f"{run.run_dir}: continuing; what was answered before is used")
    else:
        open_ = {"key": uuid.uuid4().hex, "held_to": held_to, "reward": reward}
    other = open_["reward"] != reward  # from then on always: scores of both may be there
    run.store.set_meta("evaluating", {**open_, "reward": "several"} if other else open_)
    return open_["key"], other


def evaluate_sync(*args: Any, **kwargs: Any) -> Report:
    """``evaluate`` for scripts: the same arguments, where no event loop runs."""
    return run_alone(evaluate, *args, **kwargs)


def begun_with(model: str | Path) -> dict[str, Any]:
    """Return the ``model`` and the ``config`` that a run folder was begun with; empty for a name or a model folder."""
    file = Path(model).expanduser() / "run.sqlite"
    if not file.is_file():
        return {}
    with Store(file) as store:
        return {"model": store.meta("model"), "config": store.meta("config", {})}


def command_of(run_dir: Path) -> dict[str, Any]:
    """Return what ``art train`` was ``given`` when it last started a run, and in which ``folder``; ConfigError if never."""
    with Store(store_file(run_dir)) as store:
        begun = store.meta("command")
    if not begun:
        raise ConfigError(
            f"{run_dir} was not started by `art train`, so its agent is not known; run what began it again, with "
            f"run_dir={str(run_dir)!r}, and it goes on"
        )
    if not Path(begun["folder"]).is_dir():
        raise ConfigError(
            f"{run_dir} was begun in {begun['folder']}, which is gone; give `art train` AGENT and TASKS, with --run-dir {run_dir}"
        )
    return begun


def _served(model: str | Path, begun: Mapping[str, Any], *, at_address: bool) -> tuple[str, Weights | None]:
    """Return (model to serve, weights to load into it or None) for a name, a model folder, or a run folder's newest checkpoint.

    A server ``at_address`` was started by somebody else, so what it serves must be loaded: whole weights too.
    """
    newest = last_checkpoint(Path(model).expanduser()) if begun else None
    if newest is None:
        return begun.get("model", str(model)), None
    version = checkpoint_step(newest)
    if (newest / "config.json").is_file():
        return str(newest), Weights(version, newest) if at_address else None
    return begun["model"], Weights(version, newest / "adapter")


CARRIED = (
    "train_nodes", "other_nodes", "frozen_model", "tool_parser", "reasoning_parser", "engine_args", "lora_rank",
    "max_context", "max_tokens",
)  # fmt: skip
"""Settings of a run with which it is evaluated too."""


def _settings_of_run(begun: Mapping[str, Any], base: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run says about its trained nodes and the model behind the others, and about how its model is served, for
    serving it from ``base``."""
    if not begun:
        return {}
    config = begun["config"]
    found = {name: config[name] for name in CARRIED if config.get(name) not in (None, [], {})}
    asked = found | settings
    frozen = asked.get("train_nodes") and asked.get("other_nodes", "frozen") == "frozen"
    if frozen and not asked.get("frozen_model") and base != begun["model"]:
        found["frozen_model"] = begun["model"]  # in the run, these were its start weights
    return found
