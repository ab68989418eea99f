"""One task, n runs of the agent -> Group. A failed run is data; a fault of ours is raised.

Knows nothing about rewards, token trees or learning.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import hashlib
import importlib.metadata
import json
import re
import sysconfig
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from art_core.attribution import TO_DO, elsewhere, running
from art_core.errors import CaptureError, ConfigError, RolloutLost
from art_core.plugins import GROUP
from art_core.redaction import printable, without_keys
from art_core.runtime.deadlines import TooLate, within
from art_core.runtime.threads import finished
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.types import Group, RolloutAddress, RunAgent, Sampling, Trajectory

T = TypeVar("T")

API_KEY = "art-rollout"
"""Sent by clients that insist on a key; the address itself is what names the rollout."""
CALLS_ELSEWHERE = (
    "calls did not go through a rollout's address, and no request to a model was seen; install the plugin of its client library "
    "('art plugins' lists what is installed and what is missing), or let the agent take a second argument and use "
    "address.base_url"
)
_LIBRARY = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")
_READERS = ThreadPoolExecutor(8, thread_name_prefix="art-rollout")
"""Not the loop's own threads, which agents' tools may fill."""


@dataclass
class Rollout:
    """One run of an agent: an address for its model calls while it is open, a trajectory afterwards.

    ``async with`` opens and closes it. An exception inside the block is kept in ``trajectory.error`` and goes on.
    """

    task: Any
    door: ServingProxy
    store: Store
    model: str = "policy"
    sampling: Sampling = field(default_factory=Sampling)
    split: str = "train"
    """``train`` or ``eval``."""
    step: int = 0
    group_id: str = ""
    """The same for all runs that are compared with each other."""
    passthrough: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()
    """Where not empty, only the calls of these nodes are answered by the policy."""
    continues: str | None = None
    """A rollout of a process that ended: what was answered there is answered here again, as long as the same is asked."""
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: Any = None
    """Set it inside the block, where the run has a result."""
    error: str | None = None
    error_at: str = ""
    address: RolloutAddress | None = None
    """While the rollout is open."""
    _trajectory: Trajectory | None = None

    @property
    def seconds(self) -> float:
        """Since the rollout was opened."""
        return time.monotonic() - self._started

    @property
    def base_url(self) -> str:
        """For any OpenAI-compatible client, while the rollout is open."""
        return self._opened().base_url

    @property
    def api_key(self) -> str:
        return self._opened().api_key

    @property
    def trajectory(self) -> Trajectory:
        """What was recorded; CaptureError while the rollout is open."""
        if self._trajectory is None:
            raise CaptureError(
                f"rollout {self.rollout_id} is still open: its trajectory exists after the 'async with' block"
            )
        return self._trajectory

    def _opened(self) -> RolloutAddress:
        if self.address is None:
            raise CaptureError("a rollout has an address inside its 'async with' block only")
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
        answered = await _reading(self.store.calls, self.continues) if self.continues else ()
        base_url = await self.door.open(self.rollout_id, self.sampling, answered=answered)
        self.address = RolloutAddress(self.rollout_id, base_url, API_KEY, self.model, self.passthrough, self.nodes)
        self._started = time.monotonic()
        self._stack = ExitStack()
        self._stack.enter_context(running(self.address))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        missed = elsewhere(self.rollout_id)
        self._stack.close()
        if error is not None and self.error is None:
            self.error, self.error_at = describe(error), place(error)
        missed["failed"] = await self.door.close(self.rollout_id)
        seconds = self.seconds
        self.store.finish_rollout(self.rollout_id, output=self.output, error=self.error, seconds=seconds)
        calls = await _reading(self.store.calls, self.rollout_id)
        self._trajectory = Trajectory(
            task=self.task,
            calls=calls,
            output=self.output,
            error=self.error,
            error_at=self.error_at,
            unrecorded=missed,
            rollout_id=self.rollout_id,
            seconds=seconds,
        )
        self.address = None


async def _reading(read: Callable[[str], T], rollout_id: str) -> T:
    """Read in a thread: it waits for the disk, and rollouts that end together share one commit."""
    return await finished(asyncio.get_running_loop().run_in_executor(_READERS, read, rollout_id))


def describe(error: BaseException) -> str:
    """Return the exception as one line with its type, without the keys that libraries put into what they say."""
    text = printable(without_keys(" ".join(str(error).split())))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place(error: BaseException) -> str:
    """Return where the agent's own code raised it, or called the library that did; empty where none of its code is seen."""
    return own_place(traceback.walk_tb(error.__traceback__))


