"""The classic W&B program: an epoch's metrics to a run of one's own."""

import os

from art_wandb import ARTWandbLogger

# Usage example
logger = ARTWandbLogger("email-agent-training", "qwen2.5_email_search_v1")
# Initialize run with config
config = {
    "model_name": "Qwen/Qwen2.5-7B-Instruct",
    "agent_type": "email_search",
    "learning_rate": 1e-5,
    "batch_size": 8,
    "max_episodes": 1000,
    "max_steps_per_episode": 10,
}
logger.initialize_run(config)
# Log metrics during training
for epoch in range(int(os.environ.get("ART_EPOCHS", "100"))):
    # ... training logic ...
    metrics = {"policy_loss": 0.123, "kl_divergence": 0.045, "average_reward": 0.67, "success_rate": 0.82}
    logger.log_training_metrics(epoch, metrics)
logger.finish_run()
