"""What happens to a server that cannot be brought back, that will not end, or that dies at an unlucky moment."""

import asyncio
import json
import os
import shutil
import signal
import urllib.request

import pytest

from art_core.config import TrainConfig
from art_core.errors import UpstreamError
from art_core.types import Weights
from art_vllm import AddressEngine, engine


def asking(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.system
async def test_a_server_whose_log_cannot_be_written_any_more_is_given_up_and_nobody_waits_for_ever(fake):
    async with fake.running(fake.engine()) as it:
        shutil.rmtree(fake.run_dir)
        with pytest.raises(UpstreamError, match=r"restarted 3 times.*No such file or directory"):
            async with asyncio.timeout(20):
                await it.chat(asking("die"))
    assert not fake.living()


@pytest.mark.system
async def test_a_server_that_is_ill_and_will_not_end_is_ended_with_all_that_it_started(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    monkeypatch.setattr(engine, "DYING_SECONDS", 0.2)
    async with fake.running(fake.engine()) as it:
        first = fake.starts()[0]["pids"]
        answer = await it.chat(asking("ill once"))
        assert answer["choices"][0]["message"]["content"] == "policy@0: ill once"
        assert not set(first) & set(fake.living())


@pytest.mark.system
async def test_a_server_that_dies_while_it_sleeps_is_started_again_when_it_is_woken(fake):
    async with fake.running(fake.engine(engine_args={"enable-sleep-mode": True})) as it:
        await it.load(Weights(1, fake.adapter("1")))
        await it.rest()
        os.kill(fake.starts()[0]["pids"][0], signal.SIGKILL)
        fake.wait_for(lambda: not fake.living())
        await asyncio.sleep(0.5)
        assert len(fake.starts()) == 1, "the GPU belongs to the learner"
        await it.wake()
        assert (await it.chat(asking("hi")))["policy_version"] == 1
        assert [entry["path"] for entry in fake.told("/sleep")] == ["/sleep?level=1"]


@pytest.mark.system
async def test_an_adapter_whose_folder_is_gone_does_not_keep_the_others_from_coming_back(fake):
    async with fake.running(fake.engine()) as it:
        for version in (1, 2):
            await it.load(Weights(version, fake.adapter(str(version))))
        shutil.rmtree(fake.place / "1")
        assert (await it.chat(asking("die once")))["policy_version"] == 2
        assert (await it.at(1).chat(asking("hi")))["policy_version"] == 2
        await it.retire(1)


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_of_somebody_else_that_was_started_anew_is_given_its_adapters_again(fake, stream):
    async with fake.running(fake.engine()) as theirs:
        config = TrainConfig(lora_rank=8)
        async with fake.running(AddressEngine("tiny", config, base_url=theirs.base_url)) as it:
            await it.load(Weights(1, fake.adapter("1")))
            loaded = fake.told("/v1/load_lora_adapter")[-1]
            forget(theirs.base_url, loaded["lora_name"])

            async def answer(text: str) -> dict:
                return await (anext(it.stream(asking(text) | {"stream": True})) if stream else it.chat(asking(text)))

            answers = await asyncio.gather(*(answer("hi") for _ in range(8)))
            assert [it["policy_version"] for it in answers] == [1] * 8
            assert fake.told("/v1/load_lora_adapter") == [loaded, loaded], "once for all that missed it"
            forget(theirs.base_url, loaded["lora_name"])
            assert await it.score([8, 16]) == [-2.0]


@pytest.mark.system
async def test_a_version_is_retired_also_where_its_server_is_gone(fake):
    async with fake.running(fake.engine()) as theirs:
        it = AddressEngine("tiny", TrainConfig(lora_rank=8), base_url=theirs.base_url)
        await it.start()
        for version in (1, 2):
            await it.load(Weights(version, fake.adapter(str(version))))
    await it.retire(1)
    with pytest.raises(UpstreamError, match="is the server running"):
        await it.chat(asking("hi"))
    await it.stop()


def forget(base_url: str, adapter: str) -> None:
    """Let a server forget an adapter, as one does that is started anew."""
    body = json.dumps({"lora_name": adapter}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/unload_lora_adapter", body)).close()
