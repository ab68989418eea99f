"""The responses of the read-only routes, also used for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

Json = Annotated[Any, Field(description="Any JSON value; NaN and infinite numbers are null.")]
State = Literal["running", "finished", "failed", "lost"]
"""``lost``: an attempt whose machine was lost or that was stopped; it was repeated and doesn't count."""
RunStatus = Literal["running", "finished", "stopped", "crashed", "dry run"]
"""``stopped``: before its last step, for a recorded reason; ``crashed``: the run wasn't closed properly."""
Item = TypeVar("Item")


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class Page(BaseModel, Generic[Item]):
    """A page of a list."""

    total: int
    limit: int
    offset: int
    items: list[Item]


class EvaluationPair(BaseModel):
    """Evaluations on held-out tasks before training and since, at one temperature."""

    temperature: Json = Field(None, description="The imposed temperature; null: the agent's own.")
    before: Json = None
    after: Json = Field(None, description="The newest evaluation since training started.")


class EvaluationOf(BaseModel):
    """The evaluation that a rollout belongs to."""

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
    kind: Literal["training", "evaluation", "dry run", "recording"] = Field(
        "training",
        description="`evaluation`: the agent is only evaluated; `recording`: `art gateway` recorded its calls.",
    )
    planned_steps: int | None = Field(None, description="Null if the run's own program decides when it ends.")
    written: float | None = Field(None, description="Unix time of the last change of its files.")
    open: bool = Field(False, description="Whether a process has the run open.")
    status: RunStatus | None = Field(None, description="Null if the folder doesn't record how the run ended.")
    reason: str | None = Field(None, description="Why it stopped or crashed.")
    final_reward: float | None = Field(None, description="Mean training reward of the last 4 steps.")
    seconds: float | None = Field(None, description="Of all steps, once the run's report is written.")
    judge_cost: float | None = Field(None, description="In US dollars, once the run's report is written.")
    pairs: list[EvaluationPair] = Field([], description="Evaluations before and after, by temperature.")
    before: Json = Field(None, description="`before` of the first pair.")
    after: Json = Field(None, description="At the temperature of `before`, once training has ended.")
    measured: Json = Field(None, description="The result of an evaluation with its own folder.")
    problem: str | None = Field(None, description="Why the run can't be read.")


class Round(BaseModel):
    """A round of `art retrain`."""

    name: str = Field(description="Of its run.")
    state: str = Field(description="`training`, `accepted`, `rejected`, `stopped` or `rolled back`.")
    why: str = Field(description="The reason for the state; may be empty.")
    start: str = Field(description="The model or run whose weights it began with.")
    began: float | None = Field(description="Unix time.")
    new: int = Field(description="Training tasks from production.")
    older: int = Field(description="Training tasks that were trained on before.")
    held_out: int
    before: Json = Field(description="The result of the held-out tasks with the weights it began with.")
    after: Json
    difference: float | None = Field(description="Of success if `counts_successes`, else of the reward.")
    low: float | None = Field(description="Of its 95 % interval.")
    high: float | None
    counts_successes: bool
    rollouts: int = Field(description="Of the training.")
    seconds: float | None = Field(description="Of the training.")
    judge_cost: float | None = Field(description="In US dollars.")


class Runs(Page[RunSummary]):
    """A page of runs, and the rounds of `art retrain`."""

    rounds: list[Round] = Field(description="Newest first; empty for runs that `art retrain` didn't make.")


class Split(BaseModel):
    split: str | None
    rollouts: int
    last_step: int | None


class Progress(BaseModel):
    """The current step."""

    step: int
    begun: int
    finished: int
    expected: int | None


class Run(RunSummary):
    """A run with its settings, evaluations and progress."""

    config: dict[str, Json] = {}
    start_weights: str | None = None
    evaluations: list[Json] = []
    splits: list[Split] = []
    agents: list[str] = Field([], description="The names of the agents or nodes that call the model.")
    progress: Progress | None = None
    report: Json = None


class Step(BaseModel):
    """The metrics of an optimizer step."""

    step: int
    at: float = Field(description="Unix time.")
    metrics: dict[str, float | None]


class Steps(BaseModel):
    """A page of steps; for the next page, set ``after`` to the last step that you have."""

    last_step: int | None
    items: list[Step]


class GroupMember(BaseModel):
    """A rollout in a group."""

    rollout_id: str
    state: State
    reward: float | None
    success: float | None
    advantage: float | None
    seconds: float
    calls: int
    error: str | None


class RolloutGroup(BaseModel):
    """Rollouts of one task that are compared with each other."""

    group: str
    step: int | None
    split: str | None
    task_id: str | None
    task: Json
    started: float
    size: int = Field(description="Rollouts that count, without lost attempts.")
    lost: int
    running: int
    failed: int
    rewards: list[float]
    mean: float | None
    spread: float | None = Field(description="Sample standard deviation of the rewards.")
    members: list[GroupMember]


class TrajectorySummary(BaseModel):
    """A rollout without its messages."""

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
    evaluation: EvaluationOf | None = Field(None, description="Null if no finished evaluation has this rollout.")
    change: float | None = Field(
        None, description="Of its task's result since before training, in the order `changed`."
    )


class Score(BaseModel):
    """The result of one scoring."""

    reward: float | None
    metrics: dict[str, float | None]
    notes: dict[str, str]
    advantage: float | None
    by: str | None
    at: float
    aside: bool = Field(description="Whether it is a second opinion, which never counts as the reward.")


class CallView(BaseModel):
    """A model call; its messages are indexes into ``Trajectory.messages``."""

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
        description="The earlier call with the longest common prefix of tokens; null if there is none."
    )
    shared_tokens: int = Field(description="Length of the common prefix with the parent's prompt and answer.")
    continues: bool = Field(description="Whether it starts with all of the parent's tokens.")
    messages: list[int] = Field(description="The call's prompt, as indexes into `messages` of the trajectory.")
    answer: int
    tools: int | None = Field(description="Index into `tools` of the trajectory.")
    request: dict[str, Json] = Field(description="The request's other settings.")


class Trajectory(TrajectorySummary):
    """A rollout with all its messages, each one once."""

    output: Json
    notes: dict[str, str]
    scores: list[Score]
    messages: list[Json]
    tools: list[Json]
    call_list: list[CallView]
    omitted_calls: int = Field(0, description="Number of later calls that aren't shown.")


class Token(BaseModel):
    id: int
    text: str | None = Field(description="Null if no tokenizer was found.")
    logprob: float | None
    forced: bool


class Tokens(BaseModel):
    """The tokens of one call, as sampled."""

    index: int
    policy_version: int
    advantage: float | None
    tokenizer: bool = Field(description="Whether the texts are known.")
    prompt_total: int
    prompt: list[Token] = Field(description="The last tokens of the prompt, as many as requested.")
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
    sha256: str | None = Field(description="From the manifest; null for a file that isn't in it.")


class Checkpoint(BaseModel):
    name: str
    step: int
    version: int | None
    base_model: str | None
    size: int
    files: list[CheckpointFile]
