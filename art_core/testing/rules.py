"""The rules of an adapter, one function each: what was seen -> what is wrong with it, in words. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from art_core.testing.fakes import OPEN, prompt_ids, render
from art_core.testing.provider import Asked, masked
from art_core.testing.script import marks
from art_core.types import Call, JsonDict, Trajectory

ASKED = (
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "stop",
    "n",
    "stream",
    "max_tokens",
    "max_completion_tokens",
)
"""Of a request: what redirecting must not change. Sampling settings are the run's own affair."""


def untouched(before: Sequence[Asked], after: Sequence[Asked]) -> list[str]:
    """Outside a rollout the same is on the wire as without the plugin."""
    if not after:
        return [
            "with no rollout around it the agent asked nothing at the base_url that make(base_url) was given: build the "
            "agent so that its calls go there, or nothing can be compared"
        ]
    headers = {name for asked in after for name, _ in asked.headers if name.startswith("x-art")}
    found = []
    if headers:
        found.append(f"a call outside a rollout carries {', '.join(sorted(headers))}: add such headers inside one only")
    if Counter(before) != Counter(after):
        found.append(
            f"outside a rollout the wire has changed since redirect_clients: {len(before)} requests before, {len(after)} "
            f"after, first difference: {_difference(before, after)}; where art_core.destination(model) is None, call the "
            "original with its own arguments"
        )
    return found


def _difference(before: Sequence[Asked], after: Sequence[Asked]) -> str:
    left, right = Counter(before) - Counter(after), Counter(after) - Counter(before)
    return f"{next(iter(left), 'nothing')!r:.300} became {next(iter(right), 'nothing')!r:.300}"


def redirected(leaked: int, trajectories: Sequence[Trajectory]) -> list[str]:
    """Inside a rollout nothing goes where the agent sends it, or would go there if it were not refused."""
    missed = leaked + sum(sum(it.unrecorded.get("refused", {}).values()) for it in trajectories)
    if not missed:
        return []
    return [
        f"{missed} model calls of rollouts were not redirected: redirect_clients must wrap every way in which the framework "
        "asks a model, and send it to art_core.destination(model).base_url"
    ]


def asked_the_same(plain: Sequence[JsonDict], trajectory: Trajectory) -> list[str]:
    """The policy is asked what the provider would have been asked, as often."""
    requests = {call.request_id: call.request for call in trajectory.calls}
    if len(plain) != len(requests):
        return [
            f"a run made {len(plain)} model calls with a plain server, and {len(requests)} were recorded in a rollout: "
            "every call must arrive at the rollout's address once"
        ]
    there, here = (Counter(map(_shown, asked)) for asked in (plain, requests.values()))
    if there != here:
        lost, new = next(iter(there - here)), next(iter(here - there))
        return [
            f"the policy was asked something else than a plain server: {lost:.400} became {new:.400}; redirect calls, do "
            "not rewrite them"
        ]
    return []


def _shown(request: Any) -> str:
    # null and absent say the same, and streams may be asked for their usage.
    shown = {key: request[key] for key in ASKED if request.get(key) not in (None, False)}
    return masked(json.dumps(shown, sort_keys=True))


def recorded_once(answered: int, trajectories: Sequence[Trajectory]) -> list[str]:
    """Calls recorded are calls answered."""
    recorded = len({(t.rollout_id, call.request_id) for t in trajectories for call in t.calls})
    if recorded == answered:
        return []
    return [
        f"the engine answered {answered} calls and {recorded} were recorded in the runs' trajectories: wait for every call "
        "before the run returns, and send a new x-art-request-id with every call, the same one with a retry only"
    ]


def ledger(trajectory: Trajectory, logprob: float) -> list[str]:
    """Prompt ids, sampled ids and logprobs are the engine's, complete and in line."""
    found = []
    for number, call in enumerate(trajectory.calls, start=1):
        what = f"call {number} of the run of {trajectory.task!r}"
        if call.finish_reason == "aborted":
            found.append(f"{what} was cut off: read every stream to its end before the run returns")
        elif list(call.prompt_ids) != prompt_ids(call.request):
            found.append(f"{what}: its prompt ids are not those of its request")
        elif list(call.sampled_ids) != list(render(call.response)[len(OPEN) :]):
            found.append(f"{what}: its {len(call.sampled_ids)} sampled ids are not those of its answer")
        elif call.logprobs != (logprob,) * len(call.sampled_ids):
            found.append(f"{what}: its logprobs are not the engine's, one for each of {len(call.sampled_ids)} ids")
    return found


