"""The addresses at which one model answers, and the calls that were recorded there.

A call is recorded when it is made, with its exact token ids, in a rollout of the split ``capture``; which trajectory it belongs
to turns out much later.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from art_core.errors import CaptureError
from art_core.plugin_api import API_KEY, inside_rollout
from art_core.types import Call, RolloutAddress
from art_openpipe.dialect import BASE, MARK

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_core import Run

CAPTURE = "capture"
"""The split of rollouts with calls that do not belong to a trajectory yet."""


class Key(NamedTuple):
    """Identifies a call."""

    request_id: str
    choice: int


def key_of(choice: Choice) -> Key | None:
    """Return the key of the choice's call; None if it has no mark, because another model answered it."""
    request_id = (choice.model_extra or {}).get(MARK)
    return None if not isinstance(request_id, str) else Key(request_id, choice.index)


class _AllBut(frozenset):
    """Contains every model except its elements."""

    def __contains__(self, model: object) -> bool:
        return not frozenset.__contains__(self, model)


@dataclass
class Record:
    """Records one model's calls."""

    run: Run
    model: str
    """The model name in requests."""
    base_url: str = ""
    _open: dict[str, list[Call] | None] = field(default_factory=dict)
    """Rollout id of each open address -> the list that receives its calls when it is closed, if any."""

    async def open(self) -> None:
        """Start answering at ``base_url``, each call with the newest weights and its own sampling settings."""
        self.base_url = await self._opened()

    async def close(self) -> None:
        """Close every address."""
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
            return  # the run and its store have been closed meanwhile
        calls = self._open.pop(rollout_id)
        await self.run.serving.close(rollout_id)
        self.run.store.touch_rollout(rollout_id)
        if calls is not None:
            calls += await asyncio.to_thread(self.run.store.calls, rollout_id)

    @asynccontextmanager
    async def scope(self, calls: list[Call]) -> AsyncIterator[str]:
        """Redirect the block's calls to this model, by any client, to a new address; append them to ``calls`` at the end.

        Calls to other models are not redirected.
        """
        rollout_id = uuid.uuid4().hex
        base_url = await self._opened(rollout_id, calls)
        address = RolloutAddress(rollout_id, base_url, API_KEY, self.model, passthrough=_AllBut([self.model]))
        try:
            with inside_rollout(address):
                yield base_url
        finally:
            await self._closed(rollout_id)

    async def find(self, choices: Iterable[Choice], *, strict: bool) -> dict[Key, Call]:
        """Return the recorded calls of the choices. With ``strict``, raises CaptureError if a choice was not recorded."""
        keys = [key_of(choice) for choice in choices]
        if strict and None in keys:
            raise CaptureError(_UNMARKED)
        await self.run.serving.flush()
        recorded = await asyncio.to_thread(self._find, {key for key in keys if key})
        missing = [key for key in keys if key and key not in recorded]
        if strict and missing:
            raise CaptureError(_NOT_HERE.format(len(missing), missing[0].request_id, self.run.run_dir))
        return recorded

    def _find(self, keys: set[Key]) -> dict[Key, Call]:
        by_key: dict[Key, Call] = {}
        missing = {key.request_id for key in keys}
        for rollout in reversed(self.run.store.rollouts(split=CAPTURE)):
            if not missing:
                break
            calls = self.run.store.calls_of(rollout.rollout_id, missing)
            by_key |= {Key(call.request_id, call.choice): call for call in calls}
            missing -= {call.request_id for call in calls}
        return {key: call for key, call in by_key.items() if key in keys}


def marked(call: Call) -> Choice:
    """Return a recorded call as the choice with which it was answered."""
    from openai.types.chat.chat_completion import Choice

    reason = "stop" if call.finish_reason == "aborted" else call.finish_reason
    message = {"content": None, "refusal": None, **call.response}
    fields = {"index": call.choice, "finish_reason": reason, "message": message, MARK: call.request_id}
    return Choice.model_validate(fields)


def copy_calls(run: Run, calls: Sequence[Call], rollout_id: str) -> None:
    """Record calls again under the rollout of their trajectory."""
    for call in calls:
        run.store.record(rollout_id, replace(call, reward=None))


_UNMARKED = (
    "a choice in messages_and_choices was not answered by the model being trained: another model answered it, or it was built by "
    "hand, so its tokens are unknown and are never guessed. Append the choice unchanged as model.openai_client() (or any client "
    "with model.inference_base_url) returned it; append other models' messages as dicts, {'role': 'assistant', 'content': ...}, "
    "which are context"
)
_NOT_HERE = (
    "{} choices in messages_and_choices are not in the record of this model, for example that of request {}: another of your "
    "models answered them, or they were recorded in a different run folder (now: {}). Train the model that sampled them"
)
