"""One HTTP request and its answer: bodies and their limit, errors, and which of them may be retried."""

import asyncio
import json
import logging
import math

import pytest
from asgi import Asked

from art_core.capture import Dialect
from art_core.capture.http import Exchange, Refused, error_line
from art_core.errors import StoreError, UpstreamError

log = logging.getLogger("test_http_exchange")


def exchange_of(asked: Asked) -> Exchange:
    return Exchange(asked.scope, asked.receive, asked.send)


async def failed(error: Exception) -> Asked:
    """What a client gets where ``error`` is raised before anything is answered."""
    asked = Asked()
    exchange = exchange_of(asked)
    async with exchange.answering_errors(log, "a call failed"):
        raise error
    assert exchange.started and exchange.finished
    return asked


def test_headers_are_read_by_name():
    exchange = exchange_of(Asked(path="/x", method="GET", headers={"a": "1", "b": "\xe4"}))
    assert (exchange.method, exchange.path, exchange.headers) == ("GET", "/x", {"a": "1", "b": "\xe4"})
    assert (exchange.started, exchange.finished) == (False, False)


def test_a_name_is_percent_decoded_and_none_if_its_header_is_missing_or_empty():
    exchange = exchange_of(Asked(headers={"x-art-agent": "b%C3%BCro/a%20b", "x-art-thread": ""}))
    names = [exchange.name(header) for header in ("x-art-agent", "x-art-thread", "x-art-run")]
    assert names == ["b\u00fcro/a b", None, None]


@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"a", b"", b"bc"], [b"abcd", b"e"]], ids=repr)
async def test_a_body_is_joined_from_its_parts(parts):
    assert await exchange_of(Asked(parts)).body(5) == b"".join(parts)


@pytest.mark.parametrize("promised", [None, "6", "1", "-1", "six"])
@pytest.mark.parametrize("parts", [[b"abcdef"], [b"abcde", b"f"], [b"abcdef", b"g"]], ids=repr)
async def test_a_body_beyond_the_limit_is_read_to_its_end_and_refused(parts, promised):
    asked = Asked(parts, headers={} if promised is None else {"content-length": promised})
    size = len(b"".join(parts))
    with pytest.raises(Refused, match=f"has {size} bytes; the limit is 5") as refusal:
        await exchange_of(asked).body(5)
    assert refusal.value.status == 413 and not asked._left


async def test_a_body_of_exactly_the_limit_is_accepted():
    assert await exchange_of(Asked(b"abcde", headers={"content-length": "5"})).body(5) == b"abcde"


async def test_a_disconnect_before_the_end_of_the_body_returns_none():
    asked = Asked([])
    asked.leave.set()
    assert await exchange_of(asked).body(5) is None


@pytest.mark.parametrize("length", ["9", "90"])
async def test_a_body_that_never_arrives_times_out(monkeypatch, length):
    monkeypatch.setattr("art_core.capture.http.BODY_SECONDS", 0.05)
    asked = Asked([b"a", b""], headers={"content-length": length})
    asked._left[-1]["more_body"] = True
    exchange = exchange_of(asked)
    async with asyncio.timeout(10), exchange.answering_errors(log, "a call failed"):
        await exchange.body(9)
    assert (asked.status, asked.told["x-should-retry"]) == (408, "false")
    assert asked.error["message"] == "the body of a request must arrive within 0.05 seconds"


async def test_a_disconnect_is_noticed_after_the_rest_of_the_body():
    asked = Asked([b"a", b"b"])
    gone = asyncio.create_task(exchange_of(asked).disconnected())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not gone.done() and not asked._left
    asked.leave.set()
    await gone


async def test_an_answer_is_json_with_its_length():
    asked = Asked()
    exchange = exchange_of(asked)
    await exchange.answer(201, {"a": "ä"}, ((b"x", b"y"),))
    assert (asked.status, asked.json) == (201, {"a": "ä"})
    assert asked.told == {
        "content-type": "application/json",
        "content-length": str(len('{"a":"ä"}'.encode())),
        "x": "y",
    }
    assert exchange.started and exchange.finished


