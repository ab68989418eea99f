"""What a run is made of before its folder is opened: settings, and parts that are found by name and checked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from art_core import losses
from art_core.config import LIVE, TrainConfig, model_folder, with_model_defaults
from art_core.errors import ConfigError
from art_core.loop import resume_checks
from art_core.loop.rewards import Rewards
from art_core.plugins import Plugins
from art_core.serving.policy_engine import PolicyEngine
from art_core.store.run_folder import new_run_dir
from art_core.types import Engine, ExecutorBase, Learner, Loss, RunAgent, with_defaults


class Setup:
    """The parts of one run. Raises ConfigError if one is unknown or can't work here, before anything starts."""

    def __init__(
        self,
        run_dir: str | Path | None,
        config: TrainConfig,
        *,
        engine: str | Engine = "embedded",
        learner: str | Learner = "auto",
        loss: str | Loss = "grpo",
        executor: str | object | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        if not isinstance(plugins, Plugins | None):
            raise ConfigError(
                f"plugins= takes Plugins(module, ...) of art_core.plugin_api, got {type(plugins).__name__}"
            )
        if config.model == LIVE and engine != LIVE:
            raise ConfigError(
                "model='live' is for evaluate only: a provider's model can't be trained; pass one that can"
            )
        self.plugins = plugins or Plugins()
        self.model_folder = model_folder(config.model)
        """Where the start weights are."""
        given = config
        if not isinstance(learner, str) and config.decay_steps is None:
            # As the object, which was made without the run's defaults.
            config = dataclasses.replace(config, decay_steps=0)
        self.config = config = with_model_defaults(config, self.model_folder)
        self.engine = PolicyEngine(engine, functools.partial(self.plugins.offer, "register_engines"))
        self.loss_name = resume_checks.loss_name_of(loss)
        self.loss: Loss = self.plugins.choose("register_losses", loss) if isinstance(loss, str) else loss
        _check_teacher(config, loss, losses.needs_teacher(self.loss))
        if isinstance(executor, str):
            executor = self.plugins.choose("register_executors", executor)(config)
        self.executor = executor
        """Runs the agents; None: this process does."""
        self.engine.check()
        self.learner = learner
        if isinstance(learner, str):
            self.plugins.offer("register_learners", learner).check()
        else:
            resume_checks.check_learner(learner, given, self.loss, self.loss_name)
        self.run_dir = Path(run_dir).expanduser() if run_dir else new_run_dir(config.model)
        self.rewards = Rewards(self.plugins, self.run_dir)
        self.expected = resume_checks.ExpectedExperiment()
        """What the run is opened for; compared with what its folder was started with."""
        self._adapted: tuple[object, RunAgent] | None = None

    def adapt(self, agent: object) -> RunAgent:
        """Return the function that runs ``agent`` once; plugins are consulted at the first call."""
        if self._adapted is None or self._adapted[0] is not agent:
            self._adapted = agent, (self.executor or self.plugins).adapt(agent)  # type: ignore[attr-defined]
        return self._adapted[1]

    def gate(self, agent: object) -> AbstractAsyncContextManager[Any] | None:
        """Return what a rollout of ``agent`` waits for; None: the limit ``max_concurrent``."""
        return with_defaults(self.executor, ExecutorBase).gate(agent)

    def load_learner(self) -> Learner:
        """Return the learner, with the start weights if a factory makes it. Slow."""
        if not isinstance(self.learner, str):
            return self.learner
        factory: Callable[..., Learner] = self.plugins.choose("register_learners", self.learner)
        return factory(self.model_folder, self.config, self.loss)


def _check_teacher(config: TrainConfig, loss: str | Loss, needed: bool) -> None:
    """Refuse a teacher that is missing or that nothing learns from. Other people's losses may read its logprobs."""
    if config.teacher:
        model_folder(config.teacher)
        if loss in losses.__dict__ and not (needed or config.kl):
            raise ConfigError(f"nothing learns from teacher= with loss={loss!r} and kl=0; pass loss='distill' or kl=")
    elif needed:
        raise ConfigError("loss='distill' learns from a teacher; pass teacher=, a model with the same tokenizer")
