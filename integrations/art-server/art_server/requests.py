"""What another machine asks of the run: bodies and answers of the routes that change it. Knows nothing about how it is done."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from art_server.messages import NAME

MOST_TASKS = 100_000
"""Of one collection."""
MOST_RUNS = 100_000
"""Of the agent, in one collection."""
CallIndex = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""As JSON has the keys of objects."""
RolloutId = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """Part of a request: what it does not know is refused, because it would have no effect."""

    model_config = ConfigDict(extra="forbid")


class SamplingBody(Body):
    """What a rollout imposes on the agent's calls; null leaves the agent's own."""

    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class Collect(Body):
    """Run the agent ``group_size`` times on every task, on workers of ``pool``."""

    kind: Literal["collect"]
    tasks: Annotated[list[Any], Field(min_length=1, max_length=MOST_TASKS)]
    inputs: list[Any] | None = None
    """What the agent is given, per task; null: the task, or its ``input``."""
    group_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Null: the run's own."""
    split: Annotated[str, Field(pattern=NAME)] = "train"
    sampling: SamplingBody | None = None
    """Null: the training rollouts' own."""
    step: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    pool: Annotated[str, Field(pattern=NAME)] = "default"
    allow_no_calls: bool = False


class Score(Body):
    """Score stored runs by a reward that is registered on the server, such as ``ruler``."""

    kind: Literal["score"]
    groups: Annotated[list[list[RolloutId]], Field(min_length=1, max_length=MOST_TASKS)]
    reward: Annotated[str, Field(min_length=1, max_length=100)]


class GivenScore(Body):
    """What a reward gave one run."""

    rollout_id: RolloutId
    reward: FiniteFloat | None
    metrics: dict[str, FiniteFloat] = {}
    notes: dict[str, str] = {}
    call_rewards: Annotated[dict[CallIndex, FiniteFloat], Field(json_schema_extra={"additionalProperties": False})] = {}

    def of_calls(self) -> dict[int, float]:
        """Return ``call_rewards`` by number."""
        return {int(index): reward for index, reward in self.call_rewards.items()}


class Scores(Body):
    """Keep scores that were given elsewhere, and return the groups' advantages."""

    kind: Literal["scores"]
    groups: Annotated[list[list[GivenScore]], Field(min_length=1, max_length=MOST_TASKS)]
    by: Annotated[str, Field(min_length=1, max_length=200)]
    """The reward's name."""


class LearnGroup(Body):
    """Stored runs to learn from, as they were scored."""

    trajectories: Annotated[list[GivenScore], Field(min_length=1)]
    advantages: list[FiniteFloat] = []
    call_advantages: list[list[FiniteFloat]] = []


class Learn(Body):
    """Take one optimizer step on these groups, and serve the new weights."""

    kind: Literal["learn"]
    groups: Annotated[list[LearnGroup], Field(max_length=MOST_TASKS)]


JobRequest = Annotated[Collect | Score | Scores | Learn, Field(discriminator="kind")]


class JobState(BaseModel):
    """How far a job is."""

    key: str
    kind: str
    state: Literal["running", "done", "failed"]
    finished: int = 0
    """Runs of the agent that ended, of a collection."""
    total: int = 0
    error: str | None = None
    """Why it failed, with the exception's type."""
    result: dict[str, Any] | None = None
    """``groups`` (how many) of a collection, ``metrics`` and ``step`` of a step, ``groups`` with scores of a scoring."""


class Status(BaseModel):
    """The server in numbers."""

    active_clients: int
    """Connected workers."""
    episodes_queued: int
    """Episodes that wait for a worker."""
    results_available: int
    """Results that nobody has fetched yet."""
    step: int
    """Optimizer steps done, those that taught nothing included."""
    run: str
    """Name of the run folder."""


class Worker(BaseModel):
    """A worker, connected or expected back."""

    id: str
    state: str
    pool: str
    capacity: int
    running: int
    finished: int
    lost: int
    version: int | None
    last_seen: float
