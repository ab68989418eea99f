"""The parts that can be supplied from outside: a protocol each, and a base class with its optional methods.

A part inherits the base class to override what it can do; one that doesn't inherit it may still have any of the methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from art_core.types.nouns import (
    Call,
    Group,
    JsonDict,
    LossInputs,
    LossOutputs,
    RolloutAddress,
    TokenTree,
    Trajectory,
    Weights,
)

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

Base = TypeVar("Base")


class Recorder(Protocol):
    """Stores calls durably. Capture uses it from its own thread."""

    def record(self, rollout_id: str, call: Call) -> None:
        """Accept a call without waiting for the disk; later failures are reported by ``saved``. Raises StoreError if closed."""

    def saved(self) -> Future[None]:
        """Return a future that completes when everything accepted would survive this process; StoreError if it can't."""

    def flush(self) -> None:
        """Return when that future would be complete."""

    def close(self) -> None: ...


class Upstream(Protocol):
    """Answers chat-completions requests with token ids. Both methods accept OpenAI's request body and return OpenAI's
    response bodies with the additions below. A request with ``prompt`` (text or token ids) instead of ``messages`` is
    continued without a chat template and answered in the same shape. The additions:

    - the completion, or the first chunk of a stream: ``prompt_token_ids`` (list of int), ``policy_version`` (int)
    - every choice, of a completion or of a chunk: ``token_ids`` (list of int), ``token_logprobs`` (list of float, same
      length, as described in ``Call.logprobs``) and, if a grammar forced tokens, ``forced`` (positions in this choice's
      whole sampled text)
    - of a completion or chunk: ``logprobs_temperature``, if the logprobs are of another temperature than the request's

    Cancelling the task that runs ``chat``, or closing the iterator of ``stream``, stops the sampling. ``chat`` may then catch
    the cancellation and return what was sampled so far, every unfinished choice with the finish reason ``"aborted"``: it is
    recorded and not trained. If it lets the cancellation through, what was sampled is lost.

    Errors are ``UpstreamError`` with the HTTP status and OpenAI's error code.
    """

    async def chat(self, request: JsonDict) -> JsonDict: ...

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]: ...


class Engine(Upstream, Protocol):
    """Serves the policy, in the same process as capture: a child process by default. ``EngineBase`` has the optional methods."""

    async def start(self) -> None:
        """Load what is needed to answer the first request."""

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next request on. Called while no request is in flight."""

    async def stop(self) -> None: ...


class EngineBase:
    """The optional methods of an engine."""

    loads_files = False
    """Whether ``load`` only accepts weights that have a ``path``."""
    relay: Callable[..., Coroutine[Any, Any, None]] | None = None
    """``relay(exchange, call)``, if the agent's own provider answers: sends the request there and its answer back, and records
    it before its end. ``call`` is an ``art_core.capture.RelayedCall``."""

    def begin(self, run_dir: Path) -> None:
        """Called once, before ``start``, with an existing folder for logs and other files."""

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return the logprob (nats, temperature 1) of every token but the first, given those before it, under the
        newest weights: (len(ids) - 1,). None: not supported."""
        return None

    async def counters(self) -> Mapping[str, float]:
        """Return totals since ``start``: ``prompt_tokens``, ``cached_tokens`` (the part of them that was not
        recomputed) and ``sampled_tokens``."""
        return {}

    def overlaps(self, weights: Weights) -> bool:
        """Whether these weights can be served beside the previous ones; ``load`` is then called with requests in
        flight."""
        return False

    def keeps_start(self) -> bool:
        """Whether ``at(0)`` always works, for nodes that are not trained."""
        return False

    def at(self, version: int) -> Upstream:
        """Return what answers with this version, which was loaded and not retired, or with the newest if that replaced
        it."""
        return self  # type: ignore[return-value]

    async def retire(self, version: int) -> None:
        """Drop a version: a newer one is served, and no open rollout began with it."""

    async def rest(self) -> None:
        """Release memory for the learner. No request is in flight, and none comes before ``wake``."""

    async def wake(self) -> None:
        """Get ready for requests again, with the weights of before."""


