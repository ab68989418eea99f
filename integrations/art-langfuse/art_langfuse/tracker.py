"""``train(trackers=["langfuse"])`` and ``["otel"]``: every run of the agent as a trace, its reward and metrics as scores.

Called in a thread of its own, in order (``art_core.loop.trackers``). Neither tracker patches a client library, switches an
instrumentation on or touches the process's tracer provider.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.store import Store
from art_core.store.run_folder import write_whole
from art_core.types import Group, JsonDict, Trajectory
from art_langfuse import vocabularies
from art_langfuse.account import account
from art_langfuse.api import Project
from art_langfuse.observations import Observation, observation_id, observations, trace_id
from art_langfuse.outbox import NotDelivered, Outbox
from art_langfuse.spans import Attributes, check_environment, environment_post, http_post, make_span, text
from art_langfuse.vocabularies import CALL_REWARD, Traced

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from art_core.config import TrainConfig

SPANS, SCORES = 200, 100
"""In one request."""


class LangfuseTracker:
    """Sends to the project that ``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY`` and ``LANGFUSE_HOST`` name.

    A trace per run of the agent, with an observation for each node, model call and tool; the session is the run folder's
    name. Ids follow from the rollouts' ids and the run's own, and times from the store: what is sent again is there once.
    """

    check = staticmethod(account)

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        found = account()
        self._run_dir, self._model, self._session = Path(run_dir), config.model, Path(run_dir).resolve().name
        self._post, self._end = langfuse_post(found)
        self._spans: Outbox[ReadableSpan] = Outbox(f"Langfuse at {found.host}, observations", self._post, SPANS)
        self._project = Project(found)
        self._scores: Outbox[JsonDict] = Outbox(f"Langfuse at {found.host}, scores", self._project.add_scores, SCORES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics as scores of the session."""
        self._scores.deliver(self._of_session(step, metrics))

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Send the runs as traces, and what they were given as scores."""
        starts = _starts(self._run_dir, groups)
        spans, scores = [], []
        for traced in _traced(groups, self._session, self._model, split, step):
            run = traced.trajectory
            found = observations(run, starts[run.rollout_id])
            spans += [_span(traced, it, vocabularies.langfuse(traced, it)) for it in found]
            scores += _scores(run, found)
        _both(lambda: self._spans.deliver(spans), lambda: self._scores.deliver(scores))

    def log_evaluation(self, step: int, found: Mapping[str, Any]) -> None:
        """Send what an evaluation found as scores of the session."""
        numbers = {f"evaluation/{key}": found[key] for key in ("success", "mean_reward") if found.get(key) is not None}
        about = {"evaluation": found["name"], "temperature": found.get("temperature")}
        self._scores.deliver(self._of_session(step, numbers, **about))

    def close(self) -> None:
        """Send what could not be sent before, and end; raises NotDelivered, with how much was never sent."""
        try:
            _both(self._spans.close, self._scores.close)
        finally:
            self._end()
            self._project.close()

    def _of_session(self, step: int, numbers: Mapping[str, float], **facts: Any) -> Iterator[JsonDict]:
        now = datetime.now(UTC).isoformat()
        about = {"sessionId": self._session, "metadata": {"step": step, **facts}}
        own = _run_id(self._run_dir / "langfuse.id")
        for name, value in numbers.items():
            if math.isfinite(value):
                yield _score(f"{own}/{step}/{list(facts.values())}/{name}", name, value, now, about)


class OtelTracker:
    """Sends spans by OpenTelemetry's conventions for generative AI to where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says."""

    check = staticmethod(check_environment)

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        check_environment()
        self._run_dir, self._model, self._session = Path(run_dir), config.model, Path(run_dir).resolve().name
        post, self._end = environment_post()
        self._spans: Outbox[ReadableSpan] = Outbox("OTLP, spans", post, SPANS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step as a span that has its metrics."""
        end = time.time()
        name = f"{_run_id(self._run_dir / 'otel.id')}/step/{step}"
        attributes = {"art.session": self._session, "art.step": step}
        attributes |= {f"art.metric.{key}": value for key, value in metrics.items()}
        start = end - metrics.get("seconds", 0.0)
        span = make_span("train_step", trace_id(name), observation_id(name, 0), None, start, end, attributes)
        self._spans.deliver([span])

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Send the runs as traces; rewards and metrics are events of a trace's root."""
        starts, spans = _starts(self._run_dir, groups), []
        for traced in _traced(groups, self._session, self._model, split, step):
            for it in observations(traced.trajectory, starts[traced.trajectory.rollout_id]):
                events = _evaluations(traced.trajectory) if it.number == 0 else ()
                spans.append(_span(traced, it, vocabularies.genai(traced, it), list(events)))
        self._spans.deliver(spans)

    def close(self) -> None:
        """Send what could not be sent before, and end; raises NotDelivered, with how much was never sent."""
        try:
            self._spans.close()
        finally:
            self._end()


def langfuse_post(found: Any) -> Any:
    """Return how spans are posted to Langfuse, and how that is ended."""
    from opentelemetry.exporter.otlp.proto.http import Compression

    return http_post(
        endpoint=f"{found.host}/api/public/otel/v1/traces", headers=found.headers(), compression=Compression.Gzip
    )


def _both(first: Any, second: Any) -> None:
    """Do both, also where the first fails."""
    try:
        first()
    except NotDelivered as error:
        try:
            second()
        except NotDelivered as other:
            raise NotDelivered(f"{error}; {other}") from error
        raise
    second()


def _traced(groups: Sequence[Group], session: str, model: str, split: str, step: int) -> Iterator[Traced]:
    for group in groups:
        advantages = group.advantages or [None] * len(group.trajectories)
        for run, advantage in zip(group.trajectories, advantages, strict=True):
            yield Traced(run, session, model, split, step, advantage)


def _run_id(path: Path) -> str:
    """Return the id of the run that ``path`` keeps: run folders of one name, as two checkouts have, are not one run."""
    try:
        known = path.read_text().strip()
    except FileNotFoundError:
        known = ""
    if not known:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, known := uuid.uuid4().hex)
    return known


