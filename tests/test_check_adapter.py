"""The conformance kit: adapters that keep the rules pass, and each kind of broken one gets a message that names the fix."""

import asyncio
import json
import socket
import subprocess
import sys
from types import ModuleType

import httpx
import pytest
from openai_agents import TOOL, asynchronous, blocking, streaming, structured, with_tools

import art_openai
from art_core import destination, hookimpl
from art_core.errors import ConfigError
from art_core.testing import AdapterError, AdapterReport, adapter_rules, check_adapter, scripted_reply
from art_core.testing.conformance import KINDS
from art_core.types import Call, Trajectory
from framework_table import assert_documented, failing, nested, threaded, user

pytestmark = pytest.mark.usefixtures("not_at_the_wire")  # or it would send what a broken adapter lets go


@pytest.mark.system
@pytest.mark.usefixtures("trap_network")
async def test_functions_that_use_the_openai_client_keep_every_rule():
    agents = {
        "sync": blocking,
        "async": asynchronous,
        "stream": streaming,
        "tools": with_tools,
        "structured output": structured,
        "threads": threaded(blocking),
        "nested agents": nested(asynchronous, with_tools),
        "failing": failing(asynchronous),
    }
    report = await check_adapter(agents, framework="OpenAI client", plugin=art_openai, packages=["openai"])
    assert str(report) == "| OpenAI client | yes | yes | yes | yes | yes | yes | yes |"
    assert_documented(report)
    assert report.kinds == dict.fromkeys(KINDS, "yes")
    assert report.checks == {"agent names": "not tested", "light import": "yes"}
    assert (report.runs, report.calls) == (8 * 17, 16 * (1 + 1 + 1 + 2 + 1 + 2 + 3 + 1))


class Mine:
    """A framework with one agent and its own client; subclasses of its plugin break one rule each."""

    def __init__(self, base_url):
        self.base_url = base_url

    async def ask(self, text, **more):
        return await Mine.send(self.base_url, {}, {"model": "m", "messages": user(text), **more})

    async def run(self, text):
        return (await self.ask(text))["choices"][0]["message"]["content"]

    async def send(base_url, headers, body):
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            answer = await client.post(f"{base_url}/chat/completions", headers=headers, json=body)
        if answer.is_error:
            raise ConnectionError(answer.text)
        return answer.json()


SEND = Mine.send


class Plugin:
    """A plugin that keeps every rule."""

    @hookimpl
    def adapt_agent(self, agent):
        return self.adapted(agent) if isinstance(agent, Mine) else None

    @hookimpl
    def redirect_clients(self):
        async def redirected(base_url, headers, body):
            address = destination(body["model"])
            if address is None:
                return await SEND(base_url, headers, body)
            return await self.redirect(address, base_url, headers, body)

        Mine.send = redirected

    def adapted(self, agent):
        async def run(task_input, address):
            return await agent.run(task_input)

        return run

    async def redirect(self, address, base_url, headers, body):
        return await SEND(address.base_url, headers, body)


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setattr(Mine, "send", SEND)

    async def violations(plugin, agents=Mine, **settings):
        try:
            await check_adapter(agents, framework="mine", plugin=plugin, **settings)
        except AdapterError as error:
            return str(error)
        return ""

    return violations


async def test_a_plugin_for_a_framework_with_its_own_client_passes(check):
    assert await check(Plugin()) == ""


@pytest.mark.system
async def test_calls_that_are_not_redirected_are_reported(check):
    class Loses(Plugin):
        async def redirect(self, address, base_url, headers, body):
            return await SEND(base_url, headers, body)

    message = await check(Loses())
    assert "model calls of rollouts were not redirected" in message
    assert "0 were recorded in a rollout" in message


async def test_an_adapter_that_returns_nothing_is_reported(check):
    class Silent(Plugin):
        def adapted(self, agent):
            async def run(task_input, address):
                await agent.run(task_input)

            return run

    assert "the agent returned None, so results can't be compared" in await check(Silent())


async def test_an_adapter_that_takes_any_agent_is_reported(check):
    class Greedy(Plugin):
        @hookimpl
        def adapt_agent(self, agent):
            return self.adapted(agent)

    message = await check(Greedy())
    assert "adapt_agent adapts <object object" in message and "adapt_agent adapts <function" in message


@pytest.mark.system
async def test_an_adapter_that_sends_twice_is_reported(check):
    class SendsTwice(Plugin):
        async def redirect(self, address, base_url, headers, body):
            await SEND(address.base_url, headers, body)
            return await SEND(address.base_url, headers, body)

    class SendsTheSameTwice(Plugin):
        async def redirect(self, address, base_url, headers, body):
            headers = {"x-art-request-id": f"of {body['messages'][0]['content']}"}
            await SEND(address.base_url, headers, body)
            return await SEND(address.base_url, headers, body)

    assert "1 model calls with a plain provider, but 2 were recorded" in await check(SendsTwice())
    assert "send a new x-art-request-id with every call" in await check(SendsTheSameTwice())


