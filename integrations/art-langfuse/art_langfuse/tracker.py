"""``train(trackers=["langfuse"])`` and ``["otel"]``: every rollout as a trace, its reward and metrics as scores.

Trackers are called in order, in their own thread (``art_core.loop.trackers``). They neither patch client libraries nor enable
instrumentations nor touch the process's tracer provider.
"""

from __future__ import annotations

import hashlib
import math
import os
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
from art_langfuse.account import Account, account
from art_langfuse.api import Project
from art_langfuse.observations import Observation, observation_id, observations, trace_id
from art_langfuse.outbox import NotDelivered, Outbox
from art_langfuse.spans import Attributes, check_environment, environment_post, http_post, make_span, text
from art_langfuse.vocabularies import CALL_REWARD, Traced

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from art_core import TrainConfig

SPANS, SCORES = 200, 100
"""Most spans and scores in a request."""


class LangfuseTracker:
    """Sends to the project in ``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY`` and ``LANGFUSE_HOST``.

    Each rollout is a trace with an observation for each node, model call and tool; the session is the run folder's name. Ids are
    derived from the ids of the rollouts and of the run, and times come from the store, so sending twice has no effect.
    """

    check = staticmethod(account)

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        project_account = account()
        host = project_account.host
        self._run_dir, self._model, self._session = Path(run_dir), config.model, Path(run_dir).resolve().name
        self._post, self._end = langfuse_post(project_account)
        self._spans: Outbox[ReadableSpan] = Outbox(f"Langfuse at {host}, observations", self._post, SPANS)
        self._project = Project(project_account)
        self._scores: Outbox[JsonDict] = Outbox(f"Langfuse at {host}, scores", self._project.add_scores, SCORES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics as scores of the session."""
        self._scores.deliver(self._of_session(step, metrics))

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Send the rollouts as traces, and their rewards and metrics as scores."""
        starts = _starts(self._run_dir, groups)
        spans, scores = [], []
        for traced in _traced(groups, self._session, self._model, split, step):
            trajectory = traced.trajectory
            nodes = observations(trajectory, starts[trajectory.rollout_id])
            spans += [_span(traced, node, vocabularies.langfuse(traced, node)) for node in nodes]
            scores += _scores(trajectory, nodes)
        _both(lambda: self._spans.deliver(spans), lambda: self._scores.deliver(scores))

    def log_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Send an evaluation's results as scores of the session."""
        keys = [key for key in ("success", "mean_reward") if evaluation.get(key) is not None]
        numbers = {f"evaluation/{key}": evaluation[key] for key in keys}
        facts = {"evaluation": evaluation["name"], "temperature": evaluation.get("temperature")}
        self._scores.deliver(self._of_session(step, numbers, **facts))

    def close(self) -> None:
        """Send everything that is unsent, and end; raises NotDelivered, with the number that were never sent."""
        try:
            _both(self._spans.close, self._scores.close)
        finally:
            self._end()
            self._project.close()

    def _of_session(self, step: int, numbers: Mapping[str, float], **facts: Any) -> Iterator[JsonDict]:
        now = datetime.now(UTC).isoformat()
        about = {"sessionId": self._session, "metadata": {"step": step, **facts}}
        run_id = _run_id(self._run_dir / "langfuse.id")
        for name, value in numbers.items():
            if math.isfinite(value):
                yield _score(f"{run_id}/{step}/{list(facts.values())}/{name}", name, value, now, about)


class OtelTracker:
    """Sends spans by OpenTelemetry's conventions for generative AI to ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    check = staticmethod(check_environment)

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        check_environment()
        self._run_dir, self._model, self._session = Path(run_dir), config.model, Path(run_dir).resolve().name
        post, self._end = environment_post()
        self._spans: Outbox[ReadableSpan] = Outbox("OTLP, spans", post, SPANS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step as a span with its metrics."""
        end = time.time()
        name = f"{_run_id(self._run_dir / 'otel.id')}/step/{step}"
        attributes = {"art.session": self._session, "art.step": step}
        attributes |= {f"art.metric.{key}": value for key, value in metrics.items()}
        start = end - metrics.get("seconds", 0.0)
        span = make_span("train_step", trace_id(name), observation_id(name, 0), None, start, end, attributes)
        self._spans.deliver([span])

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Send the rollouts as traces; rewards and metrics are events of the root span."""
        starts, spans = _starts(self._run_dir, groups), []
        for traced in _traced(groups, self._session, self._model, split, step):
            for node in observations(traced.trajectory, starts[traced.trajectory.rollout_id]):
                events = _evaluations(traced.trajectory) if node.number == 0 else ()
                spans.append(_span(traced, node, vocabularies.genai(traced, node), list(events)))
        self._spans.deliver(spans)

    def close(self) -> None:
        """Send everything that is unsent, and end; raises NotDelivered, with the number that were never sent."""
        try:
            self._spans.close()
        finally:
            self._end()


def langfuse_post(project_account: Account) -> Any:
    """Return a function that posts spans to Langfuse, and one that ends it."""
    from opentelemetry.exporter.otlp.proto.http import Compression

    endpoint = f"{project_account.host}/api/public/otel/v1/traces"
    return http_post(endpoint=endpoint, headers=project_account.headers(), compression=Compression.Gzip)


def _both(first: Any, second: Any) -> None:
    """Call both, even if the first raises."""
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
    """Return the run's id, stored in ``path``, because different run folders may have the same name."""
    try:
        run_id = path.read_text().strip()
    except FileNotFoundError:
        run_id = ""
    if not run_id:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, run_id := uuid.uuid4().hex)
    return run_id


