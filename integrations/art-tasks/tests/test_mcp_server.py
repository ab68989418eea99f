"""The connection to an MCP server: by command and by URL, and what happens if the server is slow, broken or gone."""

import asyncio
import os
import pickle
import signal
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("mcp")

import mcp_url
from mcp_url import at_url

from art_core.errors import AgentError, ConfigError
from art_tasks.mcp import Server, connection

HERE = Path(__file__).parent
WEATHER, ODD = (f"{sys.executable} {HERE / name}" for name in ("mcp_weather.py", "mcp_odd.py"))
pytestmark = pytest.mark.system


async def test_tools_and_resources_are_listed_and_called():
    server = Server(WEATHER)
    tools = {tool["function"]["name"]: tool["function"] for tool in await server.tools()}
    assert tools["rainy_days"]["description"] == "Return the rainy days in a year."
    assert tools["rainy_days"]["parameters"]["required"] == ["city"]
    assert await server.resources() == ({"weather://cities": "Rome, Bergen, Cairo"}, 0)
    assert await server.call("rainy_days", {"city": "Rome"}) == "79"


async def test_all_pages_of_a_list_are_read():
    assert [tool["function"]["name"] for tool in await Server(ODD).tools()] == ["first", "second", "third"]


async def test_resources_are_kept_if_they_are_text_and_counted_if_they_cannot_be_read():
    texts, unread = await Server(ODD).resources()
    assert list(texts) == ["odd://text", "odd://long"] and unread == 1
    assert texts["odd://text"] == "short" and texts["odd://long"].endswith("long \n[... 3000 more characters]")


async def test_a_result_shows_the_text_of_resources_and_names_everything_else():
    assert await Server(ODD).call("first", {}) == "the text inside\n[resource_link odd://more]\n[image]"


async def test_a_server_without_tools_or_without_resources_has_none():
    assert await Server(f"{ODD} no-tools").tools() == []
    assert await Server(f"{ODD} slow").resources() == ({}, 0)


async def test_mistakes_of_the_model_are_answered_with_text():
    server = Server(WEATHER)
    for name, arguments in (("rainy_days", {"city": "Atlantis"}), ("rainy_days", {}), ("snow", {})):
        assert (await server.call(name, arguments)).startswith("Error: ")
    assert await server.call("rainy_days", {"city": "Cairo"}) == "4"


async def test_long_results_are_cut_off_and_say_so():
    text = await Server(WEATHER).call("history", {})
    assert len(text) < 8100 and text.endswith("[... 12000 more characters]")


async def test_a_command_gets_only_the_variables_that_are_named(monkeypatch):
    monkeypatch.setenv("WEATHER_KEY", "sun")
    assert await Server(WEATHER).call("key", {}) == "none"
    assert await Server(WEATHER, env=["WEATHER_KEY"]).call("key", {}) == "sun"
    with pytest.raises(ConfigError, match="variable NO_SUCH_KEY, which the MCP server should get, isn't set"):
        Server(WEATHER, env=["NO_SUCH_KEY"])


async def test_rollouts_share_a_process_and_one_that_ended_during_a_call_is_started_again():
    server = Server(WEATHER)
    assert [await server.call("note", {"text": "a"}) for _ in range(2)] == ["1 notes", "2 notes"]
    with pytest.raises(AgentError, match="ended or refused a request: Connection closed; it said:\ngood bye"):
        await server.call("leave", {})
    assert await server.call("note", {"text": "b"}) == "1 notes"


async def test_each_call_in_flight_is_told_that_the_server_ended():
    server = Server(WEATHER)
    await server.tools()
    results = await asyncio.gather(*(server.call("leave", {}) for _ in range(8)), return_exceptions=True)
    assert [type(it).__mro__[1] for it in results] == [AgentError] * 8


async def test_a_call_in_flight_is_told_so_if_another_one_loses_the_connection():
    refuses = []
    mcp_url.asked.clear()
    mcp_url.may_answer.clear()
    with at_url("token", refuses) as url:
        server = Server(url, headers={"Authorization": "Bearer token"})
        waiting = asyncio.create_task(server.call("forecast", {}))
        await asyncio.to_thread(mcp_url.asked.wait, 10)
        refuses.append(502)
        results = await asyncio.gather(waiting, server.call("rainy_days", {"city": "Rome"}), return_exceptions=True)
        mcp_url.may_answer.set()
    assert [isinstance(it, AgentError) for it in results] == [True, True], results


async def test_a_process_that_was_killed_between_calls_is_started_again():
    server = Server(ODD)
    first = int(await server.call("second", {}))
    os.kill(first, signal.SIGKILL)
    with pytest.raises(AgentError, match="ended or refused a request"):
        await server.call("second", {})
    assert int(await server.call("second", {})) != first


