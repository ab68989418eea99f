"""Builds OpenTelemetry spans, and sends them to an OTLP endpoint.

Spans are built as ``ReadableSpan`` objects with explicit ids and times, without any tracer provider, so the process's provider is
not touched.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.plugin_api import without_keys
from art_langfuse.outbox import Denied, Refused, Temporary, raise_for

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SCOPE = "art_langfuse"
PROTOCOLS = ("http/protobuf", "grpc")
NOT_JSON = (TypeError, ValueError, RecursionError)
"""Errors of ``json.dumps`` for keys that are not strings, for cycles, and for values that are nested too deeply."""

Attributes = Mapping[str, Any]


def text(value: Any) -> str:
    """Return a value as a span attribute: a string unchanged, anything else as JSON."""
    if isinstance(value, str):  # models may write lone surrogates, which can't be encoded as UTF-8
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return as_json(value)


def as_json(value: Any) -> str:
    """Return any value as JSON; parts that JSON cannot express, such as cycles, become their repr."""
    try:
        return json.dumps(value, default=str)
    except NOT_JSON:
        if isinstance(value, Mapping):
            value = {key if isinstance(key, str) else repr(key): _or_repr(value[key]) for key in value}
        return json.dumps(_or_repr(value), default=str)


def _or_repr(value: Any) -> Any:
    try:
        json.dumps(value, default=str)
    except NOT_JSON:
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
    """Return a span. Ids are hexadecimal, times are Unix time; ``error`` is why it failed; ``client``: a call to another
    service."""
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
        attributes=_encodable(attributes),
        events=[Event(kind, _encodable(event_attributes), nanoseconds[1]) for kind, event_attributes in events],
        kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, text(error)) if error else Status(StatusCode.UNSET),
        start_time=nanoseconds[0],
        end_time=nanoseconds[1],
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _encodable(attributes: Attributes) -> Attributes:
    values = {text(key): value for key, value in attributes.items() if value is not None}
    return {key: text(value) if isinstance(value, str) else value for key, value in values.items()}


def _resource() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the name.
    return Resource({"service.name": "art"}).merge(OTELResourceDetector().detect())


def http_post(**settings: Any) -> tuple[Callable[[Sequence[ReadableSpan]], None], Callable[[], None]]:
    """Return a function that posts spans by OTLP over HTTP, and one that ends it.

    ``settings`` are endpoint, headers and compression; without them, OpenTelemetry's environment variables apply.
    """
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    session = requests.Session()
    failed: list[Exception] = []
    ask = session.request

    def once(method: str, url: str, **more: Any) -> requests.Response:
        """Send one request, and raise for failures, so that the exporter does not retry them: the outbox does."""
        try:
            answer = ask(method, url, **more)
            if not 200 <= answer.status_code < 300:
                # Redacted before it is truncated: half a key would not be recognized.
                sent = answer.request.headers.get("Authorization", "").split()
                raise_for(answer.status_code, f"{url}: {without_keys(answer.text, *sent)[:200]}", answer.headers)
        except requests.RequestException as error:  # the connection failed, perhaps in the middle of the answer
            failed.append(Temporary(f"{url} cannot be reached, or drops connections: {type(error).__name__}"))
            raise failed[-1] from error
        except (Temporary, Refused, Denied) as error:
            failed.append(error)
            raise
        return answer

    session.request = once  # type: ignore[method-assign]
    exporter = OTLPSpanExporter(session=session, **settings)

    def post(spans: Sequence[ReadableSpan]) -> None:
        failed.clear()
        message = _export(exporter, spans)
        if message is not None:
            raise failed[-1] if failed else Refused(message)

    return post, exporter.shutdown


def _export(exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> str | None:
    """Export spans; return None on success, else the exporter's log message, which is not logged as our errors include it."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    messages, thread = ["the exporter does not say why"], threading.get_ident()

    def intercept(record: logging.LogRecord) -> bool:
        if record.thread == thread:  # other threads may have their own exporters
            messages.append(record.getMessage())
        return record.thread != thread

    modules = {
        kind.__module__ for kind in type(exporter).__mro__ if kind.__module__.startswith("opentelemetry.exporter.")
    }
    loggers = [logging.getLogger(module) for module in modules]
    for logger in loggers:
        logger.addFilter(intercept)
    try:
        return None if exporter.export(spans) is SpanExportResult.SUCCESS else messages[-1]
    finally:
        for logger in loggers:
            logger.removeFilter(intercept)


def environment_post() -> tuple[Callable[[Sequence[ReadableSpan]], None], Callable[[], None]]:
    """Return a function that posts spans as OpenTelemetry's environment variables say, and one that ends it."""
    if _protocol() == "http/protobuf":
        return http_post()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter()

    def post(spans: Sequence[ReadableSpan]) -> None:
        message = _export(exporter, spans)
        if message is not None:
            raise Temporary(message)

    return post, exporter.shutdown


def check_environment() -> None:
    """Raise ConfigError if OpenTelemetry's environment variables set no address, or a protocol that is not supported."""
    if not any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")):
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is not set, so there is nowhere to send spans to; set it to a collector's address, such "
            "as http://127.0.0.1:4318, and OTEL_EXPORTER_OTLP_HEADERS if it needs a key"
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
