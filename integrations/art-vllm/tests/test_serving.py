"""The engine and its process, over a program that speaks vLLM's endpoints and costs nothing; test_vllm.py has the real one."""

import asyncio
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from art_core.capture.upstream import UNREACHABLE
from art_core.errors import ConfigError, UpstreamError
from art_core.types import EngineBase, Weights
from art_vllm import AddressEngine, VllmEngine, engine, process


def asking(text: str, **options) -> dict:
    return {"messages": [{"role": "user", "content": text}], **options}


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


async def streamed(upstream, text: str) -> list[dict]:
    return [chunk async for chunk in upstream.stream(asking(text, stream=True))]


async def test_it_has_every_ability_and_travels_to_the_serving_process(fake):
    for method in ("begin", "score", "counters", "overlaps", "keeps_start", "at", "retire", "rest", "wake"):
        assert getattr(VllmEngine, method) is not getattr(EngineBase, method), method
    assert pickle.loads(pickle.dumps(VllmEngine)) is VllmEngine
    assert VllmEngine.loads_files


@pytest.mark.system
async def test_a_server_of_its_own_answers_with_the_start_weights_and_leaves_nothing(fake):
    async with fake.running(fake.engine()) as it:
        answer = await it.chat(asking("hello"))
        assert (said(answer), answer["policy_version"]) == ("policy@0: hello", 0)
        assert len(fake.living()) == 2
    assert not fake.living()
    assert "serving" in fake.log()


@pytest.mark.system
@pytest.mark.parametrize("own", [True, False])
async def test_an_answer_has_the_runs_limit_where_the_agent_asks_for_none_and_never_more_than_the_context(fake, own):
    async with fake.running(fake.engine(max_tokens=77)) if own else foreign(fake, settings={"max_tokens": 77}) as it:
        asked = ({}, {"max_tokens": 5}, {"max_tokens": 9000}, {"max_completion_tokens": 9000}, {"max_tokens": None})
        said_by = [said(await it.chat(asking("limit", **limit))).split(": ")[1] for limit in asked]
        chunks = await streamed(it, "limit")
    assert said_by == ["77", "5", "2048", "2048", "77"]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "77"


@pytest.mark.system
async def test_its_log_is_continued_by_the_next_start(fake):
    for _ in range(2):
        async with fake.running(fake.engine()):
            pass
    assert fake.log().count("serving") == 2