async def test_tools_are_listed_again_if_the_process_ended_meanwhile():
    server = Server(f"{ODD} leaves-once {uuid.uuid4()}")
    assert len(await server.tools()) == 3


async def test_bytes_that_are_no_text_and_results_without_text_do_no_harm():
    server = Server(WEATHER)
    assert await server.call("latin", {}) == "printed"
    assert await server.call("rainy_days", {"city": "Rome"}) == "79"
    assert await Server(ODD).call("third", {}) == '{"days": 79}'


async def test_a_tool_whose_name_providers_refuse_is_called_by_a_similar_one():
    server = Server(f"{ODD} names")
    assert [tool["function"]["name"] for tool in await server.tools()] == ["a_b_c"]
    assert await server.call("a_b_c", {}) == "called a.b/c"


async def test_a_server_that_was_used_can_be_pickled_without_its_keys(monkeypatch):
    monkeypatch.setenv("WEATHER_KEY", "sun-and-rain")
    server = Server(WEATHER, env=["WEATHER_KEY"])
    assert await server.call("key", {}) == "sun-and-rain"
    stored = pickle.dumps(server)
    assert b"sun-and-rain" not in stored and await pickle.loads(stored).call("key", {}) == "sun-and-rain"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-command x", "No such file"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no data\")'", "no data"),
    ],
)
async def test_a_server_that_does_not_start_is_named_with_what_it_printed(command, said):
    with pytest.raises(ConfigError, match="no connection to the MCP server") as raised:
        await Server(command).tools()
    assert said in str(raised.value)


async def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "START_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"it didn't start within 0\.2 s"):
        await Server(f"{sys.executable} -c 'import time; time.sleep(60)'").tools()


async def test_a_list_that_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(connection, "LIST_SECONDS", 0.2)
    with pytest.raises(AgentError, match=r"gave no answer within 0\.2 s"):
        await Server(f"{ODD} slow").tools()


async def test_a_url_is_called_with_headers_whose_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WEATHER_TOKEN", "rain-or-shine")
    monkeypatch.setenv("WEATHER_USER", "me")
    with at_url("rain-or-shine") as url:
        server = Server(f"{url}?user=$WEATHER_USER", headers={"Authorization": "Bearer $WEATHER_TOKEN"})
        assert [tool["function"]["name"] for tool in await server.tools()] == ["rainy_days", "forecast"]
        assert await server.call("rainy_days", {"city": "Rome"}) == "79"
        with pytest.raises(ConfigError, match="no connection to the MCP server") as raised:
            await Server(url, headers={"Authorization": "Bearer sunny-side"}).tools()
        assert "401 Unauthorized" in str(raised.value) and "sunny-side" not in str(raised.value)
    with pytest.raises(AgentError, match="ended or refused a request"):
        await server.call("rainy_days", {"city": "Rome"})
    with pytest.raises(ConfigError, match="no connection to the MCP server"):
        await Server(url).tools()


async def test_what_a_url_refuses_is_the_servers_failure_and_an_expired_session_is_opened_again():
    refuses = []
    with at_url("token", refuses) as url:
        server = Server(url, headers={"Authorization": "Bearer token"})
        assert (await server.call("rainy_days", {"city": "Atlantis"})).startswith("Error: ")
        refuses.append(502)
        with pytest.raises(AgentError, match=r"Server returned an error response; it said:\n502 Bad Gateway"):
            await server.call("rainy_days", {"city": "Rome"})
        assert await server.call("rainy_days", {"city": "Rome"}) == "79"
        refuses.append(404)
        assert await server.call("rainy_days", {"city": "Bergen"}) == "202"
        assert refuses == []


@pytest.mark.parametrize(
    ("address", "more", "said"),
    [
        ("", {}, "is empty"),
        ("uvx 'server", {}, "can't parse the command"),
        ("https://host/mcp", {"env": ["PATH"]}, "not for a URL"),
        ("uvx server", {"env": ["TOKEN=secret"]}, "export TOKEN=..., and pass TOKEN"),
        ("uvx server", {"headers": {"a": "b"}}, "headers are for an MCP server at a URL"),
        ("https://host/mcp", {"headers": {"a": "$NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ("https://host/mcp?key=$", {}, r"write \$\$"),
    ],
)
def test_an_address_that_cannot_work_is_refused(address, more, said):
    with pytest.raises(ConfigError, match=said):
        Server(address, **more)


async def test_without_the_sdk_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"needs the package mcp.*pip install 'mcp>=2'"):
        await Server(WEATHER).tools()
