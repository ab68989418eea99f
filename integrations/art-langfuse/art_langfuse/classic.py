"""``ARTLangfuseTracker``: sends episodes, generations and training sessions as traces, and reads back statistics about them.

For programs with their own episodes; ``train(trackers=["langfuse"])`` does not need it.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art_core.errors import ArtError
from art_langfuse.account import Account, account
from art_langfuse.api import Project
from art_langfuse.observations import SHORTEST
from art_langfuse.outbox import NotDelivered, Outbox
from art_langfuse.spans import as_json, make_span, text
from art_tasks.traffic.messages import value_of

if TYPE_CHECKING:
    from langfuse.api import ObservationV2
    from opentelemetry.sdk.trace import ReadableSpan

ACTION = re.compile(r"action_\d+_(.*)", re.DOTALL)
"""The name of an action's span; the type may contain underscores."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 20.0
"""Most seconds that the end of the program waits for unsent observations."""

log = logging.getLogger("art_langfuse")


@dataclass(frozen=True)
class Trace:
    """A trace that was sent, or a generation in a trace of its own."""

    id: str
    trace_id: str
    url: str


class TracesMissing(ArtError):
    """Langfuse does not show all traces yet."""


class ARTLangfuseTracker:
    """Sends to the project in ``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY`` and ``LANGFUSE_HOST``.

    Every ``track_`` method returns at once; a thread sends, with retries. The end of the program waits for it, up to
    ``CLOSE_SECONDS``. Failures to send are logged, never raised. ``flush`` waits until everything has been sent or has failed.
    """

    def __init__(self, wait: float = 60.0) -> None:
        """``wait``: most seconds that ``get_performance_analytics`` waits until Langfuse shows the traces."""
        from art_langfuse.tracker import langfuse_post

        self._account: Account = account()
        self._wait = wait
        post, self._end = langfuse_post(self._account)
        self._outbox: Outbox[ReadableSpan] = Outbox(f"Langfuse at {self._account.host}, observations", post, 200)
        self._project = Project(self._account)
        self._sent: dict[str, int] = {}
        """Trace id -> number of observations, for traces sent by this tracker."""
        self._change = threading.Condition()
        self._new: list[ReadableSpan] = []
        self._busy, self._closed = False, False
        # A daemon, so that an unresponsive server does not keep the process alive.
        self._sending = threading.Thread(target=self._work, name="art-langfuse", daemon=True)
        self._sending.start()
        atexit.register(self.close)

    def track_episode(self, episode_data: Mapping[str, Any]) -> Trace:
        """Send an episode as a trace with a span for each of its ``actions``."""
        get = episode_data.get
        name, now = f"episode_{get('episode_id')}", time.time()
        trace, actions = _new_id(16), list(get("actions") or ())
        root = _attributes(
            "agent",
            {key: get(key) for key in ("initial_state", "task_description")},
            {key: get(key) for key in ("final_result", "total_reward", "success")},
            {"agent_type": get("agent_type"), "model_name": get("model_name"), "environment": get("environment_type")},
            get("error"),
        )
        root_id = _new_id(8)
        times = [max(float(action.get("execution_time") or 0.0), SHORTEST) for action in actions]
        start = now - sum(times)
        spans = [make_span(name, trace, root_id, None, start, now, _named(root, name), error=_error(episode_data))]
        for number, action in enumerate(actions):
            action_start = start + sum(times[:number])
            kind = f"action_{number}_{action.get('type')}"
            attributes = _named(_action(number, action), name)
            action_end = action_start + times[number]
            span = make_span(
                kind, trace, _new_id(8), root_id, action_start, action_end, attributes, error=_error(action)
            )
            spans.append(span)
        return self._send(trace, trace, spans)

    def track_model_generation(self, prompt: str, response: str, metadata: Mapping[str, Any]) -> Trace:
        """Send one model call as a generation, and return its ``id`` and ``trace_id``."""
        settings = {
            "temperature": metadata.get("temperature", 0.7),
            "max_tokens": metadata.get("max_tokens", 150),
        }
        attributes = _attributes("generation", prompt, response, {**metadata, **settings}) | {
            "langfuse.observation.model.name": str(metadata.get("model_name", "unknown")),
            "langfuse.observation.model.parameters": as_json(settings),
        }
        if metadata.get("token_count"):
            attributes["langfuse.observation.usage_details"] = json.dumps({"total": int(metadata["token_count"])})
        name, trace, own, now = "agent_action_generation", _new_id(16), _new_id(8), time.time()
        start = now - float(metadata.get("latency_ms") or 0.0) / 1000
        return self._send(own, trace, [make_span(name, trace, own, None, start, now, _named(attributes, name))])

    def track_training_session(self, session_data: Mapping[str, Any]) -> Trace:
        """Send a training session as a trace."""
        get, now = session_data.get, time.time()
        name, trace = f"training_session_{get('session_id')}", _new_id(16)
        attributes = _attributes(
            "span",
            {key: get(key) for key in ("config", "start_time")},
            {key: get(key) for key in ("final_metrics", "total_episodes", "training_time")},
            {key: get(key) for key in ("experiment_name", "model_checkpoints", "hardware_info")},
        )
        seconds = get("training_time")
        start = now - (float(seconds) if isinstance(seconds, int | float) else 0.0)
        return self._send(
            trace, trace, [make_span(name, trace, _new_id(8), None, start, now, _named(attributes, name))]
        )

    def get_performance_analytics(self, trace_ids: Sequence[str]) -> dict[str, Any]:
        """Return statistics of episodes: total_traces, success_rate, average_reward, average_steps, action_distribution, and
        error_patterns, the most frequent first: ``{"pattern", "count", "trace_ids"}``.

        Langfuse shows a trace some time after it was sent. This waits for all traces, up to ``wait`` seconds in total, then
        raises TracesMissing if some are still missing.
        """
        self.flush()
        traces = self._shown(trace_ids)
        outputs = {trace: _output(observations) for trace, observations in traces.items()}
        actions = {trace: _actions(observations) for trace, observations in traces.items()}
        count = len(trace_ids)

        def mean(values: Sequence[float]) -> float:
            return sum(values) / count if count else 0

        return {
            "total_traces": count,
            "success_rate": mean([bool(outputs[trace].get("success")) for trace in trace_ids]),
            "average_reward": mean([float(outputs[trace].get("total_reward") or 0) for trace in trace_ids]),
            "average_steps": mean([sum(span.type == "SPAN" for span in traces[trace]) for trace in trace_ids]),
            "action_distribution": dict(Counter(kind for trace in trace_ids for kind, _ in actions[trace])),
            "error_patterns": _patterns(trace_ids, traces, outputs, actions),
        }

    def flush(self) -> None:
        """Wait until everything has been sent or has failed."""
        with self._change:
            self._change.wait_for(lambda: self._closed or not (self._new or self._busy))

    def close(self) -> None:
        """Send the rest, for up to ``CLOSE_SECONDS``, and log what is lost. Called at the end of the program as well."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        atexit.unregister(self.close)
        self._sending.join(CLOSE_SECONDS)
        if self._sending.is_alive():  # otherwise the thread itself has logged what it could not send
            unsent = len(self._new) + len(self._outbox)
            log.warning("%d observations could not be sent to Langfuse at %s and are lost", unsent, self._account.host)
        self._project.close()

    def _send(self, own: str, trace: str, spans: list[ReadableSpan]) -> Trace:
        with self._change:
            if self._closed:
                log.warning("this tracker is closed, so trace %s is not sent; create a new ARTLangfuseTracker()", trace)
            else:
                self._sent[trace] = len(spans)
                self._new += spans
                self._change.notify_all()
        return Trace(own, trace, f"{self._account.host}/trace/{trace}")

    def _work(self) -> None:
        """Deliver new spans together, so that a slow server delays them only once."""
        closed = False
        while not closed:
            with self._change:
                self._change.wait_for(lambda: self._new or self._closed)
                spans, self._new, self._busy, closed = self._new, [], True, self._closed
            if spans:
                self._attempt(functools.partial(self._outbox.deliver, spans))
            with self._change:
                self._busy = False
                self._change.notify_all()
        self._attempt(self._outbox.close)  # tries unsent spans once more
        self._end()

    def _attempt(self, send: Callable[[], None]) -> None:
        try:
            send()
        except NotDelivered as error:
            log.warning("%s", error)
        except Exception:  # otherwise the thread would end unnoticed
            log.exception("Langfuse at %s: observations could not be sent", self._account.host)

    def _shown(self, trace_ids: Sequence[str]) -> dict[str, list[ObservationV2]]:
        """Return the observations of the traces, once Langfuse shows all of them."""
        deadline, missing = time.monotonic() + self._wait, list(dict.fromkeys(trace_ids))
        traces: dict[str, list[ObservationV2]] = {}
        while True:
            traces |= {trace: self._project.observations(trace) for trace in missing}
            missing = [trace for trace in missing if len(traces[trace]) < self._sent.get(trace, 1)]
            if not missing:
                return traces
            if time.monotonic() + POLL_SECONDS > deadline:
                raise TracesMissing(
                    f"after {self._wait:g} s Langfuse at {self._account.host} does not show {len(missing)} of {len(traces)} "
                    f"traces yet, {missing[0]} first; try again later, wait longer with ARTLangfuseTracker(wait=...), or "
                    "remove ids that are not from this project"
                )
            time.sleep(POLL_SECONDS)


def _new_id(size: int) -> str:
    return uuid.uuid4().bytes[:size].hex()


def _attributes(kind: str, input: Any, output: Any, metadata: Mapping[str, Any], error: Any = None) -> dict[str, Any]:
    attributes = {
        "langfuse.observation.type": kind,
        "langfuse.observation.input": text(input),
        "langfuse.observation.output": text(output),
    }
    known = {key: value for key, value in metadata.items() if value is not None}
    attributes |= {f"langfuse.observation.metadata.{key}": as_json(value) for key, value in known.items()}
    if error:
        attributes |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": text(error)}
    return attributes


def _named(attributes: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**attributes, "langfuse.trace.name": name}


def _action(number: int, action: Mapping[str, Any]) -> dict[str, Any]:
    get = action.get
    return _attributes(
        "span",
        {"state": get("state"), "action_type": get("type"), "parameters": get("parameters")},
        {key: get(key) for key in ("result", "reward", "next_state")},
        {"step_number": number, "reasoning": get("reasoning"), "execution_time": get("execution_time")},
        _error(action),
    )


def _error(item: Mapping[str, Any]) -> str | None:
    """Return the ``error`` of an action or an episode, or that of the action's result."""
    result = item.get("result")
    error = item.get("error") or (result.get("error") if isinstance(result, Mapping) else None)
    return text(error) if error else None


