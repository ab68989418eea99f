"""Rollouts with an event loop each share one async client, as sync agents with a client of their module do."""

import asyncio
import gc
import weakref

import anthropic
import httpx
import httpx2
import ollama
import pytest
from http_server import serving
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
import art_http
from art_core.plugin_api import inside_rollout
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import RolloutAddress
from framework_table import user

CHAT = "https://api.groq.com/openai/v1/chat/completions"
BODY = {"model": "m", "messages": user("hi")}


def asking(library):
    """One client of ``library``, and what asks with it twice."""
    client = library.AsyncClient(timeout=60)

    async def ask(task):
        answers = [(await client.post(CHAT, json=BODY)).raise_for_status().json() for _ in range(2)]
        return answers[1]["choices"][0]["message"]["content"]

    return ask


def asking_anthropic():
    client = anthropic.AsyncAnthropic(api_key="k")

    async def ask(task):
        asked = {"model": "m", "max_tokens": 9, "messages": user("hi")}
        return [(await client.messages.create(**asked)).content[0].text for _ in range(2)][1]

    return ask


def asking_ollama():
    client = ollama.AsyncClient("http://127.0.0.1:1")

    async def ask(task):
        return [(await client.chat("m", user("hi"))).message.content for _ in range(2)][1]

    return ask


CLIENTS = {
    "httpx": lambda: asking(httpx),
    "httpx2": lambda: asking(httpx2),
    "anthropic": asking_anthropic,
    "ollama": asking_ollama,
}


@pytest.mark.parametrize("max_concurrent", [1, 8])
@pytest.mark.parametrize("client", CLIENTS)
async def test_every_rollout_records_its_own_calls_and_no_other(tmp_path, client, max_concurrent):
    ask, settings = CLIENTS[client](), {"engine": FakeEngine("four"), "learner": CountingLearner()}
    async with art.open_run(tmp_path / "run", max_concurrent=max_concurrent, **settings) as run:
        [group] = await run.collect(lambda task: asyncio.run(ask(task)), ["a"], group_size=8)
    assert [(each.error, each.output, len(each.calls)) for each in group.trajectories] == [(None, "four", 2)] * 8


def run_and_close(ask):
    asyncio.run(ask)


def run_and_drop(ask):
    asyncio.new_event_loop().run_until_complete(ask)


AS_WITHOUT_ART = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("run", [run_and_close, pytest.param(run_and_drop, marks=AS_WITHOUT_ART)])
def test_a_loop_takes_its_connections_along(run):
    ask, loops = asking(httpx), weakref.WeakSet()

    async def noting():
        loops.add(asyncio.get_running_loop())
        return await ask("a")

    answer = {"choices": [{"message": {"content": "four"}}]}
    art_http.redirect_clients()
    answering = Route("/{path:path}", lambda _: JSONResponse(answer), methods=["POST"])
    with serving(answering) as url, inside_rollout(RolloutAddress("r1", f"{url}/rollouts/r1/v1", "key", "policy")):
        for _ in range(3):
            run(noting())
    gc.collect()
    assert len(loops) == 0
