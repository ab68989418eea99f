"""``ARTWandbLogger``: logs epochs, episodes and checkpoints of your own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_wandb.opening import PROJECT, open_run
from art_wandb.tables import text

if TYPE_CHECKING:
    import wandb

METRICS = (
    "policy_loss", "value_loss", "kl_divergence", "entropy", "learning_rate", "average_reward", "success_rate",
    "average_episode_length",
)  # fmt: skip
"""Logged every epoch; missing ones as 0."""
AS_TRAINED = {"kl_divergence": "kl_ref", "average_reward": "avg_reward", "success_rate": "success"}
"""Names of some of them in the metrics of ``GRPOTrainer.update_policy``."""
EPISODES = ["episode_id", "total_reward", "steps", "success", "accuracy", "efficiency"]
ACTIONS = ["episode_id", "step", "action_type", "reward", "state_description"]
DESCRIPTION = 100
"""Most characters of a state's description."""


class ARTWandbLogger:
    """One W&B run, from ``initialize_run`` to ``finish_run``; before and after, logging has no effect."""

    def __init__(self, project_name: str = PROJECT, experiment_name: str | None = None) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name or f"art_experiment_{datetime.now():%Y%m%d_%H%M%S}"
        self.run: wandb.Run | None = None
        """The W&B run; it stays set after it is finished."""
        self._finished = False

    def initialize_run(self, config: Mapping[str, Any]) -> None:
        """Start the run; ``model_name`` becomes a tag, and ``agent_type`` is part of the notes."""
        import wandb

        self.finish_run()
        self.run = open_run(
            project=self.project_name,
            name=self.experiment_name,
            config=dict(config),
            tags=["ART", "GRPO", str(config.get("model_name", "unknown"))],
            notes=f"ART training with {config.get('agent_type', 'unknown')} agent",
        )
        self._finished = False
        # Values from agents may have different types within a column.
        self.episode_table = wandb.Table(columns=EPISODES, allow_mixed_types=True)
        self.action_table = wandb.Table(columns=ACTIONS, allow_mixed_types=True)

    def log_training_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Log an epoch: all of ``METRICS``, missing ones as 0, and any other metrics passed."""
        if self.run and not self._finished:
            known = {name: metrics.get(AS_TRAINED.get(name, name), 0) for name in METRICS}
            self.run.log({"epoch": epoch, **known, **metrics})

    def log_episode(self, episode_data: Mapping[str, Any]) -> None:
        """Add an episode and its actions to the tables, which ``finish_run`` sends."""
        if not self.run or self._finished:
            return
        episode_id = episode_data.get("episode_id", "unknown")
        actions, rewards, states = (episode_data.get(name) or () for name in ("actions", "rewards", "states"))
        steps = _count(episode_data.get("steps", actions))
        self.episode_table.add_data(
            episode_id,
            episode_data.get("total_reward", 0),
            steps,
            episode_data.get("success", False),
            episode_data.get("accuracy_score", 0),
            efficiency(steps, episode_data.get("max_steps")),
        )
        for index, action in enumerate(actions):
            reward = rewards[index] if index < len(rewards) else 0
            state = text(states[index]) if index < len(states) else ""
            self.action_table.add_data(
                episode_id,
                index,
                action.get("type", "unknown"),
                action.get("reward", reward),
                str(action.get("state_description") or state)[:DESCRIPTION],
            )

    def log_model_artifacts(self, model_path: str | Path, epoch: int) -> None:
        """Log a checkpoint file or folder as the artifact ``model_epoch_N``; ConfigError if it does not exist."""
        if not self.run or self._finished:
            return
        import wandb

        path = Path(model_path)
        if not path.exists():
            raise ConfigError(f"no checkpoint of epoch {epoch} at {path}; pass the file or folder that was saved")
        artifact = wandb.Artifact(
            name=f"model_epoch_{epoch}", type="model", description=f"ART model checkpoint at epoch {epoch}"
        )
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self.run.log_artifact(artifact)

    def finish_run(self) -> None:
        """Log both tables and finish the run, even if logging a table raises."""
        if not self.run or self._finished:
            return
        self._finished = True
        try:
            self.run.log({"episodes": self.episode_table})
            self.run.log({"actions": self.action_table})
        finally:
            self.run.finish()


def efficiency(steps: int, most: float | None) -> float:
    """Return the share of the allowed steps that was not used; 0 if no steps were taken or the limit is unknown."""
    return 1.0 - steps / most if steps > 0 and most else 0.0


def _count(steps: Any) -> int:
    return len(steps) if isinstance(steps, Sized) else int(steps or 0)