def _starts(run_dir: Path, groups: Sequence[Group]) -> dict[str, float]:
    """Return the start times of the rollouts from the store, so that they are the same however often they are sent."""
    now, file = time.time(), run_dir / "run.sqlite"
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    starts = {trajectory.rollout_id: now - trajectory.seconds for trajectory in trajectories}
    if file.is_file():
        with Store(file) as store:
            starts |= store.started(list(starts))
    return starts


NAMES = {"agent": "invoke_agent", "generation": "chat", "tool": "execute_tool"}
"""Operation names of spans in the GenAI conventions."""


def _span(traced: Traced, node: Observation, attributes: Attributes, events: Sequence[Any] = ()) -> ReadableSpan:
    rollout_id = traced.trajectory.rollout_id
    for_langfuse = "langfuse.observation.type" in attributes
    target = vocabularies.answered_by(traced, node.call) if node.call else node.name
    error = traced.trajectory.error if for_langfuse else vocabularies.failure(traced.trajectory)
    return make_span(
        node.name if for_langfuse else f"{NAMES[node.kind]} {target}",
        trace_id(rollout_id),
        observation_id(rollout_id, node.number),
        None if node.parent is None else observation_id(rollout_id, node.parent),
        node.start,
        node.end,
        attributes,
        error=error if node.number == 0 else None,
        events=events,
        client=node.kind == "generation",
    )


def _evaluations(trajectory: Trajectory) -> Iterator[tuple[str, Attributes]]:
    reward = {} if trajectory.reward is None else {"reward": trajectory.reward}
    for name, value in {**trajectory.metrics, **reward}.items():
        attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(value)}
        if name == "reward" and trajectory.notes and vocabularies.captures_content():
            attributes["gen_ai.evaluation.explanation"] = text(explanation(trajectory))
        yield "gen_ai.evaluation.result", attributes


def explanation(trajectory: Trajectory) -> str:
    """Return the notes that explain the reward, with their names if there are several."""
    if len(trajectory.notes) == 1:
        return next(iter(trajectory.notes.values()))
    return "\n".join(f"{name}: {note}" for name, note in trajectory.notes.items())


def _scores(trajectory: Trajectory, nodes: Sequence[Observation]) -> Iterator[JsonDict]:
    trace, time_ended = trace_id(trajectory.rollout_id), datetime.fromtimestamp(nodes[0].end, UTC).isoformat()
    about: JsonDict = {"traceId": trace}
    if trajectory.reward is not None:
        comment = {"comment": text(explanation(trajectory))} if trajectory.notes else {}
        yield _score(f"{trace}/reward", "reward", trajectory.reward, time_ended, about | comment)
    for name, value in trajectory.metrics.items():
        if math.isfinite(value):
            shown = f"metrics/{name}" if name == "reward" else name
            yield _score(f"{trace}/metric/{name}", shown, float(value), time_ended, about)
    for node in nodes:
        if node.call and node.call.reward is not None:
            of_call = {"observationId": observation_id(trajectory.rollout_id, node.number)}
            yield _score(f"{trace}/call/{node.number}", CALL_REWARD, node.call.reward, time_ended, about | of_call)


def _score(key: str, name: str, value: float, timestamp: str, about: JsonDict) -> JsonDict:
    score_id = hashlib.sha256(key.encode()).hexdigest()[:32]
    if environment := os.environ.get("LANGFUSE_TRACING_ENVIRONMENT"):
        about = {**about, "environment": environment}
    return {**about, "id": score_id, "name": name, "value": value, "dataType": "NUMERIC", "timestamp": timestamp}
