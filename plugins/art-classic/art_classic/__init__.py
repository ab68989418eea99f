"""The classic API: an agent acts in an environment, and GRPO trains its model.

Subclass ``environment.Environment`` and ``agent.Agent``; ``trainer.GRPOTrainer`` trains.
"""
