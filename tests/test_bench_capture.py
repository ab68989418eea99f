"""The capture benchmark at a toy size, so that it cannot rot. No timing is looked at."""

import asyncio
import contextlib
import sys

import pytest
from capture_fakes import recorded

from art_core.capture import HttpUpstream
from bench import capture
from bench.stub import PROMPT, SAMPLED


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_the_stub_answers_with_all_its_tokens(stream):
    port = capture.free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "bench.stub", "--port", str(port)]
        await asyncio.to_thread(stack.enter_context, capture.running(command, f"{url}/models"))
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        [call] = await recorded(HttpUpstream(url), request)
    assert (len(call.prompt_ids), len(call.sampled_ids), call.finish_reason) == (PROMPT, SAMPLED, "tool_calls")
    [tool_call] = call.response["tool_calls"]
    assert tool_call["function"]["name"] == "search"


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="CPU time and memory of a process are read from /proc")
def test_the_benchmark_measures_ours_where_the_peers_are_missing(capsys):
    pytest.importorskip("art_gateway")
    capture.main(capture.parse(["--rounds", "1", "--calls", "64", "--memory-calls", "100"]))
    said = capsys.readouterr().out
    assert "not streaming" in said and "| art gateway" in said and "memory of a fresh gateway" in said
    rows = [line.split("|") for line in said.splitlines() if line.startswith("| art gateway")]
    assert [row[6].strip() for row in rows] == ["0", "0"], "no call failed"
