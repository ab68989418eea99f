"""A stored run of the agent -> its calls with every message once, the tree that they form, and their tokens.

Knows nothing about HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from art_core import Call, Group
from art_core import Trajectory as Run
from art_core.scoring import advantages
from art_server import answers
from art_server.outcome import evaluations_of
from art_server.plain import numbers, plain, readable
from art_server.reading import STORE, number, state_of, trajectory_fields
from art_server.store_view import SeenRollout, StoreView, Wanted, look
from art_server.token_texts import LONGEST, TokenTexts, tokenizer_file

MOST_CALLS = 500
"""Of one run of the agent that are shown."""
CANDIDATES = 32
"""Earlier calls that are tried as the one which a call continues, the newest first."""
LARGEST_GROUP = 4096


class Told:
    """Values, each once, and where they stand."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        shown = plain(value)
        key = json.dumps(shown, sort_keys=True)
        if key not in self._places:
            self._places[key] = len(self.items)
            self.items.append(shown)
        return self._places[key]


def trajectory(folder: Path, rollout_id: str) -> answers.Trajectory | None:
    """Return a run of the agent with all that was said in it; None where there is none."""

    def ask(view: StoreView) -> answers.Trajectory | None:
        seen = view.rollout(rollout_id)
        if seen is None:
            return None
        calls = view.calls(rollout_id)
        shown = calls[:MOST_CALLS]
        messages, tools = Told(), Told()
        given = call_advantages(view, seen, len(calls))
        parents = _parents(shown)
        listed = [_call(index, call, given[index], parents[index], messages, tools) for index, call in enumerate(shown)]
        return answers.Trajectory(
            **trajectory_fields(seen),
            evaluation=evaluations_of(view.meta("evaluations")).get(rollout_id),
            output=plain(seen.rollout.output),
            notes=_notes(seen.rollout.notes),
            scores=[_score(it) for it in view.scores(rollout_id)],
            messages=messages.items,
            tools=tools.items,
            call_list=listed,
            omitted_calls=len(calls) - len(shown),
        )

    return look(folder / STORE, ask)


def tokens(
    folder: Path, rollout_id: str, index: int, *, texts: TokenTexts, prompt: int, limit: int, offset: int
) -> answers.Tokens | None:
    """Return the tokens that a call sampled, and the last ones that it was shown; None where there is no such call."""

    def ask(view: StoreView) -> tuple[Call, float | None, Any] | None:
        seen = view.rollout(rollout_id)
        calls = view.calls(rollout_id) if seen else ()
        if seen is None or index >= len(calls):
            return None
        return calls[index], call_advantages(view, seen, len(calls))[index], view.meta("model")

    found = look(folder / STORE, ask)
    if found is None:
        return None
    call, advantage, model = found
    file = tokenizer_file(folder, model if isinstance(model, str) else None)
    shown = call.prompt_ids[len(call.prompt_ids) - prompt :] if prompt < len(call.prompt_ids) else call.prompt_ids
    part, forced = slice(offset, offset + limit), set(call.forced)
    # From the beginning and a little further, so that a character which the page cuts in two is not lost.
    said = texts.texts(file, call.sampled_ids[: offset + limit + LONGEST])[part]
    return answers.Tokens(
        index=index,
        policy_version=call.policy_version,
        advantage=number(advantage),
        tokenizer=file is not None and None not in said,
        prompt_total=len(call.prompt_ids),
        prompt=[
            answers.Token(id=token, text=text, logprob=None, forced=False)
            for token, text in zip(shown, texts.texts(file, shown), strict=True)
        ],
        total=len(call.sampled_ids),
        offset=offset,
        sampled=[
            answers.Token(id=token, text=text, logprob=number(logprob), forced=place in forced)
            for place, token, text, logprob in zip(
                range(offset, offset + limit), call.sampled_ids[part], said, call.logprobs[part], strict=False
            )
        ],
    )


