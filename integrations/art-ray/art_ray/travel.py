"""Serialises agents for the worker processes, and the outcomes of rollouts for the way back.

Only cloudpickle is used from Ray. An agent is sent once, pickled or as a name. An output that can't be pickled is sent as the
store would keep it; an exception is sent as the name of its type and its text, which is what the store keeps.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from art_cli.arguments import load_agent
from art_core.errors import AgentError, CaptureError
from art_core.plugin_api import describe_error
from art_core.store.values import from_json, to_json


@dataclass(frozen=True)
class Agent:
    """An agent to send: pickled, or by name."""

    pickled: bytes | None = None
    name: str | None = None

    @classmethod
    def of(cls, agent: object) -> Agent:
        """Return ``agent`` in a form that can be sent. Raises AgentError if there is none."""
        if isinstance(agent, str):
            if ":" not in agent:
                raise AgentError(
                    f"{agent!r} doesn't name an agent; pass 'MODULE:NAME' or 'FILE.py:NAME' of the agent, or of a function "
                    "without parameters that makes one, which every node of the cluster can import"
                )
            return cls(name=agent)
        try:
            return cls(pickled=cloudpickle.dumps(agent))
        except Exception as error:
            raise AgentError(
                f"the agent ({type(agent).__module__}.{type(agent).__qualname__}) can't be sent to other processes: "
                f"{type(error).__name__}: {error}. Pass a name instead, 'MODULE:NAME' or 'FILE.py:NAME', of the agent or of a "
                "function without parameters that makes one: every Ray worker then imports its own"
            ) from error

    def load(self) -> object:
        """Return the agent, in the process that received this."""
        return load_agent(self.name) if self.pickled is None else pickle.loads(self.pickled)


@dataclass(frozen=True)
class Outcome:
    """The result of one rollout."""

    pickled: bytes | None = None
    """The output, if it can be pickled."""
    json: bytes = b"null"
    """The output as the store would keep it."""
    error: tuple[str, str] | None = None
    """The type and text of the agent's exception, if it failed."""
    capture_error: str | None = None
    """The text of a CaptureError: the set-up is at fault, not the agent."""

    @classmethod
    def of(cls, output: Any) -> Outcome:
        json = to_json(output)
        try:
            return cls(pickled=cloudpickle.dumps(output), json=json)
        except Exception:  # noqa: BLE001 - pickling an object may raise anything
            return cls(json=json)

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        if isinstance(error, CaptureError):
            return cls(capture_error=str(error))
        return cls(error=(type(error).__name__, describe_error(error).partition(": ")[2]))

    def output(self) -> Any:
        """Return the output, or raise the agent's exception as one of the same name and text."""
        if self.capture_error is not None:
            raise CaptureError(self.capture_error)
        if self.error is not None:
            name, text = self.error
            raise type(name, (AgentFailed,), {})(text)
        if self.pickled is None:
            return from_json(self.json)
        try:
            return pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - its classes may not exist in this process
            return from_json(self.json)


class AgentFailed(Exception):
    """Base of the exceptions that stand for an agent's own."""