def own_place(lines: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost of these lines, the outermost call first, that is of the agent's own code; empty for none."""
    for frame, line in reversed(list(lines)):
        file, package = frame.f_code.co_filename, frame.f_globals.get("__package__") or ""
        if is_own(file, package):
            return f"{file}:{line} in {frame.f_code.co_name}"
    return ""


def is_own(file: str, module: str) -> bool:
    """Whether code is the user's own, and not of Python, of an installed library, of art or of a plugin."""
    return not (_LIBRARY.match(file) or module.partition(".")[0] in _our_packages())


@functools.cache
def _our_packages() -> frozenset[str]:
    """Return the packages of art and of its plugins; an agent's own may begin with ``art_`` too."""
    plugins = importlib.metadata.entry_points(group=GROUP)
    return frozenset({"art_core", *(it.module.partition(".")[0] for it in plugins)})


def failure(trajectory: Trajectory) -> str:
    """Return why the run failed and, where that is known, at which line of the agent."""
    said = str(trajectory.error)
    return f"{said.rstrip('.')} ({trajectory.error_at})" if trajectory.error_at else said


def task_id(task: Any) -> str:
    """Return a short hash of a JSON-able task; ConfigError where it is not."""
    try:
        text = json.dumps(task, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a task must be JSON-able, this one is not ({error}): {task!r:.200}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def task_input(task: Any) -> Any:
    """Return what the agent is given: the value of ``"input"`` where the task is a dict with that key, else the task."""
    return task["input"] if isinstance(task, dict) and "input" in task else task


async def _output(run: RunAgent, given: Any, rollout: Rollout) -> Any:
    try:
        return await run(given, rollout.address)
    except SystemExit as error:  # here and not in run_once: out of a task, it ends the event loop and all other runs
        rollout.error, rollout.error_at = describe(error), place(error)


async def run_once(
    rollout: Rollout,
    run: RunAgent,
    given: Any,
    *,
    timeout: float | None,
    to_output: Callable[[Any], Any] | None = None,
) -> Trajectory:
    """Run the agent once on ``given`` and return its trajectory, failed or not. ``to_output`` sees what it returned.

    Raises RolloutLost, with the rollout closed, where the machine that ran the agent is gone.
    """
    async with rollout:
        try:
            output = await within(_output(run, given, rollout), timeout, f"rollout {rollout.rollout_id}")
        except TooLate:
            rollout.error = f"TimeoutError: not done after {timeout:g} seconds"
        except (CaptureError, RolloutLost):
            raise  # about the set-up, and the same in every run; about a machine, and nothing that the agent did
        except Exception as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
            rollout.error, rollout.error_at = describe(error), place(error)
        else:
            if rollout.error is None:
                rollout.output = to_output(output) if to_output else output
    return rollout.trajectory


def check_sampled(groups: Sequence[Group]) -> None:
    """Raise ConfigError where a policy gradient would be taken of what no policy sampled."""
    strangers = [t.rollout_id for g in groups for t in g.trajectories if any(c.policy_version < 0 for c in t.calls)]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} trajectories, rollout {strangers[0] or '(no id)'} first, have calls that another model answered "
            "(policy_version -1), so there are no probabilities to learn their rewards from; imitate them with learn_sft, or "
            "leave them out"
        )