async def test_an_adapter_that_mixes_runs_is_reported(check):
    class Mixes(Plugin):
        newest = None

        def adapted(self, agent):
            async def run(task_input, address):
                self.newest = address
                await asyncio.sleep(0.01)
                return await agent.run(task_input)

            return run

        async def redirect(self, address, base_url, headers, body):
            return await SEND(self.newest.base_url, headers, body)

    assert "has calls of other rollouts (task-" in await check(Mixes())


@pytest.mark.system
async def test_results_that_belong_to_other_runs_are_reported(check):
    class Shares(Plugin):
        def adapted(self, agent):
            async def run(task_input, address):
                self.output = await agent.run(task_input)
                await asyncio.sleep(0.2)
                return self.output

            return run

    assert "returned data of other rollouts" in await check(Shares())


@pytest.mark.system
async def test_an_adapter_that_swallows_failures_is_reported(check):
    class Swallows(Plugin):
        def adapted(self, agent):
            async def run(task_input, address):
                try:
                    return await agent.run(task_input)
                except ConnectionError:
                    return None

            return run

    class Renames(Plugin):
        def adapted(self, agent):
            async def run(task_input, address):
                try:
                    return await agent.run(task_input)
                except ConnectionError as error:
                    if address.rollout_id == "plain":
                        raise
                    raise RuntimeError("failed") from error

            return run

    assert "returned a result instead of raising" in await check(Swallows())
    assert "raises ConnectionError" in await check(Renames())


@pytest.mark.system
async def test_an_adapter_that_changes_the_result_or_the_request_is_reported(check):
    class ChangesResult(Plugin):
        async def redirect(self, address, base_url, headers, body):
            answer = await SEND(address.base_url, headers, body)
            answer["choices"][0]["message"]["content"] += "!"
            return answer

    class ChangesRequest(Plugin):
        async def redirect(self, address, base_url, headers, body):
            return await SEND(address.base_url, headers, body | {"max_tokens": 3})

    assert "return the agent's result unchanged" in await check(ChangesResult())
    assert "don't rewrite them" in await check(ChangesRequest())


@pytest.mark.system
async def test_an_adapter_that_runs_agents_in_turn_is_reported(check, monkeypatch):
    monkeypatch.setattr("art_core.testing.conformance.WatchedEngine.WAIT", 0.5)

    class Turns(Plugin):
        def adapted(self, agent):
            lock = asyncio.Lock()

            async def run(task_input, address):
                async with lock:
                    return await agent.run(task_input)

            return run

    assert "rollouts took turns" in await check(Turns())


async def test_a_plugin_that_touches_calls_outside_a_rollout_is_reported(check):
    class Touches(Plugin):
        @hookimpl
        def redirect_clients(self):
            async def touched(base_url, headers, body):
                address = destination(body["model"])
                to = base_url if address is None else address.base_url
                return await SEND(to, {"x-art-request-id": "1" if address is None else str(id(body))}, body)

            Mine.send = touched

    message = await check(Touches())
    assert "outside a rollout carries x-art-request-id" in message
    assert "requests have changed since redirect_clients" in message


def test_a_call_that_was_cut_off_is_reported():
    call = Call(prompt_ids=(1,), sampled_ids=(), logprobs=(), finish_reason="aborted")
    (message,) = adapter_rules.ledger(Trajectory(task="task-001", calls=(call,)), logprob=-0.5)
    assert "call 1 of the rollout of 'task-001' was cut off: read every stream to its end" in message


async def test_agents_that_are_not_of_their_kind_are_reported(check):
    message = await check(
        Plugin(), dict.fromkeys(["stream", "tools", "structured output", "nested agents", "failing"], Mine)
    )
    assert "[stream] no call was streamed" in message
    assert "[tools] the model was offered no tool" in message
    assert "[structured output] no call requested a schema" in message
    assert "[nested agents] 1 calls were recorded" in message
    assert "[failing] its own exception did not fail the agent" in message


def in_a_thread(base_url):
    """An agent that blocks in one thread that it starts."""
    ask = blocking(base_url)

    async def agent(text):
        return await asyncio.to_thread(ask, text)

    return agent


@pytest.mark.system
async def test_an_agent_that_awaits_is_neither_blocking_nor_in_threads(check, monkeypatch):
    monkeypatch.setattr("art_core.testing.conformance.WatchedEngine.WAIT", 0.5)
    message = await check(art_openai, dict.fromkeys(["sync", "threads"], asynchronous), runs=2)
    assert "[sync] every call was made on the event loop's thread" in message
    assert "[threads] calls were made from 0 threads" in message


