"""The shapes of what is read of a run over HTTP, for OpenAPI and whoever calls. Knows nothing about where it comes from."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

Json = Annotated[Any, Field(description="Any JSON value; numbers that JSON cannot say are null.")]
State = Literal["running", "finished", "failed", "lost"]
"""``lost``: an attempt whose machine was lost or that was stopped; it was made again and counts for nothing."""
RunStatus = Literal["running", "finished", "stopped", "crashed", "dry run"]
"""``stopped``: before its last step, for a reason that it recorded; ``crashed``: without having closed in order."""
Item = TypeVar("Item")


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class Page(BaseModel, Generic[Item]):
    """Some of many."""

    total: int
    limit: int
    offset: int
    items: list[Item]


class EvaluationPair(BaseModel):
    """What held-out tasks showed before training and since, at one temperature."""

    temperature: Json = Field(None, description="That was imposed; null: the agent's own.")
    before: Json = None
    after: Json = Field(None, description="The newest evaluation since.")


class EvaluationOf(BaseModel):
    """The evaluation by which a run of the agent was made."""

    name: str
    temperature: Json


class RunSummary(BaseModel):
    """A run folder at a glance."""

    name: str
    model: str | None = None
    loss: str | None = None
    reward: str | None = None
    learner: str | None = None
    steps: int = 0
    last_step: int | None = None
    kind: Literal["training", "evaluation"] = Field("training", description="`evaluation`: an agent is only measured.")
    planned_steps: int | None = Field(None, description="Null where the run's own program decides when it ends.")
    written: float | None = Field(None, description="Unix time at which its files changed last.")
    open: bool = Field(False, description="Whether some process works in the folder.")
    status: RunStatus | None = Field(None, description="Null if the folder does not say how it ended.")
    reason: str | None = Field(None, description="Why it stopped or crashed.")
    final_reward: float | None = Field(None, description="Mean training reward of the last 4 steps.")
    pairs: list[EvaluationPair] = Field([], description="Evaluations before and after, by temperature.")
    before: Json = Field(None, description="That of the first pair.")
    after: Json = Field(None, description="At the temperature of `before`, once training has ended.")
    measured: Json = Field(None, description="What an evaluation in a folder of its own found.")
    problem: str | None = Field(None, description="Why it cannot be read.")


class Split(BaseModel):
    split: str | None
    rollouts: int
    last_step: int | None


class Progress(BaseModel):
    """The step under way."""

    step: int
    begun: int
    finished: int
    expected: int | None


class Run(RunSummary):
    """A run with its settings."""

    config: dict[str, Json] = {}
    start_weights: str | None = None
    evaluations: list[Json] = []
    splits: list[Split] = []
    progress: Progress | None = None
    report: Json = None


class Step(BaseModel):
    """What an optimizer step measured."""

    step: int
    at: float = Field(description="Unix time.")
    metrics: dict[str, float | None]


class Steps(BaseModel):
    """Rows of steps; ask again with ``after`` set to the last step that you have."""

    last_step: int | None
    items: list[Step]


class GroupMember(BaseModel):
    """A run of the agent as its group shows it."""

    rollout_id: str
    state: State
    reward: float | None
    success: float | None
    advantage: float | None
    seconds: float
    calls: int
    error: str | None


class RolloutGroup(BaseModel):
    """Runs of one task that are compared with each other."""

    group: str
    step: int | None
    split: str | None
    task_id: str | None
    task: Json
    started: float
    size: int = Field(description="Runs that count: lost attempts do not.")
    lost: int
    running: int
    failed: int
    rewards: list[float]
    mean: float | None
    spread: float | None = Field(description="Standard deviation of the rewards, that of the sample.")
    members: list[GroupMember]


class TrajectorySummary(BaseModel):
    """A run of the agent without what was said in it."""

    rollout_id: str
    state: State
    step: int | None
    split: str | None
    group: str | None
    task_id: str | None
    task: Json
    started: float
    seconds: float
    reward: float | None
    advantage: float | None
    metrics: dict[str, float | None]
    calls: int
    sampled_tokens: int
    error: str | None
    evaluation: EvaluationOf | None = Field(None, description="Null for a run that no finished evaluation made.")


class Score(BaseModel):
    """What one scoring gave."""

    reward: float | None
    metrics: dict[str, float | None]
    notes: dict[str, str]
    advantage: float | None
    by: str | None
    at: float
    aside: bool = Field(description="A second opinion, which never counts as the reward.")


class CallView(BaseModel):
    """A model call; its conversation as places in ``Trajectory.messages``."""

    index: int
    agent: str | None
    thread: str | None
    policy_version: int
    request_id: str
    choice: int
    finish_reason: str
    temperature: float
    prompt_tokens: int
    sampled_tokens: int
    forced_tokens: int
    mean_logprob: float | None
    reward: float | None
    advantage: float | None
    parent: int | None = Field(
        description="The earlier call with which its tokens agree longest; null where with none."
    )
    shared_tokens: int = Field(description="With how many of the parent's tokens, prompt and answer, it begins.")
    continues: bool = Field(description="Whether it begins with all of the parent's tokens.")
    messages: list[int] = Field(description="What the call was shown, as places in `messages` of the trajectory.")
    answer: int
    tools: int | None = Field(description="Place in `tools` of the trajectory.")
    request: dict[str, Json] = Field(description="The request's other settings.")


class Trajectory(TrajectorySummary):
    """A run of the agent with all that was said in it, each message once."""

    output: Json
    notes: dict[str, str]
    scores: list[Score]
    messages: list[Json]
    tools: list[Json]
    call_list: list[CallView]
    omitted_calls: int = Field(0, description="Calls after the first ones, which are not shown.")


class Token(BaseModel):
    id: int
    text: str | None = Field(description="Null where no tokenizer was found.")
    logprob: float | None
    forced: bool


class Tokens(BaseModel):
    """The tokens of one call, as they were sampled."""

    index: int
    policy_version: int
    advantage: float | None
    tokenizer: bool = Field(description="Whether the texts are known.")
    prompt_total: int
    prompt: list[Token] = Field(description="The last tokens of the prompt, as many as were asked for.")
    total: int
    offset: int
    sampled: list[Token]


class TaskView(BaseModel):
    task_id: str
    task: Json
    rollouts: int
    first_step: int | None
    last_step: int | None


class CheckpointFile(BaseModel):
    name: str
    size: int
    sha256: str | None = Field(description="As the manifest says; null for a file that it does not name.")


class Checkpoint(BaseModel):
    name: str
    step: int
    version: int | None
    base_model: str | None
    size: int
    files: list[CheckpointFile]
