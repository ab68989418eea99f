"""The classic surface: an agent acts in an environment, and GRPO trains the model that it asks.

``environment.Environment`` and ``agent.Agent`` are to be subclassed; ``trainer.GRPOTrainer`` trains.
"""