def apart(overlapped: bool, trajectories: Sequence[Trajectory]) -> list[str]:
    """Concurrent runs know nothing of each other."""
    found = []
    if not overlapped and len(trajectories) > 1:
        found.append(
            f"{len(trajectories)} runs took turns, so nothing is known about runs at the same time: the adapter must await "
            "the agent, or run a blocking one in a thread"
        )
    for trajectory in trajectories:
        own = marks(trajectory.task)
        shown = marks([[call.request.get("messages"), dict(call.response)] for call in trajectory.calls])
        returned = marks(repr(trajectory.output))
        if trajectory.calls and not own & shown:
            found.append(f"no call of the run of {trajectory.task!r} shows its task: pass the input on to the agent")
        if others := sorted(shown - own):
            found.append(
                f"the run of {trajectory.task!r} has calls of others ({', '.join(others)}): ask art_core.destination at "
                "every call, and keep nothing about a rollout in the plugin, the client or the agent"
            )
        if others := sorted(returned - own):
            found.append(f"the run of {trajectory.task!r} returned what belongs to others ({', '.join(others)})")
    return found[:3]


def same_result(output: Any, error: str | None, trajectories: Sequence[Trajectory]) -> list[str]:
    """An agent gives in a rollout what it gives with a plain server that sends the same answers."""
    if error is not None:
        return [f"with a plain server the agent fails: {error}; give an agent that works there"]
    failed = [trajectory for trajectory in trajectories if trajectory.error]
    if failed:
        return [f"{len(failed)} of {len(trajectories)} runs failed in a rollout; the first said: {failed[0].error}"]
    there, here = masked(repr(output)), masked(repr(trajectories[0].output))
    if output != trajectories[0].output and there != here:
        return [
            f"the agent returned {here:.300} in a rollout and {there:.300} with a plain server that sent the same answers: "
            "return the agent's result as it is (to_output= leaves out what has random ids or times in it)"
        ]
    return []


def failure_is_data(
    what: str, expected: str | None, trajectories: Sequence[Trajectory], renamed: Mapping[str, str] | None = None
) -> list[str]:
    """What an agent raises is in ``Trajectory.error``, with its type, or with what ``renamed`` has for it."""
    if expected is None:
        return [
            f"{what} did not make the run fail: it returned a result where it had to raise; the adapter must let the "
            "agent's exceptions through"
        ]
    kind = expected.partition(":")[0]
    kind = (renamed or {}).get(kind, kind)
    others = [t for t in trajectories if t.error is None or t.error.partition(":")[0] != kind]
    if others:
        return [
            f"{what} raises {kind} with a plain server, and Trajectory.error was {others[0].error!r} in a rollout: the "
            "adapter must let the agent's exceptions through as they are"
        ]
    return []


def of_kind(kind: str, trajectory: Trajectory, names: Collection[str]) -> list[str]:
    """An agent of a kind did what its kind is about; else its column would say nothing."""
    calls = trajectory.calls
    if kind == "stream" and not any(call.request.get("stream") for call in calls):
        return ["no call was streamed: the agent must stream, and the adapter must leave stream=true as it is"]
    if kind == "tools":
        return _tools(calls)
    if kind == "structured output" and not any(map(_structured, calls)):
        return ["no call asked for a schema: neither response_format nor a forced tool_choice was recorded"]
    if kind == "nested agents":
        return _nested(calls, names)
    return []


def off_the_loop(kind: str, threads: int | None) -> list[str]:
    """An agent that blocks, or has threads, called from ``threads`` beside the event loop's; None is not known."""
    if kind == "sync" and threads == 0:
        return [
            "every call was made on the event loop's thread: give an agent that calls the model blocking, and have the "
            "adapter run it in a thread"
        ]
    if kind == "threads" and threads is not None and threads < 2:
        return [
            f"calls were made from {threads} threads beside the event loop's: the agent must call from two at least, which "
            "it starts in its run"
        ]
    return []


def _structured(call: Call) -> bool:
    choice = call.request.get("tool_choice")
    return bool(call.request.get("response_format")) or isinstance(choice, dict) or choice in ("required", "any")


def _tools(calls: Sequence[Call]) -> list[str]:
    first = next((call for call in calls if call.response.get("tool_calls")), None)
    if first is None:
        return ["the model was offered no tool, so it called none: give an agent with a tool"]
    shown = [call for call in calls if any(message.get("role") == "tool" for message in call.request["messages"])]
    if not shown:
        return ["no call shows the result of a tool to the model: the agent must ask again after the tool has run"]
    path = first.prompt_ids + first.sampled_ids
    if not any(call.prompt_ids[: len(path)] == path for call in shown):
        return [
            "the prompt after a tool call does not extend the tokens before it: the model's message came back changed, so "
            "each call would be trained as a history of its own"
        ]
    return []


def _nested(calls: Sequence[Call], names: Collection[str]) -> list[str]:
    if len(calls) < 2:
        return [f"{len(calls)} calls were recorded: an agent in an agent makes at least two"]
    seen = {call.agent for call in calls}
    if not set(names) <= seen:
        return [
            f"Call.agent shows {sorted(map(str, seen))}, and {sorted(names)} were expected: tell the calling agent's name "
            "with art_core.name_agents(source) in redirect_clients"
        ]
    return []
