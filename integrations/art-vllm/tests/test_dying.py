"""What happens to a server that cannot be brought back, that will not end, or that dies at an unlucky moment."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import pytest

from art_core.errors import UpstreamError
from art_core.types import Weights
from art_vllm import engine


def asking(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


@asynccontextmanager
async def running(it):
    await it.start()
    try:
        yield it
    finally:
        await it.stop()


async def test_a_server_whose_log_cannot_be_written_any_more_is_given_up_and_nobody_waits_for_ever(fake):
    async with running(fake.engine()) as it:
        shutil.rmtree(fake.run_dir)
        with pytest.raises(UpstreamError, match=r"started again 3 times.*No such file or directory"):
            async with asyncio.timeout(20):
                await it.chat(asking("die"))
    assert not fake.living()


async def test_a_server_that_is_ill_and_will_not_end_is_ended_with_all_that_it_started(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    monkeypatch.setattr(engine, "DYING_SECONDS", 0.2)
    async with running(fake.engine()) as it:
        first = fake.starts()[0]["pids"]
        answer = await it.chat(asking("ill once"))
        assert answer["choices"][0]["message"]["content"] == "policy@0: ill once"
        assert not set(first) & set(fake.living())


async def test_an_adapter_whose_folder_is_gone_does_not_keep_the_others_from_coming_back(fake):
    async with running(fake.engine()) as it:
        for version in (1, 2):
            await it.load(Weights(version, fake.adapter(str(version))))
        shutil.rmtree(fake.place / "1")
        assert (await it.chat(asking("die once")))["policy_version"] == 2
        assert (await it.at(1).chat(asking("hi")))["policy_version"] == 2
        await it.retire(1)