def call_advantages(view: StoreView, seen: SeenRollout, count: int) -> list[float | None]:
    """Return the advantage of every call: its trajectory's, or its own where calls of the group have rewards of their own."""
    own: list[float | None] = [seen.rollout.advantage] * count
    rollout_id, group = seen.rollout.rollout_id, seen.rollout.group
    if group is None or all(reward is None for _, reward in view.call_rewards([rollout_id])[rollout_id]):
        return own
    _, members = view.rollouts(Wanted(group=group), limit=LARGEST_GROUP, offset=0, newest_first=False)
    counted = [it.rollout for it in members if it.scored and state_of(it) != "lost"]
    if rollout_id not in [it.rollout_id for it in counted]:
        return own
    rewards = view.call_rewards([it.rollout_id for it in counted])
    runs = [
        Run(task=None, reward=it.reward, calls=tuple(_rewarded(*of) for of in rewards[it.rollout_id])) for it in counted
    ]
    how = (view.meta("config") or {}).get("advantage", "mean_std")
    scored = advantages(Group(task=None, trajectories=tuple(runs)), how)
    place = [it.rollout_id for it in counted].index(rollout_id)
    return list(scored.call_advantages[place]) if scored.call_advantages else own


def _rewarded(agent: str | None, reward: float | None) -> Call:
    return Call(prompt_ids=(0,), sampled_ids=(), logprobs=(), agent=agent, reward=reward)


def _notes(notes: dict[str, Any]) -> dict[str, str]:
    return {readable(str(name)): readable(str(text)) for name, text in notes.items()}


def _score(it: Any) -> answers.Score:
    return answers.Score(
        reward=number(it.reward),
        metrics=numbers(it.metrics),
        notes=_notes(it.notes),
        advantage=number(it.advantage),
        by=None if it.by is None else readable(it.by),
        at=it.at,
        aside=it.aside,
    )


def _call(
    index: int, call: Call, advantage: float | None, parent: tuple[int | None, int, bool], messages: Told, tools: Told
) -> answers.CallView:
    *shown, answer = call.messages()
    request = {key: value for key, value in call.request.items() if key not in ("messages", "tools", "prompt")}
    before, shared, continues = parent
    return answers.CallView(
        index=index,
        agent=None if call.agent is None else readable(call.agent),
        thread=None if call.thread is None else readable(call.thread),
        policy_version=call.policy_version,
        request_id=readable(call.request_id),
        choice=call.choice,
        finish_reason=call.finish_reason,
        temperature=call.temperature,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        forced_tokens=len(call.forced),
        mean_logprob=number(float(np.mean(call.logprobs))) if call.logprobs else None,
        reward=number(call.reward),
        advantage=number(advantage),
        parent=before,
        shared_tokens=shared,
        continues=continues,
        messages=[messages.place(it) for it in shown],
        answer=messages.place(answer),
        tools=tools.place(call.request["tools"]) if call.request.get("tools") else None,
        request=plain(request),
    )


def _parents(calls: Sequence[Call]) -> list[tuple[int | None, int, bool]]:
    """Return for every call (the earlier call with which its prompt agrees longest, for how many tokens, for all of it)."""
    whole: list[np.ndarray] = []
    found: list[tuple[int | None, int, bool]] = []
    for index, call in enumerate(calls):
        prompt = np.asarray(call.prompt_ids, dtype=np.int64)
        best: tuple[int | None, int, bool] = (None, 0, False)
        for earlier in range(index - 1, max(-1, index - 1 - CANDIDATES), -1):
            shared = _shared(whole[earlier], prompt)
            if shared > best[1]:
                best = (earlier, shared, shared == len(whole[earlier]))
        found.append(best)
        whole.append(np.concatenate([prompt, np.asarray(call.sampled_ids, dtype=np.int64)]))
    return found


def _shared(earlier: np.ndarray, prompt: np.ndarray) -> int:
    length = min(len(earlier), len(prompt))
    differ = np.flatnonzero(earlier[:length] != prompt[:length])
    return int(differ[0]) if len(differ) else length