@pytest.mark.system
async def test_an_agent_that_blocks_has_no_threads_of_its_own(check, monkeypatch):
    monkeypatch.setattr("art_core.testing.conformance.WatchedEngine.WAIT", 0.5)
    for one_thread in (blocking, in_a_thread):
        message = await check(art_openai, dict.fromkeys(["sync", "threads"], one_thread), runs=2)
        assert "[threads] calls were made from 1 threads" in message
        assert "[sync]" not in message


@pytest.mark.system
async def test_watching_the_callers_restores_the_socket_class(check, monkeypatch):
    inherited = socket.socket.connect
    assert await check(art_openai, {"async": asynchronous}, runs=2) == ""
    assert "connect" not in vars(socket.socket)
    theirs = lambda self, address: inherited(self, address)  # noqa: E731
    monkeypatch.setattr(socket.socket, "connect", theirs)
    assert await check(art_openai, {"async": asynchronous}, runs=2) == ""
    assert socket.socket.connect is theirs


async def test_missing_names_of_agents_are_reported(check):
    class Pair(Mine):
        async def run(self, text):
            return await super().run(await super().run(text))

    message = await check(Plugin(), {"nested agents": Pair}, agent_names=["writer"])
    assert "Call.agent shows ['None'], but ['writer'] were expected" in message


async def test_a_rewritten_history_is_reported(check):
    class Rewrites(Mine):
        async def run(self, text):
            answer = await self.ask(text, tools=[TOOL])
            message = answer["choices"][0]["message"]
            call = message["tool_calls"][0]
            call["function"]["arguments"] = call["function"]["arguments"].upper()
            result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
            body = {"model": "m", "messages": [*user(text), message, result], "tools": [TOOL]}
            return (await Mine.send(self.base_url, {}, body))["choices"][0]["message"]["content"]

    assert "does not extend the tokens before it" in await check(Plugin(), {"tools": Rewrites})


async def test_all_broken_rules_are_reported_at_once_and_by_kind(check):
    class Loses(Plugin):
        async def redirect(self, address, base_url, headers, body):
            return await SEND(base_url, headers, body)

    with pytest.raises(AdapterError) as caught:
        await check_adapter({"async": Mine, "tools": Mine}, framework="mine", plugin=Loses())
    kinds = {text.partition(" ")[0] for text in caught.value.violations}
    assert kinds == {"[async]", "[tools]"} and len(caught.value.violations) > 3
    assert str(caught.value).splitlines()[0].startswith("the adapter of mine: ")


@pytest.mark.system
async def test_a_plugin_that_imports_its_framework_is_reported(tmp_path, monkeypatch):
    (tmp_path / "art_heavy_mine.py").write_text("import sqlite3.dump\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError, match="importing art_heavy_mine imports sqlite3"):
        await check_adapter(
            asynchronous, framework="x", plugin=ModuleType("art_heavy_mine"), packages=["sqlite3"], runs=2
        )
    with pytest.raises(AdapterError, match="importing art_gone alone fails: ModuleNotFoundError"):
        await check_adapter(asynchronous, framework="x", plugin=ModuleType("art_gone"), packages=["sqlite3"], runs=2)


async def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"\['asynk'\]; the kinds of agent are: sync, async"):
        await check_adapter({"asynk": asynchronous}, framework="x")


def test_the_report_is_a_row_under_its_header():
    report = AdapterReport("mine", {kind: "not tested" for kind in KINDS} | {"async": "yes"}, {}, runs=17, calls=16)
    header = AdapterReport.header().splitlines()
    assert header[0] == "| framework | sync | async | stream | tools | structured output | threads | nested agents |"
    assert header[0].count("|") == header[1].count("|") == str(report).count("|")


def test_the_script_fills_schemas_and_calls_every_tool_once():
    schema = {
        "$defs": {"kind": {"enum": ["a", "b"]}},
        "type": "object",
        "properties": {
            "kind": {"$ref": "#/$defs/kind"},
            "names": {"type": "array", "items": {"type": "string"}},
            "age": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
        },
    }
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = scripted_reply({"messages": user("task-001"), "response_format": formatted})
    assert json.loads(reply["content"]) == {"kind": "a", "names": ["task-001"], "age": 3}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]}
    asked = {"messages": [*user("x"), called], "tools": [TOOL]}
    assert scripted_reply(asked)["content"] == "answer to no task"
    assert scripted_reply(asked | {"tool_choice": "required"})["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.system
def test_importing_the_kit_is_light():
    code = "import art_core.testing, sys; assert not {'torch', 'openai', 'langchain_core'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
