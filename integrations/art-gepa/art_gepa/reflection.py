"""The reflector: what it sees of rollouts, and its answers, which are stored so that a resumed search asks nothing twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from art_cli.summary import text_of
from art_core.plugin_api import task_input
from art_core.store import Store
from art_core.types import Call, JsonDict, Trajectory
from art_gepa.components import INSTRUCTIONS, Component, descriptions, instructions

SECONDS = 120
"""Timeout of a question to a model."""
MOST_CHARACTERS = 4000
"""Longer texts are cut before the reflector sees them."""


class Reflector:
    """Asks ``model``, a LiteLLM string or a function ``(prompt) -> text``, and stores each answer with its cost."""

    def __init__(self, model: str | Callable[[Any], str], store: Store) -> None:
        from gepa.lm import LM

        self.name = model if isinstance(model, str) else getattr(model, "__qualname__", type(model).__qualname__)
        self._ask = LM(model, num_retries=3, timeout=SECONDS) if isinstance(model, str) else model
        self._store = store
        self._recorded: dict[str, tuple[str, float]] = {
            key: tuple(it) for key, it in store.meta("reflections", {}).items()
        }
        self._given: dict[str, float] = {}
        """Costs of the answers used since this start, recorded ones included, so that a resumed search stops at the same cost."""
        self.asking = False
        self.failure: Exception | None = None
        """Why the last question failed. GEPA itself would continue and spend rollouts."""

    @property
    def total_cost(self) -> float:
        """The cost of the answers used, in US dollars; 0 for a function."""
        return sum(self._given.values())

    @property
    def answers(self) -> int:
        """Number of answers used."""
        return len(self._given)

    def __call__(self, prompt: str | list[JsonDict]) -> str:
        """Return the answer to a prompt, from the store if an earlier start asked it as many times."""
        key = _digest(json.dumps([self.name, prompt]))
        while key in self._given:  # asked again in this start: another answer may be better
            key = _digest(key)
        if key not in self._recorded:
            self._recorded[key] = self._new_answer(prompt)
            self._store.set_meta("reflections", self._recorded)
        answer, self._given[key] = self._recorded[key]
        return answer

    def _new_answer(self, prompt: str | list[JsonDict]) -> tuple[str, float]:
        before, self.asking = getattr(self._ask, "total_cost", 0.0), True
        try:
            answer = self._ask(prompt)
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError(f"it returned {answer!r:.100}, not a text")
            self.failure = None
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.asking = False
        return answer, getattr(self._ask, "total_cost", 0.0) - before


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def records(component: Component, text: str, trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Return a record with task, conversation, result and feedback for each rollout that showed the component as ``text``."""
    found = []
    for trajectory in trajectories:
        if calls := [call for call in trajectory.calls if _shows(call.request, component, text)]:
            whole = "\n".join(instructions(calls[-1].request))
            record = {
                "Task": task_input(trajectory.task),
                "Conversation": _conversation(calls[-1]),
                "Result": trajectory.output,
                "Feedback": _feedback(trajectory),
            }
            if whole != text:  # the text is a part of them, or describes a tool
                record = {"All instructions": whole, **record}
            found.append({name: _short(value) for name, value in record.items()})
    return found


def shows(trajectory: Trajectory, component: Component, text: str) -> bool:
    """Return whether a call of a rollout showed the component as ``text``."""
    return any(_shows(call.request, component, text) for call in trajectory.calls)


def _shows(request: Mapping[str, Any], component: Component, text: str) -> bool:
    if component.tool:
        return (component.tool, text) in descriptions(request)
    if component.role:
        return any(
            (it.get("role"), it.get("content")) == (component.role, text) for it in request.get("messages") or ()
        )
    return any(text in it for it in instructions(request))


def _conversation(call: Call) -> str:
    """Return the messages that aren't instructions, and the answer."""
    said = [it for it in call.request.get("messages") or () if it.get("role") not in INSTRUCTIONS]
    return "\n".join(f"{message.get('role', 'assistant')}: {text_of(message)}" for message in [*said, call.response])


def _feedback(trajectory: Trajectory) -> str:
    said = [f"reward {trajectory.reward:.3g}" if trajectory.reward is not None else "no reward"]
    said += [f"{name} {value:.3g}" for name, value in trajectory.metrics.items()]
    said += [f"{name}: {text}" for name, text in trajectory.notes.items()]
    return "; ".join([*said, *([f"it failed: {trajectory.error}"] if trajectory.error else [])])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
