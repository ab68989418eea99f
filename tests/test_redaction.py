"""Text that is shown contains no key, no password and no terminal control characters."""

import io

import pytest
from recorded_runs import short_call
from rich.console import Console

from art_cli.summary import print_trajectory
from art_core.loop.display import Display
from art_core.redaction import describe_error, printable, without_access, without_keys
from art_core.types import Trajectory

ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;cm0=\x1b\\", "\x9b31m", "\b\b\b", "\r", "\x00"]


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PASSWORD", "MYAPIKEY"]
)
def test_a_key_from_the_environment_is_hidden_whatever_its_service(monkeypatch, name):
    monkeypatch.setenv(name, "q7-hidden-0123456789")
    assert without_keys("Incorrect API key provided: q7-hidden-0123456789.") == "Incorrect API key provided: ***."
    assert describe_error(RuntimeError("401: 'Bearer q7-hidden-0123456789'")) == "RuntimeError: 401: 'Bearer ***'"


def test_values_that_are_not_keys_stay(monkeypatch, tmp_path):
    path = tmp_path / "key.json"
    path.touch()
    plain = {"TOKENIZERS_PARALLELISM": "false-but-long", "GOOGLE_APPLICATION_CREDENTIALS": str(path), "MY_KEY": "short"}
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
    text = f"false-but-long {path} short"
    assert without_keys(text) == text


def test_a_key_that_begins_like_a_path_is_hidden(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/AbCdEf0123456789+x")
    assert without_keys("refused: /AbCdEf0123456789+x") == "refused: ***"


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization=Bearer q7-hidden-0123456789,x-org=acme",
        "Authorization=Bearer%20q7-hidden-0123456789,x-org=acme",
        "X-Org: acme\nAuthorization: Bearer q7-hidden-0123456789",
        '{"Authorization": "Bearer q7-hidden-0123456789"}',
    ],
)
def test_a_key_in_a_header_variable_is_hidden_with_and_without_its_header(monkeypatch, headers):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    shown = without_keys("Authorization: Bearer q7-hidden-0123456789; 'q7-hidden-0123456789' is wrong")
    assert shown == "Authorization: Bearer ***; '***' is wrong"


@pytest.mark.parametrize("name", ["api_tokens", "ACCESS_TOKENS", "tokens", "hf-token", "HF_TOKEN"])
def test_settings_that_hold_tokens_are_left_out_and_those_that_count_them_stay(name):
    counted = {"max_tokens": "8k", "num-tokens": "2", "min_tokens": "1", "tokens_seen": 7, "tokenizer": "slow"}
    assert without_access({name: "x", **counted}) == {name: "left out", **counted}


def test_a_key_that_is_part_of_another_leaves_no_remains(monkeypatch):
    monkeypatch.setenv("A_KEY", "0123456789")
    monkeypatch.setenv("B_KEY", "0123456789-and-more")
    assert without_keys("0123456789-and-more 0123456789") == "*** ***"
    assert without_keys("passed-by-argument", "passed-by-argument", None, "") == "***"


def test_addresses_are_shown_without_passwords():
    error = "http://me:se%40cret@host:1/v1 and https://t0ken@there refused a@b, see //x@y"
    assert without_keys(error) == "http://host:1/v1 and https://there refused a@b, see //x@y"
    settings = {
        "frozen_model": "http://me:secret@host/v1",
        "args": {"hf-token": "x", "max-num-batched-tokens": "8k", "list": ["s://u@h"]},
    }
    shown = {
        "frozen_model": "http://host/v1",
        "args": {"hf-token": "left out", "max-num-batched-tokens": "8k", "list": ["s://h"]},
    }
    assert without_access(settings) == shown


@pytest.mark.parametrize("escape", ESCAPES, ids=repr)
def test_control_characters_of_an_agent_do_not_reach_the_terminal(escape):
    text, out = f"before {escape}after [red]not red[/red] [/nothing]", io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=200)
    answer = {"role": f"assistant{escape}", "content": text}
    call = short_call(request={"messages": [{"role": "user", "content": text}]}, response=answer)
    run = Trajectory("t", (call,), error=text, metrics={f"m{escape}": 1.0}, notes={f"n{escape}": text})
    print_trajectory(run, "title", console)
    Display(console=console).say(text)
    for name in ESCAPES:
        assert name not in out.getvalue()
    assert out.getvalue().count("[red]not red[/red] [/nothing]") == 5
    assert printable("two\tlines\nstay") == "two\tlines\nstay"
