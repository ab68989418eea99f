"""What was asked of the run, by a key of the asker's own: done once, however often it is asked, restarts or not.

Knows nothing about HTTP or sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from art_core.errors import ArtError, ConfigError, RewardError, ServingDied, StoreError
from art_core.loop.rollout import task_id, task_input
from art_core.loop.run import Run
from art_core.redaction import describe_error
from art_core.types import Group, Trajectory
from art_server.executor import Assignment
from art_server.requests import MOST_RUNS, Collect, GivenScore, JobRequest, JobState, Learn, LearnGroup, Score, Scores
from art_server.wire import sampling_from_wire, scores_to_wire

log = logging.getLogger("art_server")

UNFINISHED = "server/unfinished"
"""Under this name the store keeps the keys of jobs that are to be taken up again."""
GIVEN_UP = "CancelledError: whoever asked for it has given it up"
_REQUESTS: TypeAdapter[Any] = TypeAdapter(JobRequest)


class Conflict(ArtError):
    """The key was used for another request."""


@dataclass
class Job:
    """A request and how far it is."""

    request: Any
    state: JobState
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """While it is done here."""
    given_up: bool = False


class Jobs:
    """The jobs of one run. ``learnt`` is called after every step."""

    def __init__(self, run: Run, learnt: Callable[[], None]) -> None:
        self._run, self._learnt = run, learnt
        self._jobs: dict[str, Job] = {}
        self._learning = asyncio.Lock()
        self._ending = asyncio.Event()
        self.died: ServingDied | StoreError | None = None
        """Why no job can go on here."""

    def resume(self) -> list[str]:
        """Begin again what an ended server had not finished; return the keys."""
        kept = {key: self._run.store.meta(_name(key)) for key in self._run.store.meta(UNFINISHED, [])}
        unfinished = {key: it for key, it in kept.items() if "state" not in it}
        for key, it in unfinished.items():
            self._begin(key, _REQUESTS.validate_python(it["request"]), it)
        return list(unfinished)

    async def put(self, key: str, request: Any) -> JobState:
        """Begin a job, or say how far the one with this key is; on disk when it returns, so that no restart forgets it.

        Raises Conflict where the key is of another request.
        """
        state = self._put(key, request)
        await asyncio.to_thread(self._run.store.flush)
        return state

    def _put(self, key: str, request: Any) -> JobState:
        known = self._jobs.get(key) or self._stored(key)
        if known is not None:
            if task_id(known.request) != task_id(request.model_dump(mode="json")):
                raise Conflict(f"the key {key!r} was used for another request; give every request a key of its own")
            if not self._is_to_be_done_again(known.state):
                return known.state
        kept = {"request": request.model_dump(mode="json")}
        self._run.store.set_meta(_name(key), kept)
        job = self._begin(key, request, kept)
        self._note_unfinished()
        return job.state

    def _is_to_be_done_again(self, state: JobState) -> bool:
        """Whether nothing came of it: it failed, or the weights of its step were lost with a server that had not saved them.

        Not so a step that failed: it may have been taken.
        """
        if state.kind == "learn":
            return state.state == "done" and state.result["step"] > self._run.step
        return state.state == "failed"

    def get(self, key: str) -> JobState | None:
        """Return how far a job is; None where there is none."""
        known = self._jobs.get(key) or self._stored(key)
        return None if known is None else known.state

    async def wait(self, key: str, seconds: float) -> JobState | None:
        """Return how far a job is when it ends, or after so long, or when the server is about to end."""
        job = self._jobs.get(key)
        if job is not None:
            waiting = [asyncio.create_task(it.wait()) for it in (job.ended, self._ending)]
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return self.get(key)

    async def give_up(self, key: str) -> JobState | None:
        """End a collection that is under way, for nobody will fetch it; return how far it came. None where there is none."""
        job = self._jobs.get(key)
        if job is None or job.state.kind != "collect" or job.task is None:
            return None
        job.given_up = True
        job.task.cancel()
        await job.ended.wait()
        return self.get(key)

    def ending(self) -> None:
        """Let nobody wait any longer: the server is about to end."""
        self._ending.set()

    def group(self, key: str, place: int) -> Group | None:
        """Return a collected group; None where there is none."""
        state = self.get(key)
        if state is None or state.kind != "collect" or state.state != "done":
            return None
        if not 0 <= place < (state.result or {})["groups"]:
            return None
        runs = self._run.collected(_name(key), place)
        return Group(runs[0].task, tuple(runs[: state.result["group_size"]]))

    @property
    def unfetched(self) -> int:
        """Runs that ended in collections that are still under way."""
        return sum(job.state.finished for job in self._jobs.values() if job.state.state == "running")

    async def close(self) -> None:
        """Stop what is under way; it is taken up again when the run is opened again."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stored(self, key: str) -> Job | None:
        kept = self._run.store.meta(_name(key))
        if kept is None or "state" not in kept:
            return None
        return Job(kept["request"], JobState.model_validate(kept["state"]))

    def _begin(self, key: str, request: Any, kept: dict[str, Any]) -> Job:
        state = JobState(key=key, kind=request.kind, state="running")
        job = self._jobs[key] = Job(kept["request"], state)
        job.task = asyncio.create_task(self._do(job, request, kept))
        return job

    async def _do(self, job: Job, request: Any, kept: dict[str, Any]) -> None:
        state, begun = job.state, time.monotonic()
        try:
            if isinstance(request, Collect):
                result = await self._collect(state, request)
            elif isinstance(request, Learn):
                result = await self._learn(request, kept, _name(state.key))
            else:
                result = await self._score(request)
            ended = state.model_copy(update={"state": "done", "result": result})
        except asyncio.CancelledError:
            if not job.given_up:
                raise  # the server ends; the job goes on with the next
            ended = state.model_copy(update={"state": "failed", "error": GIVEN_UP})
        except ServingDied as error:  # the job is not done, and goes on when a server has been started again
            self.died = error
            return
        except Exception as error:  # the boundary between one request and the serving of all others
            unknown = None if isinstance(error, ArtError) else error
            log.error("%s %s failed: %s", state.kind, state.key, describe_error(error), exc_info=unknown)
            ended = state.model_copy(update={"state": "failed", "error": describe_error(error)})
        # The state stands in the store before anybody hears of it, so that no restart does the job again.
        self._run.store.set_meta(_name(state.key), {**kept, "state": ended.model_dump(mode="json")})
        try:
            await asyncio.to_thread(self._run.store.flush)
        except StoreError as error:  # nobody may be told of it; a server that is started when there is room knows it
            self.died = error
            return
        del self._jobs[state.key]
        self._note_unfinished()
        job.ended.set()
        log.info(
            "%s %s is %s after %.1f s%s", state.kind, state.key, ended.state, time.monotonic() - begun, _summary(ended)
        )

    def _note_unfinished(self) -> None:
        self._run.store.set_meta(UNFINISHED, list(self._jobs))

    async def _collect(self, state: JobState, request: Collect) -> dict[str, Any]:
        size = request.group_size or self._run.config.group_size
        state.total = size * len(request.tasks)
        log.info("%s %s: %d tasks, %d runs of each", state.kind, state.key, len(request.tasks), size)
        if state.total > MOST_RUNS:
            raise ConfigError(f"{state.total} runs are more than the {MOST_RUNS} of one collection; ask for several")

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
            ids = [[it.rollout_id for it in scores] for scores in request.groups]
            reward = _Given(request.by, {it.rollout_id: it for scores in request.groups for it in scores})
        groups = await asyncio.to_thread(lambda: [self._group(of_group) for of_group in ids])
        scored = await self._run.score(groups, reward)
        return {"groups": [scores_to_wire(group) for group in scored]}

    async def _learn(self, request: Learn, kept: dict[str, Any], name: str) -> dict[str, Any]:
        async with self._learning:  # before all else: steps are taken in the order in which they were asked for
            begun = kept.get("step")
            if begun is not None and self._run.step > begun:  # taken and kept, but the server ended before it said so
                return {"step": begun + 1, "metrics": dict(self._run.history())[begun + 1]}
            groups = await asyncio.to_thread(lambda: [self._as_given(given) for given in request.groups])
            kept["step"] = self._run.step
            self._run.store.set_meta(name, kept)
            metrics = await self._run.learn(groups)
            self._learnt()
            return {"step": self._run.step, "metrics": metrics}

    def _as_given(self, given: LearnGroup) -> Group:
        group = self._group([it.rollout_id for it in given.trajectories])
        runs = tuple(_rewarded(run, it) for run, it in zip(group.trajectories, given.trajectories, strict=True))
        group = Group(group.task, runs, tuple(given.advantages), tuple(map(tuple, given.call_advantages)))
        _check_advantages(group)
        return group

    def _group(self, rollout_ids: list[str]) -> Group:
        runs = [self._run.store.trajectory(rollout_id) for rollout_id in rollout_ids]
        if not runs:
            raise ConfigError("a group has no trajectories; give the ids of the runs of one task")
        return Group(runs[0].task, tuple(runs))