@pytest.mark.system
async def test_a_start_says_how_it_goes(fake, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_VLLM", "slow")
    monkeypatch.setattr(process, "LOG_PERIOD", 0.2)
    caplog.set_level(logging.INFO, "art_core.engine")
    async with fake.running(fake.engine()):
        pass
    assert str(fake.run_dir / "vllm.log") in caplog.text
    assert "Loading safetensors 1/2" in caplog.text
    assert "vLLM is ready after" in caplog.text
    assert "--tool-call-parser hermes" in caplog.text


@pytest.mark.system
async def test_a_start_that_fails_says_the_exception_and_not_its_trace(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "broken")
    with pytest.raises(ConfigError, match=r"exit code 1.*ValueError: Free memory on device") as raised:
        await fake.engine().start()
    assert "Traceback" not in str(raised.value) and "See root cause" not in str(raised.value)
    assert not fake.living()


@pytest.mark.system
async def test_a_start_with_a_value_that_vllm_refuses_says_its_reason(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "invalid")
    with pytest.raises(ConfigError, match=r": Value error, User-specified max_model_len \(9000\) is greater"):
        await fake.engine(max_context=9000).start()


@pytest.mark.system
async def test_a_start_that_is_given_up_leaves_nothing(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "slow")
    starting = asyncio.create_task(fake.engine().start())
    while not fake.starts():
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not fake.living()


@pytest.mark.system
async def test_versions_are_served_side_by_side_until_they_are_retired(fake):
    async with fake.running(fake.engine()) as it:
        for version in (1, 2):
            weights = Weights(version, fake.adapter(str(version)))
            assert it.overlaps(weights)
            await it.load(weights)
        answers = [await it.at(version).chat(asking("hi")) for version in (0, 1, 2)]
        assert [said(a) for a in answers] == ["policy@0: hi", "policy@1: hi", "policy@2: hi"]
        assert [a["policy_version"] for a in answers] == [0, 1, 2]
        assert {c["policy_version"] for c in await streamed(it.at(1), "ab")} == {1}
        assert (await it.chat(asking("hi")))["policy_version"] == 2
        await it.retire(1)
        assert fake.told("/v1/unload_lora_adapter")[-1]["lora_name"] == "policy@1"
        assert said(await it.at(0).chat(asking("hi"))) == "policy@0: hi"


@pytest.mark.system
async def test_whole_weights_replace_those_before_them_and_what_was_computed_with_them(fake):
    async with fake.running(fake.engine(lora_rank=0)) as it:
        weights = Weights(3, fake.place / "run")
        assert not it.overlaps(weights)
        await it.load(weights)
        answer = await it.chat(asking("hi"))
        assert (said(answer), answer["policy_version"]) == ("policy@0: hi", 3)
    assert [entry["path"] for entry in fake.journal() if "path" in entry] == ["/collective_rpc", "/reset_prefix_cache"]
    assert fake.told("/collective_rpc")[0]["kwargs"] == {"weights_path": str(fake.place / "run")}
    assert "--enable-lora" not in fake.starts()[0]["options"]


@pytest.mark.system
async def test_a_corrupted_adapter_is_refused_and_the_version_before_it_stays(fake):
    async with fake.running(fake.engine()) as it:
        await it.load(Weights(1, fake.adapter("1")))
        with pytest.raises(UpstreamError, match="header too large"):
            await it.load(Weights(2, fake.adapter("corrupt")))
        assert (await it.chat(asking("hi")))["policy_version"] == 1


@pytest.mark.system
async def test_an_adapter_of_experts_is_refused_without_a_gpu(fake):
    folder = fake.adapter("experts")
    (folder / "adapter_config.json").write_text('{"target_parameters": ["mlp.experts.down_proj"]}')
    async with fake.running(fake.engine()) as it:
        with pytest.raises(ConfigError, match=r"experts .*down_proj.*lora_rank=0"):
            await it.load(Weights(1, folder))


@pytest.mark.system
async def test_it_ends_also_where_its_server_has_just_died(fake):
    for _ in range(5):
        it = fake.engine()
        await it.start()
        server = it._server
        os.kill(fake.starts()[-1]["pids"][0], signal.SIGKILL)
        await server.ended()
        async with asyncio.timeout(20):
            await it.stop()
        assert not fake.living()


@pytest.mark.system
async def test_it_scores_a_text_and_counts_tokens(fake):
    async with fake.running(fake.engine()) as it:
        assert await it.score([8, 16, 24]) == [-2.0, -3.0]
        counted = {"prompt_tokens": 30.0, "cached_tokens": 20.0, "sampled_tokens": 10.0}
        assert await it.counters() == counted
        assert said(await it.chat(asking("die once"))) == "policy@0: die once"
        assert await it.counters() == {name: 2 * count for name, count in counted.items()}


@pytest.mark.system
async def test_a_server_that_counts_only_some_of_it_gives_0_for_the_rest(fake):
    async with fake.running(fake.engine(engine_args={"enable-prefix-caching": False})) as it:
        assert await it.counters() == {"prompt_tokens": 30.0, "cached_tokens": 0.0, "sampled_tokens": 10.0}


@pytest.mark.system
@pytest.mark.parametrize("constraint", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
async def test_what_a_grammar_constrained_is_scored_without_it(fake, constraint):
    async with fake.running(fake.engine()) as it:
        whole = (await it.chat(asking("ab", **constraint)))["choices"][0]
        assert whole["token_logprobs"] == [-97 / 8, -98 / 8]
        assert (await it.chat(asking("ab")))["choices"][0]["token_logprobs"] == [-1.0, -1.0]
        chunks = [chunk["choices"][0] async for chunk in it.stream(asking("ab", stream=True, **constraint))]
        assert [chunk["delta"]["content"] for chunk in chunks] == ["a", "b"]
        assert [chunk["token_ids"] for chunk in chunks] == [[], [97, 98]]
        assert chunks[-1]["token_logprobs"] == whole["token_logprobs"]


@pytest.mark.system
@pytest.mark.parametrize("odd", [{"response_format": "json_object"}, {"tools": ["f"]}, {"tools": 5}])
async def test_a_field_of_another_shape_reaches_vllm_which_refuses_it(fake, odd):
    async with fake.running(fake.engine()) as it:
        with pytest.raises(UpstreamError, match="Input should be a valid") as refused:
            await it.chat(asking("ab", **odd))
        assert refused.value.status == 400


@pytest.mark.system
async def test_a_server_that_dies_comes_back_with_its_adapters_and_no_request_is_lost(fake, caplog):
    async with fake.running(fake.engine()) as it:
        for version in (1, 2):
            await it.load(Weights(version, fake.adapter(str(version))))
        await it.retire(1)
        texts = ["slow"] * 4 + ["die once"] + ["slow"] * 4
        answers = await asyncio.gather(*(it.chat(asking(text)) for text in texts))
        assert [said(a) for a in answers] == [f"policy@2: {text}" for text in texts]
        assert [entry["lora_name"] for entry in fake.told("/v1/load_lora")] == ["policy@1", "policy@2", "policy@2"]
        assert (
            "vLLM died (exit code 137); last errors in its log: torch.OutOfMemoryError: CUDA out of memory"
            in caplog.text
        )
        assert "vLLM is running again" in caplog.text
        assert len(fake.starts()) == 2 and len(fake.living()) == 2
    assert not fake.living()


@pytest.mark.system
async def test_whole_weights_are_there_again_after_a_restart(fake):
    async with fake.running(fake.engine(lora_rank=0)) as it:
        await it.load(Weights(3, fake.run_dir))
        answer = await it.chat(asking("die once"))
        assert answer["policy_version"] == 3
        assert len(fake.told("/collective_rpc")) == 2


@pytest.mark.system
async def test_a_stream_is_begun_again_only_where_nothing_was_passed_on(fake):
    async with fake.running(fake.engine()) as it:
        chunks = await streamed(it, "die once before it says a word")
        assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "die once before it says a word"
        passed = []
        with pytest.raises(UpstreamError) as raised:
            async for chunk in it.stream(asking("dies midway", stream=True)):
                passed.append(chunk)
        assert len(passed) == 4 and raised.value.code == UNREACHABLE
        assert said(await it.chat(asking("hi"))) == "policy@0: hi"


@pytest.mark.system
async def test_a_request_that_ends_the_server_each_time_is_given_up(fake):
    async with fake.running(fake.engine()) as it:
        with pytest.raises(UpstreamError, match=r"died 3 times while answering this request: torch.OutOfMemoryError"):
            await it.chat(asking("die"))
        assert len(fake.starts()) >= engine.MAX_TRIES
        assert said(await it.chat(asking("hi"))) == "policy@0: hi"


@pytest.mark.system
async def test_a_server_that_does_not_come_back_is_given_up(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "breaks later")
    async with fake.running(fake.engine()) as it:
        with pytest.raises(UpstreamError, match=r"restarted 3 times.*Free memory"):
            await it.chat(asking("die"))
        with pytest.raises(UpstreamError, match="restarted 3 times"):
            await it.chat(asking("hi"))
    assert len(fake.starts()) == 1 + engine.MAX_RESTARTS
    assert not fake.living()


@pytest.mark.system
async def test_an_error_of_a_living_server_is_the_requests_own(fake):
    async with fake.running(fake.engine()) as it:
        with pytest.raises(UpstreamError, match="no such thing"):
            await it.chat(asking("wrong"))
        assert len(fake.starts()) == 1


@pytest.mark.system
async def test_a_server_that_does_not_listen_to_the_end_is_made_to(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    async with fake.running(fake.engine()):
        assert len(fake.living()) == 2
    assert not fake.living()


PARENT = """
import asyncio, sys
from pathlib import Path
from art_core.config import TrainConfig
from art_embedded import TINY
from art_vllm import VllmEngine

async def main():
    engine = VllmEngine(str(TINY), TrainConfig())
    engine.begin(Path(sys.argv[1]))
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_where_the_parent_is_killed(fake, how):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(fake.run_dir)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "started\n"
        assert len(fake.living()) == 2
        parent.send_signal(how)
    fake.wait_for(lambda: not fake.living())


@pytest.mark.system
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent was killed")
async def test_a_guard_that_is_killed_takes_the_server_with_it(fake):
    async with fake.running(fake.engine()) as it:
        first = fake.starts()[0]["pids"]
        guard = int(Path(f"/proc/{first[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        fake.wait_for(lambda: first[0] not in fake.living())
        assert said(await it.chat(asking("hi"))) == "policy@0: hi"


@asynccontextmanager
async def foreign(fake, path="/v1", settings=None, **variables):
    """A server that somebody else runs, and the engine at its address."""
    port, config = process.free_port(), fake.engine(**settings or {}).config
    python = os.environ["ART_VLLM_PYTHON"]
    line = [python, "-m", "vllm", "--served-model-name", "their/model", "--port", str(port)]
    server = subprocess.Popen(line, env={**os.environ, **variables}, start_new_session=True)
    try:
        it = AddressEngine("tiny", config, base_url=f"http://127.0.0.1:{port}{path}")
        while not await it._client.healthy():
            await asyncio.sleep(0.05)
        async with fake.running(it):
            yield it
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.system
async def test_a_server_of_somebody_else_is_asked_for_its_own_model_and_given_adapters_by_version(fake):
    async with foreign(fake) as it:
        assert said(await it.chat(asking("hi"))) == "their/model: hi"
        await it.load(Weights(7, fake.adapter("7")))
        name = said(await it.chat(asking("hi"))).removesuffix(": hi")
        assert re.fullmatch(r"policy-[0-9a-f]{6}@7", name), "another run on this server has names of its own"
    assert fake.told("/v1/unload_lora_adapter")[-1]["lora_name"] == name


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_whole_weights_answer_in_place_of_those_before_them_and_say_so(fake, stream):
    async with foreign(fake) as it:
        await it.load(Weights(3, fake.place))
        old = it.at(0)
        if stream:
            answer, *_ = [chunk async for chunk in old.stream(asking("hi", stream=True))]
        else:
            answer = await old.chat(asking("hi"))
    assert answer["policy_version"] == 3


@pytest.mark.system
@pytest.mark.parametrize(
    ("run", "request_", "of"), [(1.0, 0.3, 1.0), (1.0, 0, None), (1.0, None, None), (0.7, 0.7, None)]
)
async def test_logprobs_of_another_temperature_than_the_requests_are_marked(fake, run, request_, of):
    async with foreign(fake, settings={"temperature": run}) as it:
        answer = await it.chat(asking("hi", **({} if request_ is None else {"temperature": request_})))
    assert answer.get("logprobs_temperature") == of


@pytest.mark.system
async def test_a_grammar_at_a_temperature_whose_logprobs_vllm_does_not_tell_is_refused(fake):
    async with foreign(fake, settings={"temperature": 0.7}) as it:
        with pytest.raises(UpstreamError, match=r"at temperature 0.7 for grammar-constrained answers") as refused:
            await it.chat(asking("hi", temperature=0.7, response_format={"type": "json_object"}))
    assert refused.value.status == 400


@pytest.mark.system
async def test_a_server_without_adapters_is_refused_with_what_to_start_it_with(fake):
    async with foreign(fake, FAKE_VLLM="no adapters") as it:
        with pytest.raises(
            ConfigError, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True .*--enable-lora .*--max-lora-rank"
        ):
            await it.load(Weights(1, fake.adapter("1")))


async def test_an_address_where_nothing_answers_is_said(fake):
    it = AddressEngine("tiny", fake.engine().config, base_url="http://127.0.0.1:9/v1")
    with pytest.raises(UpstreamError, match=r"127.0.0.1:9.* is the server running"):
        await it.start()
    await it.stop()


@pytest.mark.system
async def test_an_address_without_its_end_is_said(fake):
    with pytest.raises(ConfigError, match=r"has no list of models.*engine='http://HOST:PORT/v1'"):
        async with foreign(fake, path=""):
            pass


@pytest.mark.system
async def test_an_adapter_that_the_server_was_not_started_for_is_refused_with_the_setting(fake):
    async with fake.running(fake.engine(lora_rank=None)) as it:
        with pytest.raises(ConfigError, match="pass lora_rank=16"):
            await it.load(Weights(1, fake.adapter("1")))


def test_a_servers_port_is_none_that_the_system_hands_out(monkeypatch):
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 49_152
    assert process.free_port() < lowest
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind(("127.0.0.1", process.free_port()))
        ports = sorted(listener.getsockname()[1] for listener in (one, other))
        monkeypatch.setattr(process, "PORTS", ports)
        with pytest.raises(ConfigError, match=f"none of 2 ports between {ports[0]} and {ports[1]} is free"):
            process.free_port()
        other.close()
        assert process.free_port() in ports