def _starts(run_dir: Path, groups: Sequence[Group]) -> dict[str, float]:
    """Return when the runs were begun, as the store has it: the same however often they are sent."""
    runs = [t for group in groups for t in group.trajectories]
    now, file = time.time(), run_dir / "run.sqlite"
    found = {t.rollout_id: now - t.seconds for t in runs}
    if file.is_file():
        with Store(file) as store:
            found |= store.started(list(found))
    return found


NAMES = {"agent": "invoke_agent", "generation": "chat", "tool": "execute_tool"}
"""What spans are called, by the GenAI conventions."""


def _span(traced: Traced, it: Observation, attributes: Attributes, events: Sequence[Any] = ()) -> ReadableSpan:
    rollout = traced.trajectory.rollout_id
    plain = "langfuse.observation.type" in attributes
    what = vocabularies.answered_by(traced, it.call) if it.call else it.name
    why = traced.trajectory.error if plain else vocabularies.failure(traced.trajectory)
    return make_span(
        it.name if plain else f"{NAMES[it.kind]} {what}",
        trace_id(rollout),
        observation_id(rollout, it.number),
        None if it.parent is None else observation_id(rollout, it.parent),
        it.start,
        it.end,
        attributes,
        error=why if it.number == 0 else None,
        events=events,
        client=it.kind == "generation",
    )


def _evaluations(run: Trajectory) -> Iterator[tuple[str, Attributes]]:
    given = {} if run.reward is None else {"reward": run.reward}
    for name, value in {**run.metrics, **given}.items():
        attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(value)}
        if name == "reward" and run.notes and vocabularies.captures_content():
            attributes["gen_ai.evaluation.explanation"] = text(explanation(run))
        yield "gen_ai.evaluation.result", attributes


def explanation(run: Trajectory) -> str:
    """Return why the run has its reward: the note of its reward, or each with its name where there are several."""
    if len(run.notes) == 1:
        return next(iter(run.notes.values()))
    return "\n".join(f"{name}: {said}" for name, said in run.notes.items())


def _scores(run: Trajectory, found: Sequence[Observation]) -> Iterator[JsonDict]:
    trace, at = trace_id(run.rollout_id), datetime.fromtimestamp(found[0].end, UTC).isoformat()
    about: JsonDict = {"traceId": trace}
    if run.reward is not None:
        why = {"comment": text(explanation(run))} if run.notes else {}
        yield _score(f"{trace}/reward", "reward", run.reward, at, about | why)
    for name, value in run.metrics.items():
        if math.isfinite(value):
            shown = f"metrics/{name}" if name == "reward" else name
            yield _score(f"{trace}/metric/{name}", shown, float(value), at, about)
    for it in found:
        if it.call and it.call.reward is not None:
            of_call = {"observationId": observation_id(run.rollout_id, it.number)}
            yield _score(f"{trace}/call/{it.number}", CALL_REWARD, it.call.reward, at, about | of_call)


def _score(key: str, name: str, value: float, at: str, about: JsonDict) -> JsonDict:
    own = hashlib.sha256(key.encode()).hexdigest()[:32]
    return {**about, "id": own, "name": name, "value": value, "dataType": "NUMERIC", "timestamp": at}
