"""The addresses at which one model answers, and the calls that were made there. Knows nothing about trajectories.

A call is recorded by art's door as it is made, exact ids and all, long before anybody knows which trajectory it will belong to:
in a rollout of the split ``capture``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from art_core.attribution import running
from art_core.errors import CaptureError
from art_core.loop.rollout import API_KEY
from art_core.types import Call, RolloutAddress
from art_openpipe.dialect import BASE, MARK

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_core.loop.run import Run

CAPTURE = "capture"
"""The split of rollouts that hold calls before they belong to a trajectory."""


class Key(NamedTuple):
    """What names a call in a choice."""

    request_id: str
    choice: int


def key_of(choice: Choice) -> Key | None:
    """Return which call the choice is; None where it says nothing: no model of ours answered it."""
    request_id = (choice.model_extra or {}).get(MARK)
    return None if not isinstance(request_id, str) else Key(request_id, choice.index)


class _AllBut(frozenset):
    """The models that are passed through: all, but this one."""

    def __contains__(self, model: object) -> bool:
        return not frozenset.__contains__(self, model)


@dataclass
class Record:
    """Where one model's calls are recorded."""

    run: Run
    model: str
    """The name that is sent."""
    base_url: str = ""
    _open: dict[str, list[Call] | None] = field(default_factory=dict)
    """By address: where its calls are wanted when it is closed."""

    async def open(self) -> None:
        """Answer at ``base_url`` from now on, every call with the newest weights and the sampling that it asks for."""
        self.base_url = await self._opened()

    async def close(self) -> None:
        """End every address."""
        for rollout_id in list(self._open):
            await self._closed(rollout_id)

    async def _opened(self, rollout_id: str | None = None, calls: list[Call] | None = None) -> str:
        rollout_id = rollout_id or uuid.uuid4().hex
        self.run.store.add_rollout(rollout_id, task={"model": self.model}, split=CAPTURE, step=self.run.step)
        base_url = await self.run.serving.open(rollout_id, newest=True)
        self._open[rollout_id] = calls
        return base_url + BASE

    async def _closed(self, rollout_id: str) -> None:
        if rollout_id not in self._open:
            return  # the run was closed meanwhile, and its store with it
        calls = self._open.pop(rollout_id)
        await self.run.serving.close(rollout_id)
        self.run.store.touch_rollout(rollout_id)
        if calls is not None:
            calls += await asyncio.to_thread(self.run.store.calls, rollout_id)

    @asynccontextmanager
    async def scope(self, calls: list[Call]) -> AsyncIterator[str]:
        """Send the block's calls to this model, of whatever client, to an address of their own; add them to ``calls`` at the end.

        Calls to other models go where they went before.
        """
        rollout_id = uuid.uuid4().hex
        base_url = await self._opened(rollout_id, calls)
        address = RolloutAddress(rollout_id, base_url, API_KEY, self.model, passthrough=_AllBut([self.model]))
        try:
            with running(address):
                yield base_url
        finally:
            await self._closed(rollout_id)

    async def find(self, choices: Iterable[Choice], *, strict: bool) -> dict[Key, Call]:
        """Return the recorded calls of the choices. With ``strict``, raises CaptureError for a choice that is none."""
        wanted = [key_of(choice) for choice in choices]
        if strict and None in wanted:
            raise CaptureError(_UNMARKED)
        await self.run.serving.flush()
        found = await asyncio.to_thread(self._find, {key for key in wanted if key})
        missing = [key for key in wanted if key and key not in found]
        if strict and missing:
            raise CaptureError(_NOT_HERE.format(len(missing), missing[0].request_id, self.run.run_dir))
        return found

    def _find(self, wanted: set[Key]) -> dict[Key, Call]:
        found: dict[Key, Call] = {}
        missing = {key.request_id for key in wanted}
        for rollout in reversed(self.run.store.rollouts(split=CAPTURE)):
            if not missing:
                break
            calls = self.run.store.calls_of(rollout.rollout_id, missing)
            found |= {Key(call.request_id, call.choice): call for call in calls}
            missing -= {call.request_id for call in calls}
        return {key: call for key, call in found.items() if key in wanted}


def marked(call: Call) -> Choice:
    """Return a recorded call as the choice that was answered."""
    from openai.types.chat.chat_completion import Choice

    reason = "stop" if call.finish_reason == "aborted" else call.finish_reason
    message = {"content": None, "refusal": None, **call.response}
    fields = {"index": call.choice, "finish_reason": reason, "message": message, MARK: call.request_id}
    return Choice.model_validate(fields)


def copied(run: Run, calls: Sequence[Call], rollout_id: str) -> None:
    """Record calls again as those of one trajectory: the store keeps a rollout's calls together."""
    for call in calls:
        run.store.record(rollout_id, replace(call, reward=None))


_UNMARKED = (
    "a choice in messages_and_choices was not answered by the model that is trained: another model answered it, or it was "
    "built by hand, so its tokens are not known and are never guessed. Append the choice that model.openai_client() (or any "
    "client with model.inference_base_url) returned, as it is; what another model said goes in as a dict, "
    "{'role': 'assistant', 'content': ...}, and is context"
)
_NOT_HERE = (
    "{} choices in messages_and_choices are not in the record of this model, such as that of request {}: another model of yours "
    "answered them, or the run folder was another one then (now: {}). Train the model that sampled them"
)
