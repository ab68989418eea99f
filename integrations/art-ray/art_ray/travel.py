"""What travels between the run and the processes that run agents: the agent there, what became of a run back.

Of Ray it takes cloudpickle only. An agent travels once, as cloudpickle writes it, or as the name of what makes it. An output
that does not travel is what the store would keep of it; an exception is its type's name and its text, which is what the store
keeps.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from art_cli.arguments import load_agent
from art_core.errors import AgentError, CaptureError
from art_core.store.values import from_json, to_json


@dataclass(frozen=True)
class Agent:
    """An agent as it travels: one of the two."""

    pickled: bytes | None = None
    named: str | None = None

    @classmethod
    def of(cls, agent: object) -> Agent:
        """AgentError where it cannot travel."""
        if isinstance(agent, str):
            if ":" not in agent:
                raise AgentError(
                    f"the agent {agent!r} names no object; write 'MODULE:NAME' or 'FILE.py:NAME' of the agent, or of a function "
                    "without arguments that makes it, which every node of the cluster can import"
                )
            return cls(named=agent)
        try:
            return cls(pickled=cloudpickle.dumps(agent))
        except Exception as error:
            raise AgentError(
                f"the agent ({type(agent).__module__}.{type(agent).__qualname__}) cannot be sent to other processes: "
                f"{type(error).__name__}: {error}. Give its name instead, 'MODULE:NAME' or 'FILE.py:NAME', of the agent or of a "
                "function without arguments that makes it: it is then made anew on every Ray worker"
            ) from error

    def arrived(self) -> object:
        """Return the agent."""
        return load_agent(self.named) if self.pickled is None else pickle.loads(self.pickled)


@dataclass(frozen=True)
class Outcome:
    """What became of one run of an agent."""

    pickled: bytes | None = None
    """Its output, where that can be pickled."""
    kept: bytes = b"null"
    """Its output as the store would keep it."""
    failed: tuple[str, str] | None = None
    """The exception's type and text, where it failed."""
    unattributed: str | None = None
    """What a CaptureError said: then the set-up is at fault, not the agent."""

    @classmethod
    def of(cls, output: Any) -> Outcome:
        kept = to_json(output)
        try:
            return cls(pickled=cloudpickle.dumps(output), kept=kept)
        except Exception:  # noqa: BLE001 - objects may fail in any way when they are pickled
            return cls(kept=kept)

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        if isinstance(error, CaptureError):
            return cls(unattributed=str(error))
        return cls(failed=(type(error).__name__, str(error)))

    def arrived(self) -> Any:
        """Return the output; raises what the agent raised, as an exception of the same name and text."""
        if self.unattributed is not None:
            raise CaptureError(self.unattributed)
        if self.failed is not None:
            name, text = self.failed
            raise type(name, (AgentFailed,), {})(text)
        if self.pickled is None:
            return from_json(self.kept)
        try:
            return pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - what it is made of may not exist in this process
            return from_json(self.kept)


class AgentFailed(Exception):
    """The base of exceptions that stand here for an agent's own."""
