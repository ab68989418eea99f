"""The nouns that flow through art, and the parts that can be supplied from outside."""

from art_core.types.nouns import (
    GREEDY,
    Call,
    FinishReason,
    Group,
    JsonDict,
    LossInputs,
    LossOutputs,
    RolloutAddress,
    Sampling,
    TokenTree,
    Trajectory,
    Weights,
    within,
)  # fmt: skip
from art_core.types.parts import (
    Engine,
    EngineBase,
    ExecutorBase,
    GroupReward,
    Learner,
    LearnerBase,
    Loss,
    MeteredReward,
    Recorder,
    Reward,
    RunAgent,
    Tasks,
    TaskSuite,
    Upstream,
    with_defaults,
)  # fmt: skip

__all__ = [
    "GREEDY", "Call", "Engine", "EngineBase", "ExecutorBase", "FinishReason", "Group", "GroupReward", "JsonDict", "Learner",
    "LearnerBase", "Loss", "LossInputs", "LossOutputs", "MeteredReward", "Recorder", "Reward", "RolloutAddress", "RunAgent",
    "Sampling", "TaskSuite", "Tasks", "TokenTree", "Trajectory", "Upstream", "Weights", "with_defaults", "within",
]  # fmt: skip
