"""The rules for adapters. Each function checks one rule and yields every violation as a sentence that names the fix."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from art_core.testing.fakes import OPEN, prompt_ids, render
from art_core.testing.provider import ProviderRequest, marks, masked
from art_core.types import Call, JsonDict, Trajectory

UNCHANGED = (
    "messages", "tools", "tool_choice", "response_format", "stop", "n", "stream", "max_tokens", "max_completion_tokens",
)  # fmt: skip
"""What redirecting must not change in a request. Sampling settings are set by the run."""


def untouched(before: Sequence[ProviderRequest], after: Sequence[ProviderRequest]) -> Iterator[str]:
    """Outside a rollout, requests are the same as without the plugin."""
    if not after:
        yield (
            "outside a rollout the agent sent no request to the base_url passed to make(base_url), so nothing can be "
            "compared: build the agent so that its calls go there"
        )
        return
    headers = {name for request in after for name, _ in request.headers if name.startswith("x-art")}
    if headers:
        yield f"a call outside a rollout carries {', '.join(sorted(headers))}: add these headers only inside a rollout"
    if Counter(before) != Counter(after):
        removed, added = Counter(before) - Counter(after), Counter(after) - Counter(before)
        yield (
            f"outside a rollout, requests have changed since redirect_clients: {len(before)} before, {len(after)} after, first "
            f"difference: {next(iter(removed), 'nothing')!r:.300} became {next(iter(added), 'nothing')!r:.300}; if "
            "art_core.destination(model) is None, call the original with its own arguments"
        )


def leaves_others_alone(adapt_agent: Callable[..., object]) -> Iterator[str]:
    """``adapt_agent`` returns None for agents of other frameworks."""
    for agent in (object(), lambda task: task):
        told = {"agent": agent, "shared": False}
        if adapt_agent(**{name: told[name] for name in inspect.signature(adapt_agent).parameters}) is not None:
            yield (
                f"adapt_agent adapts {agent!r}, which is no agent of the framework: return None unless the agent is an instance "
                "of the framework's own class, because other plugins aren't asked after yours"
            )


def redirected(leaked: int, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """Inside a rollout, no call goes to the agent's own address, even if it is refused there."""
    if missed := leaked + sum(sum(t.unrecorded.get("refused", {}).values()) for t in trajectories):
        yield (
            f"{missed} model calls of rollouts were not redirected: redirect_clients must wrap every way in which the "
            "framework calls a model, and send the call to art_core.destination(model).base_url"
        )


def same_requests(plain: Sequence[JsonDict], trajectory: Trajectory) -> Iterator[str]:
    """The policy gets the same requests as a plain provider."""
    recorded = {call.request_id: call.request for call in trajectory.calls}
    if len(plain) != len(recorded):
        yield (
            f"the agent made {len(plain)} model calls with a plain provider, but {len(recorded)} were recorded in a rollout: "
            "every call must reach the rollout's address exactly once"
        )
        return
    expected, actual = (Counter(map(_comparable, requests)) for requests in (plain, recorded.values()))
    if expected != actual:
        yield (
            f"the policy got another request than a plain provider: {next(iter(expected - actual)):.400} became "
            f"{next(iter(actual - expected)):.400}; redirect calls, don't rewrite them"
        )


def _comparable(request: Any) -> str:
    # A null is the same as a missing key, and streams may also request their usage.
    return masked(json.dumps({k: request[k] for k in UNCHANGED if request.get(k) not in (None, False)}, sort_keys=True))