async def test_events_are_sent_together_and_the_last_flush_ends_the_answer():
    asked = Asked()
    exchange = exchange_of(asked)
    exchange.event(b"a")
    exchange.event(b"b")
    assert asked.sent == [] and not exchange.started
    await exchange.flush()
    exchange.event(b"c")
    exchange.event(b"d")
    assert exchange.started and not exchange.finished
    await exchange.flush(last=True)
    assert exchange.finished
    assert (asked.status, asked.text) == (200, "abcd")
    assert [message["body"] for message in asked.sent[1:]] == [b"ab", b"cd"]
    assert asked.told == {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


async def test_a_stream_may_have_no_events():
    asked = Asked()
    await exchange_of(asked).flush(last=True)
    assert (asked.status, asked.text) == (200, "")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
async def test_an_error_has_openais_shape(status, kind):
    asked = await failed(UpstreamError("why", status=status, code="what"))
    assert asked.status == status
    assert asked.json == {"error": {"message": "why", "type": kind, "param": None, "code": "what"}}


@pytest.mark.parametrize(
    ("error", "again"),
    [
        *((UpstreamError("x", status=status), True) for status in (408, 409, 429, 500, 502, 503, 504)),
        *((UpstreamError("x", status=status), False) for status in (400, 401, 404, 413, 422, 501)),
        (UpstreamError("x", status=502, code="no_token_ids"), False),
        (Refused("x", status=409), False),
    ],
)
async def test_clients_are_told_not_to_retry_if_it_would_change_nothing(error, again):
    asked = await failed(error)
    assert asked.told.get("x-should-retry") == (None if again else "false")
    assert "retry-after" not in asked.told


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "0"), (1.2, "2"), (5.0, "5"), (math.inf, None), (None, None)])
async def test_retry_after_is_in_whole_seconds(seconds, told):
    asked = await failed(UpstreamError("x", status=429, retry_after=seconds))
    assert asked.told.get("retry-after") == told


async def test_a_store_error_is_a_503_without_retry():
    asked = await failed(StoreError("disk full"))
    assert (asked.status, asked.error["message"], asked.error["code"]) == (503, "disk full", "not_recorded")
    assert asked.told["x-should-retry"] == "false"


async def test_a_bug_is_a_500_with_its_name_and_a_logged_traceback(caplog):
    asked = await failed(ValueError("no such thing"))
    assert (asked.status, asked.error["message"], asked.error["code"]) == (500, "ValueError: no such thing", None)
    [record] = caplog.records
    assert (record.name, record.getMessage(), record.exc_info[0]) == ("test_http_exchange", "a call failed", ValueError)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UpstreamError("too\n  many", status=429, code="slow_down"), "429 slow_down: too many"),
        (UpstreamError("why", status=404), "404 why"),
        (ValueError("no such thing"), "500 no such thing"),
        (ValueError("x" * 600), "500 " + "x" * 496),
    ],
)
def test_an_error_is_one_line_of_at_most_500_characters(error, line):
    assert error_line(error) == line


async def test_an_error_after_the_whole_answer_is_dropped():
    asked = Asked()
    exchange = exchange_of(asked)
    async with exchange.answering_errors(log, "a call failed"):
        await exchange.answer(200, {})
        raise UpstreamError("too late")
    assert (asked.status, asked.json) == (200, {})


async def test_inside_a_stream_an_error_is_the_last_event():
    asked = Asked()
    exchange = exchange_of(asked)
    async with exchange.answering_errors(log, "a call failed"):
        exchange.event(b"data: {}\n\n")
        await exchange.flush()
        raise UpstreamError("why", status=502, code="what")
    assert asked.status == 200
    said = {"message": "why", "type": "server_error", "param": None, "code": "what"}
    assert asked.events == [{}, {"error": said}]


@pytest.mark.parametrize("kind", [str, bytes])
async def test_errors_have_the_dialects_shape(kind):
    class Other(Dialect):
        def error(self, *said):
            return {"said": said}

        def error_event(self, *said):
            event = f"event: error\ndata: {json.dumps(said)}\n\n"
            return event if kind is str else event.encode()

    asked, streamed = Asked(), Asked()
    for each in (asked, streamed):
        exchange = exchange_of(each)
        exchange.dialect = Other()
        async with exchange.answering_errors(log, "a call failed"):
            if each is streamed:
                await exchange.flush()
            raise UpstreamError("why", status=418, code="what")
    assert (asked.status, asked.json) == (418, {"said": ["why", 418, "what"]})
    assert streamed.text == 'event: error\ndata: ["why", 418, "what"]\n\n'
