"""``art gateway --route`` as a process, and ``art route`` beside it."""

import asyncio
import json
import re
import signal
import sys

import aiohttp
import pytest
import typer
from typer.testing import CliRunner

import art_core as art
import art_gateway
from art_core.capture import HttpUpstream
from art_core.errors import ConfigError
from art_core.store import Store
from art_gateway.canary.gateway import CanaryGateway
from art_gateway.canary.routes import Candidate
from art_gateway.canary.trial import Rule
from art_gateway.text import TextUpstream
from bench import canary

CODE = "import typer; from art_gateway.command import gateway; typer.run(gateway)"
CANDIDATE = ["--record-text", "--route", "mine=5%"]
LIVE = ["--upstream", "live=https://a/v1"]


def art_command(*arguments):
    app = typer.Typer()
    art_gateway.register_commands(app)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})


def refusal(*arguments):
    """What a command that is refused prints, in one line."""
    refused = art_command(*arguments)
    assert refused.exit_code == 2, refused.output
    return " ".join(refused.output.split())


async def started(provider, upstream, folder, *options):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, "--record-text", "--upstream", f"live={provider.base_url}", "--upstream",
        f"mine={upstream.url}", "--port", "0", "--run-dir", str(folder), *options, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = (await process.stderr.readline()).decode()
    assert upstream.url in line and "for mine" in line
    return process, re.search(r"http://127\.0\.0\.1:\d+", line)[0]


async def ask(client, address, conversation):
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "Please do task-001."}]}
    async with client.post(f"{address}/rollouts/{conversation}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["message"]["content"]


@pytest.mark.system
async def test_a_killed_gateway_continues_with_the_share_that_it_had(provider, upstream, tmp_path):
    process, address = await started(provider, upstream, tmp_path, "--route", "mine=100%")
    async with aiohttp.ClientSession() as client:
        assert await ask(client, address, "first") == "Please do task-001."
        changed = await asyncio.to_thread(art_command, "route", address, "--rollback", "--why", "it is rude")
        assert changed.exit_code == 0, changed.output
        assert "mine answers 0% of the conversations" in changed.output and "because it is rude" in changed.output
        assert await ask(client, address, "second") == "answer to task-001"
        process.kill()
        await process.communicate()
        process, address = await started(provider, upstream, tmp_path, "--route", "mine=100%")
        assert await ask(client, address, "third") == "answer to task-001"
        shown = await asyncio.to_thread(art_command, "route", address, "--json")
        assert [change["share"] for change in json.loads(shown.output)["history"]] == [1, 0]
    process.terminate()
    await process.communicate()
    splits = {
        run.rollout_id: split for split in ("mine", "live") for run in art.load_trajectories(tmp_path, split=split)
    }
    assert splits == {"first": "mine", "second": "live", "third": "live"}


async def test_the_comparison_is_shown_with_what_is_known(provider, upstream, start):
    candidate = Candidate("mine", HttpUpstream(upstream.url), 0.5, rule=Rule((0.5, 0.75)))
    options = {"upstreams": [TextUpstream(provider.base_url)], "kind": CanaryGateway, "candidate": candidate}
    async with start(**options) as desk:
        nothing = await asyncio.to_thread(art_command, "route", desk.url)
        assert "score of mine less that of live: not known yet" in nothing.output
        for number in range(20):
            await ask(desk.client, desk.url, f"c{number}")
            await desk.order("POST", "/feedback", {"conversation": f"c{number}", "score": 0.5})
        await desk.gateway.routes.update()
        shown = (await asyncio.to_thread(art_command, "route", desk.url)).output
    assert re.search(r"mean score +│ 0.500 +│ 0.500", shown), shown
    assert "score of mine less that of live: +0.000, between" in shown and "failed calls of mine: 0.0%" in shown
    assert "next: 75%" in shown


@pytest.mark.system
async def test_the_comparison_is_followed_until_ctrl_c(provider, upstream, start):
    candidate = Candidate("mine", HttpUpstream(upstream.url), 0.5, rule=Rule((0.5, 0.75)))
    options = {"upstreams": [TextUpstream(provider.base_url)], "kind": CanaryGateway, "candidate": candidate}
    code = "import typer; from art_gateway.canary.command import route; typer.run(route)"
    async with start(**options) as desk:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, desk.url, "--follow", stdout=asyncio.subprocess.PIPE
        )
        assert b"mine: 50%, 0 scores (of live: 0), difference not known yet" in await process.stdout.readline()
        changed = await asyncio.to_thread(art_command, "route", desk.url, "--set", "20%")
        assert changed.exit_code == 0, changed.output
        assert b"mine: 20%, 0 scores" in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert (await process.communicate())[0] == b"" and process.returncode == 0


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--route", "mine=5%"], "add --record-text"),
        (CANDIDATE, "pass two upstreams"),
        ([*CANDIDATE, *LIVE], "pass two upstreams"),
        (["--record-text", "--route", "mine=5"], "pass two upstreams"),
        (["--record-text", "--ramp", "50%"], "--ramp needs --route"),
        ([*CANDIDATE, *LIVE, "--upstream", "mine=http://127.0.0.1:1"], "isn't a base URL ending in /v1"),
        ([*CANDIDATE, *LIVE, "--upstream", "mine=tiny", "--model", "m"], "needs no --model"),
    ],
)
def test_what_is_missing_for_a_candidate_is_said(options, advice):
    assert advice in refusal("gateway", *options)


