"""The address at which one model answers, and the calls that were recorded there, in a rollout of the split ``capture``.

Which trajectory a call belongs to turns out much later.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from art_core.capture import ANSWER, Dialect
from art_core.errors import CaptureError
from art_core.plugin_api import API_KEY
from art_core.types import Call, JsonDict, RolloutAddress

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_core import Run
    from art_openpipe.trajectories import Scope, Trajectory

PATH = "/v1/openpipe/chat/completions"
BASE = "/openpipe"  # the suffix of a rollout's base URL for this path
MARK = "art_call"  # the field of a choice with its request's id; together with the choice's index it identifies a call
CAPTURE = "capture"
AGENT = "scope-"
"""Begin of the names by which a call says in which trajectory's block it was made; they are removed when it is trained."""
Key = tuple[str, int]  # a call's request id and choice


def key_of(choice: Choice) -> Key | None:
    """Return the key of the choice's call; None if it has no mark, because another model answered it."""
    request_id = (choice.model_extra or {}).get(MARK)
    return None if not isinstance(request_id, str) else (request_id, choice.index)


scopes: ContextVar[tuple[Scope, ...]] = ContextVar("art_openpipe_scopes", default=())
"""The trajectories' blocks around this code that capture, the innermost last."""


def current_scope() -> Scope | None:
    """Return the innermost block around this code."""
    return next(reversed(scopes.get()), None)


def calling_scope() -> str | None:
    """Return the name of the innermost block."""
    return None if (scope := current_scope()) is None else scope.name


class _AllBut(frozenset):
    """Contains every model except its elements."""

    def __contains__(self, model: object) -> bool:
        return not frozenset.__contains__(self, model)


@dataclass(eq=False)
class Record:
    """Records one model's calls."""

    run: Run
    model: str  # the model name in requests
    base_url: str = ""
    _rollout_id: str = ""

    async def open(self) -> None:
        """Start answering at ``base_url``, each call with the newest weights and its own sampling settings."""
        self._rollout_id = uuid.uuid4().hex
        self.run.store.add_rollout(self._rollout_id, task={"model": self.model}, split=CAPTURE, step=self.run.step)
        self.base_url = await self.run.serving.open(self._rollout_id, newest=True) + BASE
        records.add(self)

    async def close(self) -> None:
        """Stop answering."""
        records.discard(self)
        if self._rollout_id:
            await self.run.serving.close(self._rollout_id)
            self.run.store.touch_rollout(self._rollout_id)

    def address(self) -> RolloutAddress:
        """Return where calls to this model go, by any client; calls to other models go where they are sent."""
        return RolloutAddress(self._rollout_id, self.base_url, API_KEY, self.model, passthrough=_AllBut([self.model]))

    def last(self) -> int:
        """Return the number of the last call so far."""
        return self.run.store.rows("SELECT ifnull(max(seq), 0) FROM calls")[0][0]

    def exchanges(self, agent: str, start: int) -> list[JsonDict]:
        """Return what this agent asked after call number ``start``, without answers that were cut off."""
        query = "SELECT DISTINCT request_id FROM calls WHERE rollout_id = ? AND seq > ? AND instr(agent, ?)"
        made = {request for (request,) in self.run.store.rows(query, [self._rollout_id, start, agent])}
        calls = self.run.store.calls_of(self._rollout_id, made) if made else ()
        whole = (call for call in calls if call.finish_reason != "aborted")
        requests = itertools.groupby(whole, key=lambda call: call.request_id)
        return [_exchange(list(choices), self.model) for _, choices in requests]

    async def find(self, choices: Iterable[Choice], *, strict: bool) -> dict[Key, Call]:
        """Return the recorded calls of the choices. With ``strict``, raises CaptureError if a choice was not recorded."""
        keys = [key_of(choice) for choice in choices]
        if strict and None in keys:
            raise CaptureError(
                "a choice was not answered by the model being trained: another model answered it, or it was built by hand, so "
                "its tokens are unknown and are never guessed. Append choices unchanged, as a client with "
                "model.inference_base_url returned them, and other models' messages as dicts, which are context"
            )
        await self.run.serving.flush()
        recorded = await asyncio.to_thread(self.recorded, {key for key in keys if key})
        if missing := [key for key in keys if key and key not in recorded] if strict else []:
            raise CaptureError(
                f"{len(missing)} choices, such as that of request {missing[0][0]}, are not in the record of this model: they "
                f"were answered by another of your models, or recorded in another run folder than {self.run.run_dir}"
            )
        return recorded

    def recorded(self, keys: set[Key]) -> dict[Key, Call]:
        """Return those calls that this model answered."""
        by_key: dict[Key, Call] = {}
        missing = {request_id for request_id, _ in keys}
        for rollout in reversed(self.run.store.rollouts(split=CAPTURE)):
            if not missing:
                break
            calls = self.run.store.calls_of(rollout.rollout_id, missing)
            by_key |= {(call.request_id, call.choice): call for call in calls}
            missing -= {call.request_id for call in calls}
        return {key: call for key, call in by_key.items() if key in keys}


records: WeakSet[Record] = WeakSet()  # those of all models that answer in this process


def _exchange(calls: Sequence[Call], model: str) -> JsonDict:
    request, prompt = calls[0].request_id, len(calls[0].prompt_ids)
    sampled = sum(len(call.sampled_ids) for call in calls)
    choices = [
        {
            "index": call.choice, "finish_reason": call.finish_reason, MARK: request,
            "message": {"content": None, "refusal": None, **call.response},
        }
        for call in calls
    ]  # fmt: skip
    answer = {
        "id": ANSWER + request, "object": "chat.completion", "created": 0, "model": model, "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }  # fmt: skip
    return {"request": {**calls[0].request, "model": model}, "response": answer}


def copy_calls(record: Record, trajectory: Trajectory, calls: Mapping[Key, Call], rollout_id: str) -> None:
    """Record a trajectory's calls again under its rollout, each once, and set its policy versions."""
    keys = dict.fromkeys(key_of(choice) for choice in trajectory.choices(record.model))
    for call in (own := [calls[key] for key in keys if key in calls]):
        names = [name for name in (call.agent or "").split("/") if not name.startswith(AGENT)]
        record.run.store.record(rollout_id, replace(call, reward=None, agent="/".join(names) or None))
    if versions := [call.policy_version for call in own]:
        trajectory.initial_policy_version, trajectory.final_policy_version = min(versions), max(versions)


class Named(Dialect):
    """Chat completions with the mark in every choice."""

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        return _marked(completion)

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        marked = (_marked(chunk) async for chunk in chunks)
        async with aclosing(super().stream_from_chat(body, marked)) as events:
            async for event in events:
                yield event


def _marked(answer: JsonDict) -> JsonDict:
    request = answer["id"].removeprefix(ANSWER)
    return {**answer, "choices": [{**choice, MARK: request} for choice in answer["choices"]]}
