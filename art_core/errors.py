"""Every error that art raises on purpose.

ArtError
|-- ConfigError          an argument, a task list or a folder is invalid
|-- AgentError           no plugin adapts this agent
|-- PluginError          a plugin failed, or two plugins disagree
|-- CaptureError         a model call cannot be attributed or recorded
|   |-- ServingDied      the process that serves the policy has died
|   `-- UpstreamError    what serves the policy refused or failed
|-- CallRefused          a model call inside a rollout was not redirected, and was refused before it left
|-- RolloutLost          the machine that ran the agent is gone
|-- StaleWeightsError    the engine does not serve the newest weights
|-- NotFiniteError       a step has a NaN or infinite value and was not taken
|-- RewardError          a reward function returned something that is not a reward
`-- StoreError           the run folder cannot be written or read
    `-- DamagedCheckpoint    a checkpoint is not what was saved
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any


class ArtError(Exception):
    """Base class; its message says what happened, where, and what to do."""


class ConfigError(ArtError, ValueError):
    """An argument, a task list or a folder is invalid."""


class AgentError(ArtError, TypeError):
    """No plugin adapts this agent."""


class PluginError(ArtError):
    """A plugin failed, or two plugins disagree."""


class CaptureError(ArtError):
    """A model call cannot be attributed or recorded."""


class ServingDied(CaptureError):
    """The process that serves the policy has died. Start again with the same run folder to resume."""


TOO_LONG = "context_length_exceeded"
"""OpenAI's error code if prompt and answer don't fit in the context; frameworks look for it."""


class UpstreamError(CaptureError):
    """What serves the policy refused a request or failed."""

    def __init__(
        self, message: str, *, status: int = 500, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the answer to the agent's client."""
        self.code = code
        """OpenAI's error code, such as ``TOO_LONG``."""
        self.retry_after = retry_after
        """Seconds after which the request may be sent again, if the upstream says so."""

    def __reduce__(self):
        return _rebuild_upstream_error, (str(self), self.status, self.code, self.retry_after)


def _rebuild_upstream_error(message: str, status: int, code: str | None, retry_after: float | None) -> UpstreamError:
    return UpstreamError(message, status=status, code=code, retry_after=retry_after)


class CallRefused(ArtError):
    """A model call inside a rollout was not redirected to the policy, and was refused before it left.

    Not a CaptureError: like any error of an agent, it ends that rollout and not the training.
    """


class RolloutLost(ArtError):
    """The machine that ran the agent is gone. Raised by executors; the rollout is repeated."""


class StaleWeightsError(ArtError):
    """The engine does not serve the newest weights."""


class NotFiniteError(ArtError):
    """A step has a NaN or infinite value and was not taken: weights, optimizer and version are unchanged.

    Raised by learners; the run then drops the step, keeps its inputs, and continues.
    """

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, details or {})  # both, so that it can be pickled

    @property
    def details(self) -> Mapping[str, Any]:
        """What was not finite: JSON-serializable values by name."""
        return self.args[1]

    def __str__(self) -> str:
        return self.args[0]


class RewardError(ArtError, ValueError):
    """A reward function returned something that is not a reward."""


class StoreError(ArtError, OSError):
    """The run folder cannot be written or read."""


class DamagedCheckpoint(StoreError):
    """A checkpoint is not what was saved. Raised by learners; a resumed run skips it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, and the work was cancelled cleanly, as after Ctrl-C."""


class TooLate(BaseException):
    """Time is up. Not an Exception, so that the interrupted work can't catch it as one of its own errors."""


def failure_of(error: BaseException) -> BaseException:
    """Return what other people's code raised as its failure. Raises ``error`` if it ends the current task or the process.

    A CancelledError of something that the code awaited becomes another error, because its name stands for our cancellations.
    """
    cancelled, task = isinstance(error, asyncio.CancelledError | CancelledError), asyncio.current_task()
    if isinstance(error, KeyboardInterrupt | GeneratorExit | TooLate) or (cancelled and task and task.cancelling()):
        raise error
    return _instead(error, "it awaited something that was cancelled") if cancelled else error


def for_waiter(error: BaseException) -> BaseException:
    """Return the error for a future: in early releases of Python 3.11 and 3.12, a StopIteration lets its waiter wait forever."""
    return _instead(error, "a next() found nothing") if isinstance(error, StopIteration) else error


def _instead(error: BaseException, why: str) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__} was raised: {why}").with_traceback(error.__traceback__)