def recorded_once(answered: int, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """Every call that was answered is recorded."""
    recorded = len({(t.rollout_id, call.request_id) for t in trajectories for call in t.calls})
    if recorded != answered:
        yield (
            f"the engine answered {answered} calls, but {recorded} were recorded in the rollouts: await every call before the "
            "agent returns, and send a new x-art-request-id with every call, the same one only with a retry"
        )


def ledger(trajectory: Trajectory, logprob: float) -> Iterator[str]:
    """Prompt ids, sampled ids and logprobs are complete and are the engine's."""
    for number, call in enumerate(trajectory.calls, start=1):
        what = f"call {number} of the rollout of {trajectory.task!r}"
        if call.finish_reason == "aborted":
            yield f"{what} was cut off: read every stream to its end before the agent returns"
        elif list(call.prompt_ids) != prompt_ids(call.request):
            yield f"{what}: its prompt ids are not those of its request"
        elif list(call.sampled_ids) != list(render(call.response)[len(OPEN) :]):
            yield f"{what}: its {len(call.sampled_ids)} sampled ids are not those of its answer"
        elif call.logprobs != (logprob,) * len(call.sampled_ids):
            yield f"{what}: its logprobs are not the engine's, one for each of {len(call.sampled_ids)} ids"


def isolated(overlapped: bool, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """Concurrent rollouts don't share data."""
    if not overlapped and len(trajectories) > 1:
        yield (
            f"{len(trajectories)} rollouts took turns, so concurrent ones can't be checked: the adapter must await the agent, "
            "or run a blocking one in a thread"
        )
    for trajectory in trajectories:
        rollout = f"the rollout of {trajectory.task!r}"
        own = marks(trajectory.task)
        shown = marks([[call.request.get("messages"), dict(call.response)] for call in trajectory.calls])
        if trajectory.calls and not own & shown:
            yield f"no call of {rollout} shows its task: pass the input on to the agent"
        if others := sorted(shown - own):
            yield (
                f"{rollout} has calls of other rollouts ({', '.join(others)}): call art_core.destination for every model "
                "call, and keep nothing about a rollout in the plugin, the client or the agent"
            )
        if others := sorted(marks(repr(trajectory.output)) - own):
            yield f"{rollout} returned data of other rollouts ({', '.join(others)})"


def same_result(output: Any, error: str | None, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """In a rollout an agent returns the same as with a plain provider that sends the same answers."""
    failed = [trajectory for trajectory in trajectories if trajectory.error]
    expected, actual = masked(repr(output)), masked(repr(trajectories[0].output))
    if error is not None:
        yield f"with a plain provider the agent fails: {error}; pass an agent that works there"
    elif failed:
        yield f"{len(failed)} of {len(trajectories)} agents failed in a rollout, the first with: {failed[0].error}"
    elif output is None:
        yield "the agent returned None, so results can't be compared: run(input, address) must return the agent's result"
    elif output != trajectories[0].output and expected != actual:
        yield (
            f"the agent returned {actual:.300} in a rollout and {expected:.300} with a plain provider that sent the same "
            "answers: return the agent's result unchanged (to_output= leaves out random ids and times)"
        )


def failure_is_data(
    what: str, expected: str | None, trajectories: Sequence[Trajectory], renamed: Mapping[str, str] | None = None
) -> Iterator[str]:
    """``Trajectory.error`` has the type of exception that the agent raises, or its replacement in ``renamed``."""
    if expected is None:
        yield (
            f"{what} did not fail the agent: it returned a result instead of raising; the adapter must let the agent's "
            "exceptions through"
        )
        return
    kind = expected.partition(":")[0]
    kind = (renamed or {}).get(kind, kind)
    others = [t.error for t in trajectories if t.error is None or t.error.partition(":")[0] != kind]
    if others:
        yield (
            f"{what} raises {kind} with a plain provider, but Trajectory.error was {others[0]!r} in a rollout: the adapter "
            "must let the agent's exceptions through unchanged"
        )


def of_kind(kind: str, trajectory: Trajectory, names: Collection[str], threads: int | None) -> Iterator[str]:
    """An agent does what its kind is about. ``threads`` besides the event loop's called the model; None if unknown."""
    calls = trajectory.calls
    if kind == "stream" and not any(call.request.get("stream") for call in calls):
        yield "no call was streamed: the agent must stream, and the adapter must not change stream=true"
    if kind == "tools":
        yield from _tools(calls)
    if kind == "structured output" and not any(map(_structured, calls)):
        yield "no call requested a schema: neither response_format nor a forced tool_choice was recorded"
    if kind == "nested agents" and len(calls) < 2:
        yield f"{len(calls)} calls were recorded: an agent inside an agent makes at least two"
    elif kind == "nested agents" and not set(names) <= (seen := {call.agent for call in calls}):
        yield (
            f"Call.agent shows {sorted(map(str, seen))}, but {sorted(names)} were expected: set the calling agent's name with "
            "art_core.name_agents(source) in redirect_clients"
        )
    if kind == "sync" and threads == 0:
        yield (
            "every call was made on the event loop's thread: pass an agent that makes blocking calls, and let the adapter "
            "run it in a thread"
        )
    if kind == "threads" and threads is not None and threads < 2:
        yield (
            f"calls were made from {threads} threads besides the event loop's: the agent must start at least two threads that "
            "call the model"
        )


def _structured(call: Call) -> bool:
    choice = call.request.get("tool_choice")
    return bool(call.request.get("response_format")) or isinstance(choice, dict) or choice in ("required", "any")


def _tools(calls: Sequence[Call]) -> Iterator[str]:
    first = next((call for call in calls if call.response.get("tool_calls")), None)
    shown = [call for call in calls if any(message.get("role") == "tool" for message in call.request["messages"])]
    if first is None:
        yield "the model was offered no tool, so it called none: pass an agent with a tool"
        return
    path = first.prompt_ids + first.sampled_ids
    if not shown:
        yield "no call shows the result of a tool to the model: the agent must call the model again after the tool has run"
    elif not any(call.prompt_ids[: len(path)] == path for call in shown):
        yield (
            "the prompt after a tool call does not extend the tokens before it: the agent sent the model's message back "
            "changed, so each call would be trained as a separate history"
        )