@pytest.mark.parametrize(
    "options",
    [
        ["--record-text", "--upstream", "https://a.example/openai?key=SECRET"],
        ["--record-text", "--upstream", "https://user:SECRET@a.example/v1#SECRET"],
        ["--upstream", "http://127.0.0.1:1/v1?key=SECRET/v1"],
        [*CANDIDATE, "--upstream", "live=https://a/v1?key=SECRET", "--upstream", "mine=http://127.0.0.1:1/v1"],
        [*CANDIDATE, *LIVE, "--upstream", "mine=http://127.0.0.1:1/v1?key=SECRET"],
    ],
)
def test_an_upstream_with_a_query_is_refused_without_showing_it(options):
    said = refusal("gateway", *options)
    assert "has a query" in said and "--upstream-api-key" in said and "SECRET" not in said


@pytest.mark.parametrize(
    ("route", "ramp", "advice"),
    [
        ("mine=5", "", "isn't a share"),
        ("mine=500%", "", "isn't a share"),
        ("mine=5%", "50%,25%", "must increase"),
        ("mine=5%", "5%", "must increase"),
        ("mine=0%", "5%", "must increase"),
        ("mine=5%", "50%,100%", "must increase"),
        ("mine=5%", "50", "isn't a share"),
    ],
)
def test_a_share_that_is_none_is_refused(route, ramp, advice):
    upstreams = [*LIVE, "--upstream", "mine=http://127.0.0.1:1/v1"]
    options = ["--route", route, *(["--ramp", ramp] if ramp else [])]
    assert advice in refusal("gateway", "--record-text", *upstreams, *options)


async def test_a_gateway_without_a_candidate_says_how_to_start_one(start):
    async with start() as desk:
        said = await asyncio.to_thread(refusal, "route", desk.url)
    assert "start it with --record-text and --route" in said


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://127.0.0.1:port", "nowhere"])
def test_no_gateway_at_an_address_is_an_error(address):
    assert "no gateway answers" in refusal("route", address)


def test_a_run_folder_without_a_checkpoint_is_not_served(tmp_path):
    Store(tmp_path / "run.sqlite").close()
    refused = art_command("gateway", "--model", str(tmp_path), "--port", "0")
    assert isinstance(refused.exception, ConfigError) and "without a checkpoint" in str(refused.exception)


@pytest.mark.system
def test_no_call_fails_while_everything_around_a_gateway_changes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["canary", "--rounds", "0", "--calls", "400"])
    canary.main()
    said = capsys.readouterr().out
    calls, failed, recorded = re.search(r"(\d+) calls: (\d+) failed, \d+ sent again, (\d+) recorded", said).groups()
    assert failed == "0" and int(recorded) >= int(calls) >= 400
