"""Jobs of a run: each is requested under a key that the client chooses, and done once, even across retries and restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from art_core import Run
from art_core.errors import ArtError, ConfigError, RewardError, ServingDied, StoreError
from art_core.plugin_api import describe_error, task_id, task_input
from art_core.types import Group, Trajectory
from art_server.executor import Assignment
from art_server.requests import (
    MAX_ROLLOUTS,
    Collect,
    JobRequest,
    JobState,
    Learn,
    LearnGroup,
    RolloutScore,
    Score,
    Scores,
)
from art_server.wire import sampling_from_wire, scores_to_wire

log = logging.getLogger("art_server")

UNFINISHED = "server/unfinished"
"""The store's meta key for the keys of jobs to resume."""
CANCELLED_BY_CLIENT = "CancelledError: cancelled by the client"
_REQUESTS: TypeAdapter[Any] = TypeAdapter(JobRequest)


class Conflict(ArtError):
    """The key was used for another request."""


@dataclass
class Job:
    """A request and its state."""

    request: Any
    state: JobState
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """The task that does the job; None for a finished job from the store."""
    cancelled_by_client: bool = False
    working: bool = True
    """False once only its end has to be stored."""


class Jobs:
    """The jobs of one run. ``on_step`` is called after every step."""

    def __init__(self, run: Run, on_step: Callable[[], None]) -> None:
        self._run, self._on_step = run, on_step
        self._jobs: dict[str, Job] = {}
        self._learning = asyncio.Lock()
        self._stopping = asyncio.Event()
        self.died: ServingDied | StoreError | None = None
        """The error after which no job can continue in this process."""

    def resume(self) -> list[str]:
        """Start the jobs that an earlier server hadn't finished; return their keys."""
        records = {key: self._run.store.meta(_name(key)) for key in self._run.store.meta(UNFINISHED, [])}
        unfinished = {key: record for key, record in records.items() if "state" not in record}
        for key, record in unfinished.items():
            self._start(key, _REQUESTS.validate_python(record["request"]), record)
        return list(unfinished)

    async def put(self, key: str, request: Any) -> JobState:
        """Start a job, or return the state of the job with this key. The job is on disk when this returns.

        Raises Conflict if the key was used for another request.
        """
        state = self._put(key, request)
        await asyncio.to_thread(self._run.store.flush)
        return state

    def _put(self, key: str, request: Any) -> JobState:
        known = self._jobs.get(key) or self._stored(key)
        if known is not None:
            if task_id(known.request) != task_id(request.model_dump(mode="json")):
                raise Conflict(f"key {key!r} was used for another request; use a new key for every request")
            if not self._must_repeat(known.state):
                return known.state
        record = {"request": request.model_dump(mode="json")}
        self._run.store.set_meta(_name(key), record)
        job = self._start(key, request, record)
        self._store_unfinished()
        return job.state

    def _must_repeat(self, state: JobState) -> bool:
        """Whether the job has no effect: it failed, or its step's weights were lost with a server that hadn't saved them.

        A failed step isn't repeated, because it may have been made.
        """
        if state.kind == "learn":
            return state.state == "done" and state.result["step"] > self._run.step
        return state.state == "failed"

    def get(self, key: str) -> JobState | None:
        """Return a job's state; None if it is unknown."""
        known = self._jobs.get(key) or self._stored(key)
        return None if known is None else known.state

    async def wait(self, key: str, seconds: float) -> JobState | None:
        """Return a job's state when it ends, after ``seconds``, or when the server is about to stop."""
        job = self._jobs.get(key)
        if job is not None:
            waiting = [asyncio.create_task(event.wait()) for event in (job.ended, self._stopping)]
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return self.get(key)

    async def cancel(self, key: str) -> JobState | None:
        """Cancel a collection that is still working. Return its state, or None if no collection has this key."""
        job = self._jobs.get(key)
        if job is None or job.state.kind != "collect" or job.task is None:
            return None
        if job.working:
            job.cancelled_by_client = True
            job.task.cancel()
        await job.ended.wait()
        return self.get(key)

    def stop_waiting(self) -> None:
        """Let all ``wait`` calls return, because the server is about to stop."""
        self._stopping.set()

    def group(self, key: str, index: int) -> Group | None:
        """Return the collected group of task number ``index``; None if there is none."""
        state = self.get(key)
        if state is None or state.kind != "collect" or state.state != "done":
            return None
        if not 0 <= index < (state.result or {})["groups"]:
            return None
        trajectories = self._run.collected(_name(key), index)
        return Group(trajectories[0].task, tuple(trajectories[: state.result["group_size"]]))

    @property
    def unfetched(self) -> int:
        """Finished rollouts of running collections."""
        return sum(job.state.finished for job in self._jobs.values() if job.state.state == "running")

    async def close(self) -> None:
        """Stop the running jobs; they resume when the run is opened again."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stored(self, key: str) -> Job | None:
        record = self._run.store.meta(_name(key))
        if record is None or "state" not in record:
            return None
        return Job(record["request"], JobState.model_validate(record["state"]))

    def _start(self, key: str, request: Any, record: dict[str, Any]) -> Job:
        state = JobState(key=key, kind=request.kind, state="running")
        job = self._jobs[key] = Job(record["request"], state)
        job.task = asyncio.create_task(self._do(job, request, record))
        return job

    async def _do(self, job: Job, request: Any, record: dict[str, Any]) -> None:
        state, started = job.state, time.monotonic()
        try:
            if isinstance(request, Collect):
                result = await self._collect(state, request)
            elif isinstance(request, Learn):
                result = await self._learn(request, record, _name(state.key))
            else:
                result = await self._score(request)
            ended = state.model_copy(update={"state": "done", "result": result})
        except asyncio.CancelledError:
            if not job.cancelled_by_client:
                raise  # the server is stopping; the next one resumes the job
            ended = state.model_copy(update={"state": "failed", "error": CANCELLED_BY_CLIENT})
        except ServingDied as error:  # the job resumes when the server is started again
            self.died = error
            return
        except Exception as error:  # one failed job must not end the server
            unexpected = None if isinstance(error, ArtError) else error
            log.error("%s %s failed: %s", state.kind, state.key, describe_error(error), exc_info=unexpected)
            ended = state.model_copy(update={"state": "failed", "error": describe_error(error)})
        job.working = False
        # The state is on disk before a client sees it, so that no restart repeats the job.
        self._run.store.set_meta(_name(state.key), {**record, "state": ended.model_dump(mode="json")})
        try:
            await asyncio.to_thread(self._run.store.flush)
        except StoreError as error:  # clients must not see a state that isn't on disk; the next server resumes the job
            self.died = error
            return
        del self._jobs[state.key]
        self._store_unfinished()
        job.ended.set()
        log.info(
            "%s %s is %s after %.1f s%s",
            state.kind,
            state.key,
            ended.state,
            time.monotonic() - started,
            _summary(ended),
        )

    def _store_unfinished(self) -> None:
        self._run.store.set_meta(UNFINISHED, list(self._jobs))

    async def _collect(self, state: JobState, request: Collect) -> dict[str, Any]:
        size = request.group_size or self._run.config.group_size
        state.total = size * len(request.tasks)
        log.info("%s %s: %d tasks, %d rollouts each", state.kind, state.key, len(request.tasks), size)
        if state.total > MAX_ROLLOUTS:
            raise ConfigError(
                f"{state.total} rollouts exceed the maximum of {MAX_ROLLOUTS} per collection; split it into several"
            )

        def count() -> None:
            state.finished += 1

        await self._run.collect(
            Assignment(request.pool, count), request.tasks, group_size=size, split=request.split,
            sampling=sampling_from_wire(request.sampling and request.sampling.model_dump()), step=request.step,
            to_input=_inputs(request), allow_no_calls=request.allow_no_calls, key=_name(state.key),
        )  # fmt: skip
        state.finished = state.total
        return {"groups": len(request.tasks), "group_size": size}

    async def _score(self, request: Score | Scores) -> dict[str, Any]:
        if isinstance(request, Score):
            ids, reward = request.groups, request.reward
        else:
            ids = [[score.rollout_id for score in scores] for scores in request.groups]
            reward = _StoredReward(
                request.by, {score.rollout_id: score for scores in request.groups for score in scores}
            )
        groups = await asyncio.to_thread(lambda: [self._group(group_ids) for group_ids in ids])
        scored = await self._run.score(groups, reward)
        return {"groups": [scores_to_wire(group) for group in scored]}

    async def _learn(self, request: Learn, record: dict[str, Any], name: str) -> dict[str, Any]:
        async with self._learning:  # taken first, so that steps are made in the order of their requests
            before = record.get("step")
            if before is not None and self._run.step > before:  # an earlier server made the step, but didn't report it
                return {"step": before + 1, "metrics": dict(self._run.history())[before + 1]}
            groups = await asyncio.to_thread(lambda: [self._scored_group(scores) for scores in request.groups])
            record["step"] = self._run.step
            self._run.store.set_meta(name, record)
            metrics = await self._run.learn(groups)
            self._on_step()
            return {"step": self._run.step, "metrics": metrics}

    def _scored_group(self, scores: LearnGroup) -> Group:
        group = self._group([score.rollout_id for score in scores.trajectories])
        trajectories = tuple(map(_scored, group.trajectories, scores.trajectories))
        group = Group(group.task, trajectories, tuple(scores.advantages), tuple(map(tuple, scores.call_advantages)))
        _check_advantages(group)
        return group

    def _group(self, rollout_ids: list[str]) -> Group:
        trajectories = [self._run.store.trajectory(rollout_id) for rollout_id in rollout_ids]
        if not trajectories:
            raise ConfigError("a group has no trajectories; pass the rollout ids of one task")
        return Group(trajectories[0].task, tuple(trajectories))


@dataclass
class _StoredReward:
    """A reward that returns scores computed by a client."""

    name: str
    scores: dict[str, RolloutScore]

    async def score(self, group: Group) -> list[float | None]:
        scores = [self.scores[trajectory.rollout_id] for trajectory in group.trajectories]
        for trajectory, score in zip(group.trajectories, scores, strict=True):
            call_rewards = score.of_calls()
            if call_rewards and max(call_rewards) >= len(trajectory.calls):
                raise RewardError(
                    f"rollout {score.rollout_id} has {len(trajectory.calls)} calls, but rewards for calls "
                    f"{sorted(call_rewards)}"
                )
            trajectory.metrics.update(score.metrics)
            trajectory.notes.update(score.notes)
            trajectory.call_rewards.update(call_rewards)
        return [score.reward for score in scores]


def _scored(trajectory: Trajectory, score: RolloutScore) -> Trajectory:
    rewards = score.of_calls()
    calls = tuple(replace(call, reward=rewards.get(index, call.reward)) for index, call in enumerate(trajectory.calls))
    return replace(trajectory, reward=score.reward, calls=calls, metrics=score.metrics, notes=score.notes)


def _check_advantages(group: Group) -> None:
    trajectories = group.trajectories
    wrong = group.advantages and len(group.advantages) != len(trajectories)
    lengths = [len(call_advantages) for call_advantages in group.call_advantages]
    if wrong or (lengths and lengths != [len(trajectory.calls) for trajectory in trajectories]):
        raise ConfigError(
            f"a group of {len(trajectories)} trajectories needs one advantage per trajectory, and call_advantages one per call"
        )


def _inputs(request: Collect) -> Callable[[Any], Any]:
    if request.inputs is None:
        return task_input
    if len(request.inputs) != len(request.tasks):
        raise ConfigError(f"got {len(request.inputs)} inputs for {len(request.tasks)} tasks; pass one per task")
    inputs = {task_id(task): task_in for task, task_in in zip(request.tasks, request.inputs, strict=True)}
    return lambda task: inputs[task_id(task)]


def _summary(state: JobState) -> str:
    """Return a job's result for the log."""
    if state.state != "done" or state.result is None:
        return ""
    if state.kind == "collect":
        return f", {state.total} rollouts"
    if state.kind == "learn":
        return f", step {state.result['step']}, mean reward {state.result['metrics'].get('reward', float('nan')):.3g}"
    return f", {len(state.result['groups'])} groups"


def _name(key: str) -> str:
    return f"job/{key}"
