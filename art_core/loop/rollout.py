"""A rollout: an address for the model calls of one execution of an agent, then the trajectory that was recorded there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from art_core.attribution import elsewhere, inside_rollout
from art_core.errors import CaptureError, ConfigError
from art_core.loop.own_code import own_place
from art_core.redaction import describe_error
from art_core.runtime.threads import finished
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.types import RolloutAddress, Sampling, Trajectory

T = TypeVar("T")

API_KEY = "art-rollout"
"""For clients that insist on a key; the rollout is identified by its address alone."""
_READERS = ThreadPoolExecutor(8, thread_name_prefix="art-rollout")
"""Not the event loop's default threads: the tools of agents may occupy all of those."""


@dataclass
class Rollout:
    """``async with`` opens an address for the agent's model calls; after the block, ``trajectory`` has what was recorded.

    An exception in the block is recorded as ``trajectory.error`` and propagates.
    """

    task: Any
    serving: ServingProxy
    store: Store
    model: str = "policy"
    sampling: Sampling = field(default_factory=Sampling)
    split: str = "train"
    """``train`` or ``eval``."""
    step: int = 0
    group_id: str = ""
    """Shared by all rollouts that are compared with each other."""
    passthrough: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()
    """If not empty, the policy answers the calls of these nodes only."""
    live: bool = False
    """Whether the agent's own providers answer its calls."""
    continues: str | None = None
    """The id of an interrupted rollout: its requests get the recorded answers again, as long as they are the same."""
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: Any = None
    """The result; set it inside the block."""
    error: str | None = None
    error_at: str = ""
    address: RolloutAddress | None = None
    """Set while the rollout is open."""
    _trajectory: Trajectory | None = None

    @property
    def base_url(self) -> str:
        """For any OpenAI-compatible client, while the rollout is open."""
        return self._opened().base_url

    @property
    def api_key(self) -> str:
        return self._opened().api_key

    @property
    def trajectory(self) -> Trajectory:
        """What was recorded. Raises CaptureError while the rollout is open."""
        if self._trajectory is None:
            raise CaptureError(
                f"rollout {self.rollout_id} is still open: its trajectory exists after the 'async with' block"
            )
        return self._trajectory

    def fail(self, error: BaseException) -> None:
        """Record why the agent failed, and where in its own code."""
        self.error, self.error_at = describe_error(error), own_place(traceback.walk_tb(error.__traceback__))

    def _opened(self) -> RolloutAddress:
        if self.address is None:
            raise CaptureError("a rollout only has an address inside its 'async with' block")
        return self.address

    async def __aenter__(self) -> Rollout:
        self.store.add_rollout(
            self.rollout_id,
            step=self.step,
            split=self.split,
            task_id=task_id(self.task),
            task=self.task,
            group=self.group_id,
            continues=self.continues,
        )
        replayed = await _in_reader(self.store.calls, self.continues) if self.continues else ()
        base_url = await self.serving.open(self.rollout_id, self.sampling, replayed=replayed)
        self.address = RolloutAddress(
            self.rollout_id, base_url, API_KEY, self.model, self.passthrough, self.nodes, self.live
        )
        self._started = time.monotonic()
        self._stack = ExitStack()
        self._stack.enter_context(inside_rollout(self.address))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        unrecorded = elsewhere(self.rollout_id)
        self._stack.close()
        if error is not None and self.error is None:
            self.fail(error)
        unrecorded["failed"] = await self.serving.close(self.rollout_id)
        seconds = time.monotonic() - self._started
        self.store.finish_rollout(self.rollout_id, output=self.output, error=self.error, seconds=seconds)
        self._trajectory = Trajectory(
            task=self.task,
            calls=await _in_reader(self.store.calls, self.rollout_id),
            output=self.output,
            error=self.error,
            error_at=self.error_at,
            unrecorded=unrecorded,
            rollout_id=self.rollout_id,
            seconds=seconds,
        )
        self.address = None


async def _in_reader(read: Callable[[str], T], rollout_id: str) -> T:
    """Read in a thread: the read waits for the disk, and rollouts that end together share one commit."""
    return await finished(asyncio.get_running_loop().run_in_executor(_READERS, read, rollout_id))


def failure(trajectory: Trajectory) -> str:
    """Return why the agent failed and, if known, at which of its lines."""
    error = str(trajectory.error)
    return f"{error.rstrip('.')} ({trajectory.error_at})" if trajectory.error_at else error


def task_id(task: Any) -> str:
    """Return a short hash of a JSON-serializable task; ConfigError if it isn't."""
    try:
        text = json.dumps(task, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a task must be JSON-serializable; this one isn't ({error}): {task!r:.200}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def task_input(task: Any) -> Any:
    """Return the agent's input: the value of ``"input"`` if the task is a dict with that key, else the task."""
    return task["input"] if isinstance(task, dict) and "input" in task else task
