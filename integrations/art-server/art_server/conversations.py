"""A stored rollout -> its calls with every message once, the tree that the calls form, and their tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from art_core import Call, Group, Trajectory
from art_core.scoring import advantages
from art_core.store.rollouts import StoredScore
from art_server import responses
from art_server.outcome import evaluations_of
from art_server.plain import numbers, plain, readable
from art_server.reading import STORE, number, state_of, trajectory_fields
from art_server.store_view import RolloutFilter, RolloutRow, StoreView, read_snapshot
from art_server.token_texts import MAX_TOKENS_PER_CHARACTER, TokenTexts, tokenizer_file

MAX_CALLS = 500
"""Calls of a rollout that are shown."""
CANDIDATES = 32
"""Earlier calls, newest first, that are considered as a call's parent."""
MAX_GROUP = 4096


class Distinct:
    """A list of distinct values."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._indexes: dict[str, int] = {}

    def index(self, value: Any) -> int:
        """Return the index of ``value``, which is appended if it is new."""
        item = plain(value)
        key = json.dumps(item, sort_keys=True)
        if key not in self._indexes:
            self._indexes[key] = len(self.items)
            self.items.append(item)
        return self._indexes[key]


def trajectory(folder: Path, rollout_id: str) -> responses.Trajectory | None:
    """Return a rollout with all its messages; None if it doesn't exist."""

    def read(view: StoreView) -> responses.Trajectory | None:
        rollout = view.rollout(rollout_id)
        if rollout is None:
            return None
        all_calls = view.calls(rollout_id)
        calls = all_calls[:MAX_CALLS]
        messages, tools = Distinct(), Distinct()
        by_call = call_advantages(view, rollout, len(all_calls))
        parents = _parents(calls)
        call_list = [
            _call(index, call, by_call[index], parents[index], messages, tools) for index, call in enumerate(calls)
        ]
        return responses.Trajectory(
            **trajectory_fields(rollout),
            evaluation=evaluations_of(view.meta("evaluations")).get(rollout_id),
            output=plain(rollout.stored.output),
            notes=_notes(rollout.stored.notes),
            scores=[_score(score) for score in view.scores(rollout_id)],
            messages=messages.items,
            tools=tools.items,
            call_list=call_list,
            omitted_calls=len(all_calls) - len(calls),
        )

    return read_snapshot(folder / STORE, read)


def tokens(
    folder: Path, rollout_id: str, index: int, *, texts: TokenTexts, prompt: int, limit: int, offset: int
) -> responses.Tokens | None:
    """Return the tokens that a call sampled, and the last ``prompt`` tokens of its prompt; None if the call doesn't exist."""

    def read(view: StoreView) -> tuple[Call, float | None, Any] | None:
        rollout = view.rollout(rollout_id)
        calls = view.calls(rollout_id) if rollout else ()
        if rollout is None or index >= len(calls):
            return None
        return calls[index], call_advantages(view, rollout, len(calls))[index], view.meta("model")

    call_data = read_snapshot(folder / STORE, read)
    if call_data is None:
        return None
    call, advantage, model = call_data
    file = tokenizer_file(folder, model if isinstance(model, str) else None)
    prompt_ids = call.prompt_ids[len(call.prompt_ids) - prompt :] if prompt < len(call.prompt_ids) else call.prompt_ids
    page, forced = slice(offset, offset + limit), set(call.forced)
    # From the start, and a little beyond the page, so that characters at its borders are decoded correctly.
    sampled_texts = texts.texts(file, call.sampled_ids[: offset + limit + MAX_TOKENS_PER_CHARACTER])[page]
    return responses.Tokens(
        index=index,
        policy_version=call.policy_version,
        advantage=number(advantage),
        tokenizer=file is not None and None not in sampled_texts,
        prompt_total=len(call.prompt_ids),
        prompt=[
            responses.Token(id=token, text=text, logprob=None, forced=False)
            for token, text in zip(prompt_ids, texts.texts(file, prompt_ids), strict=True)
        ],
        total=len(call.sampled_ids),
        offset=offset,
        sampled=[
            responses.Token(id=token, text=text, logprob=number(logprob), forced=position in forced)
            for position, token, text, logprob in zip(
                range(offset, offset + limit), call.sampled_ids[page], sampled_texts, call.logprobs[page], strict=False
            )
        ],
    )