def _output(observations: Sequence[ObservationV2]) -> dict[str, Any]:
    """Return the output of the trace's root."""
    for observation in observations:
        if observation.parent_observation_id is None:
            output = value_of(observation.output)
            return output if isinstance(output, dict) else {}
    return {}


def _actions(observations: Sequence[ObservationV2]) -> list[tuple[str, ObservationV2]]:
    """Return (type, span) of each action."""
    spans = (observation for observation in observations if observation.type == "SPAN")
    matches = ((ACTION.fullmatch(span.name or ""), span) for span in spans)
    return [(match[1], span) for match, span in matches if match]


def _patterns(
    trace_ids: Sequence[str],
    traces: Mapping[str, Sequence[ObservationV2]],
    outputs: Mapping[str, Mapping[str, Any]],
    actions: Mapping[str, Sequence[tuple[str, ObservationV2]]],
) -> list[dict[str, Any]]:
    """Return the errors of actions and episodes, with numbers masked so that similar errors are counted together.

    An unsuccessful episode without any error is counted by its last action.
    """
    by_pattern: dict[str, list[str]] = {}
    for trace in trace_ids:
        kinds = {span.id: kind for kind, span in actions[trace]}
        failed = [observation for observation in traces[trace] if observation.level == "ERROR"]
        errors = [f"{kinds.get(it.id, 'episode')}: {it.status_message or 'failed'}" for it in failed]
        if not errors and not outputs[trace].get("success"):
            last = actions[trace][-1][0] if actions[trace] else None
            errors = [f"no success, last action {last}" if last else "no success, no action"]
        for error in errors:
            by_pattern.setdefault(re.sub(r"\d+", "#", error), []).append(trace)
    ordered = sorted(by_pattern.items(), key=lambda item: (-len(item[1]), item[0]))
    return [{"pattern": pattern, "count": len(ids), "trace_ids": list(dict.fromkeys(ids))} for pattern, ids in ordered]
