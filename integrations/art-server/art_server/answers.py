"""The responses that compare evaluations and say what to make of a run, also used for OpenAPI."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from art_server.responses import Json


class Change(BaseModel):
    """Held-out results before training and since, on the same tasks, at one temperature."""

    temperature: Json = Field(description="The imposed temperature; null: the agent's own.")
    verdict: Literal["better", "worse", "can't tell"]
    value: float = Field(description="The mean difference: of success rates if `counts_successes`, else of rewards.")
    low: float | None = Field(description="Of the 95 % interval of the difference; null if there is none.")
    high: float | None
    counts_successes: bool
    before: float
    after: float
    tasks: int
    unscored: int = Field(description="Further tasks of both, left out because a rollout couldn't be scored.")
    lost: int = Field(description="Tasks with a lower result than before.")
    won: int = Field(description="Tasks with a higher result than before.")
    p: float | None = Field(description="McNemar's exact p-value; null if a result is neither 0 nor 1.")


class Reason(BaseModel):
    """What failed rollouts have in common."""

    reason: str
    rollouts: int
    example: str = Field(description="The id of one of them.")


class ChangedTask(BaseModel):
    """A held-out task with different results in two evaluations: before and after training, or of two runs."""

    task_id: str
    task: Json
    before: str = Field(description="The id of its rollout in the first one.")
    after: str
    change: float = Field(description="Of its success, or of its reward if successes aren't counted.")


class Measured(BaseModel):
    """A measure of `art compare`, per task, of two runs."""

    name: str = Field(description="Such as `sampled_tokens`, `seconds_p95`, or `cost`, in US dollars.")
    first: float | None = Field(description="Null if it is unknown.")
    second: float | None
    difference: float | None = Field(description="The second's minus the first's; null if one is unknown.")
    low: float | None = Field(
        description="Of the 95 % interval of the difference: a paired bootstrap over the tasks, Tango's for rates."
    )
    high: float | None


class RunsComparison(BaseModel):
    """The newest evaluations of two runs on the tasks that both have: the second compared with the first."""

    changes: list[Change] = Field(description="By temperature; empty if they share no task at the same temperature.")
    evaluations: list[str] = Field(description="Names and steps of the two evaluations, at the first temperature.")
    rewards: list[str] = Field(description="The names of their rewards, if they differ.")
    changed: int = Field(description="Tasks with another result, at the first temperature.")
    tasks: list[ChangedTask] = Field(description="The first 200 of them, the greatest losses first.")


class FailingTask(BaseModel):
    """A held-out task that fails."""

    task_id: str
    task: Json
    before: str | None = Field(description="The id of its rollout before training.")
    after: str
    value: float | None = Field(description="Its success, or its reward if successes aren't counted; null: not scored.")
    lost: bool = Field(description="Whether it was better before training.")


class Failing(BaseModel):
    """What fails in the newest evaluation."""

    failed: int = Field(
        description="Rollouts without success; if successes aren't counted, those that ended with an error."
    )
    measured: int
    counts_successes: bool
    reasons: list[Reason]
    tasks: list[FailingTask] = Field(description="Tasks that were solved before first, then the lowest results.")


class Cost(BaseModel):
    """What training took, without evaluations."""

    seconds: float
    rollouts: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    judge: dict[str, float] = Field(description="Totals of the judge, with `cost` in US dollars if it is known.")


class Health(BaseModel):
    """Whether the numbers can be trusted."""

    problems: list[str]
    agreement: str = Field(description="How much engine and learner differ; empty if it wasn't measured.")


class Advice(BaseModel):
    """Something to do next."""

    text: str
    command: str | None


class Decision(BaseModel):
    """What to make of a run."""

    changes: list[Change] = Field(description="By temperature; empty if no task was evaluated twice.")
    signs: list[str] = Field(description="Signs of reward hacking.")
    failing: Failing | None = Field(description="Null if nothing was evaluated.")
    cost: Cost
    health: Health
    next: list[Advice]