class Learner(Protocol):
    """Token trees in, better weights out."""

    version: int
    """Optimizer steps done; the ``policy_version`` of calls sampled from ``weights()``."""

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        """Take one optimizer step on all the trees together, and return metrics. ``loss`` replaces the run's own.

        If no step was taken, or this raises, ``version`` says whether weights changed; NotFiniteError drops the step.
        """

    def measure(self, trees: Sequence[TokenTree]) -> float:
        """Do the work of a step without changing the weights, and return its duration in seconds; for a dry run."""

    def weights(self) -> Weights:
        """Return what to serve. Called while no request is in flight.

        With ``max_staleness`` in the config, requests are answered while ``step`` runs, so ``step`` must not change these.
        """

    def publish(self, folder: Path) -> Weights:
        """Write only the weights, for an engine that loads files; return them with the ``path`` of the model's or adapter's
        folder: ``folder`` itself or a folder in it."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random state; nothing in the folder needs unpickling."""

    def restore(self, folder: Path) -> None: ...


class LearnerBase:
    """The optional members of a learner."""

    choice = ""
    """A line for the person who trains: which learner was chosen and why."""
    run_step: int | None = None
    """The step of the run that the next ``step`` takes, from 1; ahead of ``version`` if steps were skipped."""

    def begin_step(self, run_step: int) -> None:
        """Called before ``step``."""
        self.run_step = run_step

    def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return the logprob (nats, temperature 1) of every token but the first, under the weights of this version. None:
        not supported."""
        return None

    def close(self) -> None:
        """Called when the run ends, if a factory made the learner."""


RunAgent = Callable[[Any, RolloutAddress], Awaitable[Any]]
"""An adapted agent: runs it once on one task's input and returns its output."""

Reward = Callable[[Trajectory], "float | Awaitable[float]"]


class GroupReward(Protocol):
    """Scores a whole group at once, because judges such as RULER compare rollouts."""

    async def score(self, group: Group) -> list[float | None]:
        """Return one number per trajectory, in order; None for a trajectory that could not be scored, with the reason in
        ``trajectory.notes["unscored"]``."""


@runtime_checkable
class MeteredReward(GroupReward, Protocol):
    """A group reward that costs something."""

    def begin(self, run_dir: Path) -> None:
        """Called once per run, before the first scoring; the reward may keep files in the run folder."""

    def account(self) -> Mapping[str, float]:
        """Return what this run has cost so far, such as ``{"judge/cost": 1.25}``. Every step's metrics include these totals."""

    def exhausted(self) -> str | None:
        """Return why nothing more can be scored, and what to change; None while it can. Training with this reward then ends
        after the step, and its evaluations are skipped."""


class Tasks(list[Any]):
    """Tasks of a suite, with what belongs to them."""

    def __init__(self, tasks: Iterable[Any], reward: Reward, agent: Callable[[], Any], origin: str) -> None:
        super().__init__(tasks)
        self.reward = reward
        """The suite's own check; adds the metric ``success``, 0 or 1."""
        self.agent = agent
        """Returns a new reference agent."""
        self.origin = origin
        """Where the tasks come from, with their licence."""


class TaskSuite(Protocol):
    """Tasks that somebody else wrote, by name."""

    origin: str

    def names(self) -> Sequence[str]:
        """Return what can be loaded. Raises ConfigError, with what to do, if the suite isn't installed."""

    def load(self, name: str, split: str, **options: Any) -> Tasks:
        """Return the ``"train"`` or ``"test"`` tasks of ``name``, the same every time. Raises ConfigError."""


Loss = Callable[[LossInputs], LossOutputs]


class ExecutorBase:
    """The optional methods of an executor. If it is an asynchronous context manager, a run enters it before the first rollout."""

    def gate(self, agent: object) -> AbstractAsyncContextManager[Any] | None:
        """Return what a rollout of ``agent`` waits for and then holds, in place of the limit ``max_concurrent``; its time
        limit begins when the gate lets it in. None: keep ``max_concurrent``."""
        return None


def with_defaults(part: Any, base: type[Base]) -> Base:
    """Return a part that has all members of ``base``: itself if it inherits ``base``, else a wrapper."""
    if isinstance(part, base):
        return part

    class WithDefaults(base):  # type: ignore[misc, valid-type]
        """The part's own members, and defaults for those that it lacks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(part, name)

    wrapper = WithDefaults()
    for name in vars(base):
        if not name.startswith("_") and hasattr(part, name):
            setattr(wrapper, name, getattr(part, name))
    return wrapper