def check_captured(groups: Sequence[Group], nodes: Sequence[str] = ()) -> None:
    """Raise CaptureError where not one run made a recorded call, or none of ``nodes``: then the set-up is why nothing can be
    learnt."""
    trajectories = [t for g in groups for t in g.trajectories]
    calls = [call for t in trajectories for call in t.calls]
    if calls and nodes and not any(call.made_by(*nodes) for call in calls):
        seen = ", ".join(sorted({repr(call.agent) for call in calls}))
        unnamed = " (None: nobody named the node; 'art plugins' lists the plugins that do)" if "None" in seen else ""
        raise CaptureError(
            f"train_nodes={tuple(nodes)} made none of {len(calls)} calls; the calls came from {seen}{unnamed}. Name one of "
            "these; where a graph stopped at an interrupt before its node, run it with art_langgraph.answering"
        )
    if trajectories and not calls:
        raise CaptureError(_why_no_call(trajectories))


def unrecorded(trajectories: Iterable[Trajectory], kind: str) -> Counter[str]:
    """Return what ``Trajectory.unrecorded`` has of a kind, the most frequent first."""
    total: Counter[str] = Counter()
    for trajectory in trajectories:
        total.update(trajectory.unrecorded.get(kind, {}))
    return Counter(dict(total.most_common()))


def note_elsewhere(store: Store, groups: Sequence[Group]) -> None:
    """Add to what the store has for the report of model calls that did not go to the policy."""
    trajectories = [t for g in groups for t in g.trajectories]
    seen = {kind: unrecorded(trajectories, kind) for kind in ("refused", "passed")}
    if any(seen.values()):
        before = store.meta("calls_elsewhere", {})
        store.set_meta("calls_elsewhere", {kind: seen[kind] + Counter(before.get(kind, {})) for kind in seen})


def why_elsewhere(groups: Sequence[Group], kind: str) -> str | None:
    """Return how many model calls were ``refused`` before they left, or ``passed`` to where the agent sends them; None for 0."""
    trajectories = [t for g in groups for t in g.trajectories]
    missed = {kind: unrecorded(trajectories, kind) for kind in ("refused", "passed")}
    calls = sum(found.total() for found in missed.values()) + sum(len(t.calls) for t in trajectories)
    if not missed[kind]:
        return None
    return f"{missed[kind].total()} of {calls} model calls did not reach the policy: {_became(kind, missed[kind])}"


BECAME = {
    "failed": "{} were refused by it, the first with: {}",
    "refused": "{} were refused before they left ({})",
    "passed": "{} went where the agent sends them, as passthrough= or other_nodes= says ({})",
}


def _became(kind: str, found: Counter[str]) -> str:
    return BECAME[kind].format(found.total(), ", ".join(list(found)[: 1 if kind == "failed" else 3]))


def _why_no_call(trajectories: Sequence[Trajectory]) -> str:
    """Return what to say if not one run made a recorded call: what became of the calls, else the agent's own error."""
    failed = [t for t in trajectories if t.error]
    missed = {kind: found for kind in BECAME if (found := unrecorded(trajectories, kind))}
    if missed:
        calls = sum(found.total() for found in missed.values())
        at = next((f" (at {t.error_at})" for t in failed if t.error_at), "")
        became = [_became(kind, found) for kind, found in missed.items()] + [TO_DO] * ("refused" in missed)
        return f"the policy answered none of {calls} model calls{at}: {'; '.join(became)}"
    if len(failed) < len(trajectories):
        some = f"; {len(failed)} runs failed, the first with {failure(failed[0])}" if failed else ""
        return f"the agent ran {len(trajectories)} times and no model call was recorded: its {CALLS_ELSEWHERE}{some}"
    first = str(failed[0].error)
    said = f"{failure(failed[0])}: all {len(failed)} runs of the agent failed before a model call was recorded; this is the first"
    if "OPENAI_API_KEY" in first:
        return f"{said}. The policy answers without a key, so any text will do: set OPENAI_API_KEY=unused"
    return f"{said}. If it is a model call that failed, its {CALLS_ELSEWHERE}" if _of_a_library(first) else said


def _of_a_library(error: str) -> bool:
    """Whether an error may be of a client: Python's own are of the agent's code, but for those of connections."""
    kind = getattr(builtins, error.partition(":")[0], None)
    return kind is None or issubclass(kind, ConnectionError | TimeoutError)
