"""Train the agent you already have."""