@dataclass
class _Given:
    """A reward that was found elsewhere."""

    name: str
    scores: dict[str, GivenScore]

    async def score(self, group: Group) -> list[float | None]:
        found = [self.scores[trajectory.rollout_id] for trajectory in group.trajectories]
        for trajectory, given in zip(group.trajectories, found, strict=True):
            of_calls = given.of_calls()
            if of_calls and max(of_calls) >= len(trajectory.calls):
                raise RewardError(
                    f"rollout {given.rollout_id} has {len(trajectory.calls)} calls, and rewards for {sorted(of_calls)}"
                )
            trajectory.metrics.update(given.metrics)
            trajectory.notes.update(given.notes)
            trajectory.call_rewards.update(of_calls)
        return [given.reward for given in found]


def _rewarded(trajectory: Trajectory, given: GivenScore) -> Trajectory:
    rewards = given.of_calls()
    calls = tuple(replace(call, reward=rewards.get(index, call.reward)) for index, call in enumerate(trajectory.calls))
    return replace(trajectory, reward=given.reward, calls=calls, metrics=given.metrics, notes=given.notes)


def _check_advantages(group: Group) -> None:
    runs = group.trajectories
    wrong = group.advantages and len(group.advantages) != len(runs)
    by_call = [len(of_run) for of_run in group.call_advantages]
    if wrong or (by_call and by_call != [len(run.calls) for run in runs]):
        raise ConfigError(
            f"a group of {len(runs)} trajectories needs as many advantages, and per trajectory one a call"
        )


def _inputs(request: Collect) -> Callable[[Any], Any]:
    if request.inputs is None:
        return task_input
    if len(request.inputs) != len(request.tasks):
        raise ConfigError(f"{len(request.tasks)} tasks have {len(request.inputs)} inputs; give one for each")
    inputs = {task_id(task): given for task, given in zip(request.tasks, request.inputs, strict=True)}
    return lambda task: inputs[task_id(task)]


def _summary(state: JobState) -> str:
    """Return what came of a job, for the log."""
    if state.state != "done" or state.result is None:
        return ""
    if state.kind == "collect":
        return f", {state.total} runs"
    if state.kind == "learn":
        return f", step {state.result['step']}, mean reward {state.result['metrics'].get('reward', float('nan')):.3g}"
    return f", {len(state.result['groups'])} groups"


def _name(key: str) -> str:
    return f"job/{key}"