def call_advantages(view: StoreView, rollout: RolloutRow, count: int) -> list[float | None]:
    """Return the advantage of each of ``count`` calls: the trajectory's, unless the calls of its group have their own."""
    of_trajectory: list[float | None] = [rollout.stored.advantage] * count
    rollout_id, group = rollout.stored.rollout_id, rollout.stored.group
    how = (view.meta("config") or {}).get("advantage", "mean_std")
    rewarded = any(reward is not None for _, reward in view.call_rewards([rollout_id])[rollout_id])
    if group is None or not (rewarded or how == "branch"):
        return of_trajectory
    _, members = view.rollouts(RolloutFilter(group=group), limit=MAX_GROUP, offset=0, order="oldest")
    counted = [member.stored for member in members if member.scored and state_of(member) != "lost"]
    ids = [stored.rollout_id for stored in counted]
    if rollout_id not in ids:
        return of_trajectory
    calls = {each: view.calls(each) for each in ids} if how == "branch" else _rewarded(view.call_rewards(ids))
    trajectories = tuple(Trajectory(task=None, reward=it.reward, calls=calls[it.rollout_id]) for it in counted)
    scored = advantages(Group(task=None, trajectories=trajectories), how)
    return list(scored.call_advantages[ids.index(rollout_id)]) if scored.call_advantages else of_trajectory


def _rewarded(rewards: Mapping[str, Sequence[tuple[str | None, float | None]]]) -> dict[str, tuple[Call, ...]]:
    """Return calls with nothing but these agents and rewards, by rollout: reading their tokens would take long."""
    bare = functools.partial(Call, prompt_ids=(0,), sampled_ids=(), logprobs=())
    return {name: tuple(bare(agent=agent, reward=reward) for agent, reward in found) for name, found in rewards.items()}


def _notes(notes: dict[str, Any]) -> dict[str, str]:
    return {readable(str(name)): readable(str(text)) for name, text in notes.items()}


def _score(score: StoredScore) -> responses.Score:
    return responses.Score(
        reward=number(score.reward),
        metrics=numbers(score.metrics),
        notes=_notes(score.notes),
        advantage=number(score.advantage),
        by=None if score.by is None else readable(score.by),
        at=score.at,
        aside=score.aside,
    )


def _call(
    index: int,
    call: Call,
    advantage: float | None,
    parent: tuple[int | None, int, bool],
    messages: Distinct,
    tools: Distinct,
) -> responses.CallView:
    *prompt, answer = call.messages()
    request = {key: value for key, value in call.request.items() if key not in ("messages", "tools", "prompt")}
    parent_index, shared, continues = parent
    prompt_tokens, sampled_tokens = call.token_counts() or (0, 0)
    return responses.CallView(
        index=index,
        agent=None if call.agent is None else readable(call.agent),
        thread=None if call.thread is None else readable(call.thread),
        policy_version=call.policy_version,
        request_id=readable(call.request_id),
        choice=call.choice,
        finish_reason=call.finish_reason,
        temperature=call.temperature,
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled_tokens,
        forced_tokens=len(call.forced),
        mean_logprob=number(float(np.mean(call.logprobs))) if call.logprobs else None,
        reward=number(call.reward),
        advantage=number(advantage),
        parent=parent_index,
        shared_tokens=shared,
        continues=continues,
        messages=[messages.index(message) for message in prompt],
        answer=messages.index(answer),
        tools=tools.index(call.request["tools"]) if call.request.get("tools") else None,
        request=plain(request),
    )


def _parents(calls: Sequence[Call]) -> list[tuple[int | None, int, bool]]:
    """Return for every call: the earlier call with the longest common prefix, its length, and whether it is all its tokens."""
    sequences: list[np.ndarray] = []
    parents: list[tuple[int | None, int, bool]] = []
    for index, call in enumerate(calls):
        prompt = np.asarray(call.prompt_ids, dtype=np.int64)
        best: tuple[int | None, int, bool] = (None, 0, False)
        for earlier in range(index - 1, max(-1, index - 1 - CANDIDATES), -1):
            shared = _shared(sequences[earlier], prompt)
            if shared > best[1]:
                best = (earlier, shared, shared == len(sequences[earlier]))
        parents.append(best)
        sequences.append(np.concatenate([prompt, np.asarray(call.sampled_ids, dtype=np.int64)]))
    return parents


def _shared(earlier: np.ndarray, prompt: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(earlier), len(prompt))
    differences = np.flatnonzero(earlier[:length] != prompt[:length])
    return int(differences[0]) if len(differences) else length
