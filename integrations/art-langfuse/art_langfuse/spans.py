"""Observations -> OpenTelemetry spans, and spans -> an OTLP endpoint. Knows nothing about whose attributes they have.

Spans are made as they are read back, with ids and times of their own: no tracer provider is made or touched, the process's
least of all.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.redaction import without_keys
from art_langfuse.outbox import Denied, Refused, Temporary, raise_for

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SCOPE = "art_langfuse"
PROTOCOLS = ("http/protobuf", "grpc")
UNSAYABLE = (TypeError, ValueError, RecursionError)
"""What ``json.dumps`` raises for keys that are no text, for circles and for what is too deep."""

Attributes = Mapping[str, Any]


def text(value: Any) -> str:
    """Return a value as an attribute can hold it: text as it is, everything else as JSON."""
    if isinstance(value, str):  # half a pair of UTF-16, which a model may write, is no UTF-8
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return as_json(value)


def as_json(value: Any) -> str:
    """Return any value as JSON; what JSON cannot say, such as an object that holds itself, is its repr."""
    try:
        return json.dumps(value, default=str)
    except UNSAYABLE:
        if isinstance(value, Mapping):
            value = {it if isinstance(it, str) else repr(it): _or_repr(value[it]) for it in value}
        return json.dumps(_or_repr(value), default=str)


def _or_repr(value: Any) -> Any:
    try:
        json.dumps(value, default=str)
    except UNSAYABLE:
        return repr(value)
    return value


def make_span(
    name: str,
    trace: str,
    own: str,
    parent: str | None,
    start: float,
    end: float,
    attributes: Attributes,
    *,
    error: str | None = None,
    events: Sequence[tuple[str, Attributes]] = (),
    client: bool = False,
) -> ReadableSpan:
    """Return a span; ids are hexadecimal, times Unix time. ``error`` is why it failed; ``client``: it asked somebody else."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span: str) -> SpanContext:
        return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    nanoseconds = int(start * 1e9), int(end * 1e9)
    return ReadableSpan(
        text(name),
        context=context(own),
        parent=context(parent) if parent else None,
        resource=_resource(),
        attributes={key: value for key, value in attributes.items() if value is not None},
        events=[Event(kind, said, nanoseconds[1]) for kind, said in events],
        kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, text(error)) if error else Status(StatusCode.UNSET),
        start_time=nanoseconds[0],
        end_time=nanoseconds[1],
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _resource() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say counts.
    return Resource({"service.name": "art"}).merge(OTELResourceDetector().detect())


def http_post(**settings: Any) -> tuple[Callable[[Sequence[ReadableSpan]], None], Callable[[], None]]:
    """Return how spans are posted by OTLP over HTTP, and how that is ended. Without ``settings`` (endpoint, headers, compression)
    the environment says where, by OpenTelemetry's variables."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    session = requests.Session()
    failed: list[Exception] = []
    ask = session.request

    def once(method: str, url: str, **more: Any) -> requests.Response:
        """Ask. What is no success is raised, so that the exporter does not try it again: the outbox does."""
        try:
            answer = ask(method, url, **more)
            if not 200 <= answer.status_code < 300:
                # Hidden before it is cut: half a key would not be found.
                sent = answer.request.headers.get("Authorization", "").split()
                raise_for(answer.status_code, f"{url}: {without_keys(answer.text, *sent)[:200]}", answer.headers)
        except requests.RequestException as error:  # the connection was lost, with half an answer or none
            failed.append(Temporary(f"{url} cannot be reached, or cuts connections: {type(error).__name__}"))
            raise failed[-1] from error
        except (Temporary, Refused, Denied) as error:
            failed.append(error)
            raise
        return answer

    session.request = once  # type: ignore[method-assign]
    exporter = OTLPSpanExporter(session=session, **settings)

    def post(spans: Sequence[ReadableSpan]) -> None:
        failed.clear()
        said = _export(exporter, spans)
        if said is not None:
            raise failed[-1] if failed else Refused(said)

    return post, exporter.shutdown


def _export(exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> str | None:
    """Export; None where the spans were taken, else what the exporter logs: our own errors say it, so it is said once."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    said, thread = ["the exporter does not say why"], threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread == thread:  # others may have exporters of their own
            said.append(record.getMessage())
        return record.thread != thread

    modules = {it.__module__ for it in type(exporter).__mro__ if it.__module__.startswith("opentelemetry.exporter.")}
    loggers = [logging.getLogger(module) for module in modules]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        return None if exporter.export(spans) is SpanExportResult.SUCCESS else said[-1]
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def environment_post() -> tuple[Callable[[Sequence[ReadableSpan]], None], Callable[[], None]]:
    """Return how spans are posted to where OpenTelemetry's variables say, and how that is ended."""
    if _protocol() == "http/protobuf":
        return http_post()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter()

    def post(spans: Sequence[ReadableSpan]) -> None:
        said = _export(exporter, spans)
        if said is not None:
            raise Temporary(said)

    return post, exporter.shutdown


def check_environment() -> None:
    """Raise ConfigError where OpenTelemetry's variables say no address, or a protocol that cannot be spoken here."""
    if not any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")):
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is not set, so there is nowhere to send spans to; set it to a collector's address, such "
            "as http://127.0.0.1:4318, and OTEL_EXPORTER_OTLP_HEADERS where it wants a key"
        )
    if _protocol() not in PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={_protocol()} is unknown; use {' or '.join(PROTOCOLS)}")
    if _protocol() == "grpc":
        try:
            import opentelemetry.exporter.otlp.proto.grpc  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"OTLP by gRPC: {error}; run: pip install opentelemetry-exporter-otlp-proto-grpc"
            ) from error


def _protocol() -> str:
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    ).strip()
