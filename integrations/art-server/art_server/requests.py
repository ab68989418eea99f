"""Request bodies and answers of the routes that change a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from art_server.messages import NAME

MAX_TASKS = 100_000
"""Tasks per collection."""
MAX_ROLLOUTS = 100_000
"""Rollouts per collection."""
CallIndex = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""The index of a call, as a string because it is the key of a JSON object."""
RolloutId = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """Part of a request. Unknown fields are refused, because they would have no effect."""

    model_config = ConfigDict(extra="forbid")


class SamplingBody(Body):
    """Sampling settings imposed on the agent's calls; null leaves the agent's own."""

    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None
    frequency_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None


class Collect(Body):
    """Run the agent ``group_size`` times on every task, on workers of ``pool``."""

    kind: Literal["collect"]
    tasks: Annotated[list[Any], Field(min_length=1, max_length=MAX_TASKS)]
    inputs: list[Any] | None = None
    """The agent's input per task; null: the task, or its ``input``."""
    group_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Null: the run's setting."""
    split: Annotated[str, Field(pattern=NAME)] = "train"
    sampling: SamplingBody | None = None
    """Null: as for training rollouts."""
    step: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    pool: Annotated[str, Field(pattern=NAME)] = "default"
    allow_no_calls: bool = False


class Score(Body):
    """Score stored rollouts by a reward that is registered on the server, such as ``ruler``."""

    kind: Literal["score"]
    groups: Annotated[list[list[RolloutId]], Field(min_length=1, max_length=MAX_TASKS)]
    reward: Annotated[str, Field(min_length=1, max_length=100)]


class RolloutScore(Body):
    """The score of one rollout."""

    rollout_id: RolloutId
    reward: FiniteFloat | None
    metrics: dict[str, FiniteFloat] = {}
    notes: dict[str, str] = {}
    call_rewards: Annotated[dict[CallIndex, FiniteFloat], Field(json_schema_extra={"additionalProperties": False})] = {}

    def of_calls(self) -> dict[int, float]:
        """Return ``call_rewards`` with integer keys."""
        return {int(index): reward for index, reward in self.call_rewards.items()}


class Scores(Body):
    """Store scores that the client has computed, and return the groups' advantages."""

    kind: Literal["scores"]
    groups: Annotated[list[list[RolloutScore]], Field(min_length=1, max_length=MAX_TASKS)]
    by: Annotated[str, Field(min_length=1, max_length=200)]
    """The reward's name."""


class LearnGroup(Body):
    """Stored rollouts of one group to learn from, with their scores."""

    trajectories: Annotated[list[RolloutScore], Field(min_length=1)]
    advantages: list[FiniteFloat] = []
    call_advantages: list[list[FiniteFloat]] = []


class Learn(Body):
    """Make one optimizer step on these groups, and serve the new weights."""

    kind: Literal["learn"]
    groups: Annotated[list[LearnGroup], Field(max_length=MAX_TASKS)]


JobRequest = Annotated[Collect | Score | Scores | Learn, Field(discriminator="kind")]


class JobState(BaseModel):
    """The state of a job."""

    key: str
    kind: str
    state: Literal["running", "done", "failed"]
    finished: int = 0
    """Finished rollouts of a collection."""
    total: int = 0
    error: str | None = None
    """The error if it failed, starting with the exception's type."""
    result: dict[str, Any] | None = None
    """``groups`` (their number) and ``group_size`` for a collection, ``metrics`` and ``step`` for a step, ``groups`` with scores
    for a scoring."""


class Status(BaseModel):
    """The server's counts."""

    active_clients: int
    """Connected workers."""
    episodes_queued: int
    """Episodes that wait for a worker."""
    results_available: int
    """Results that haven't been fetched yet."""
    step: int
    """Steps made, including those that trained nothing."""
    run: str
    """Name of the run folder."""


class Worker(BaseModel):
    """A worker, connected or expected to reconnect."""

    id: str
    state: str
    pool: str
    capacity: int
    running: int
    finished: int
    lost: int
    version: int | None
    last_seen: float
