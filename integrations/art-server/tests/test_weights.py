"""A worker that wants the weights themselves."""

import asyncio
import json

import aiohttp
import pytest
from http_server import serving as plain_server
from reward_fakes import unlike
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_core.errors import StoreError
from art_core.testing import FakeEngine, ScriptedAgent
from art_server.messages import BadMessage, read
from art_server.weights import fetch_checkpoint


@pytest.mark.system
async def test_a_worker_fetches_the_weights_that_it_is_told_of(serving, tmp_path):
    settings = {"engine": FakeEngine(), "learner": "torch", "group_size": 4}
    async with serving(**settings) as server, server.worker("a", ScriptedAgent()) as worker, server.connect() as run:
        with pytest.raises(StoreError, match="no checkpoint yet"):
            await worker.fetch_model(tmp_path / "copy")
        await run.learn(await run.score(await run.collect(None, ["one"]), unlike))
        while not worker.model_state or worker.model_state["version"] != 1:
            await asyncio.sleep(0.01)
        copied = await worker.fetch_model(tmp_path / "copy")
        assert copied == tmp_path / "copy" / "step-000001" == await worker.fetch_model(tmp_path / "copy")
        kept = server.run.run_dir / "checkpoints" / "step-000001"
        files = [path.relative_to(kept) for path in kept.rglob("*") if path.is_file()]
        assert files and all((copied / name).read_bytes() == (kept / name).read_bytes() for name in files)


@pytest.mark.parametrize("name", ["..", "", "../step-000001", "/etc", "step-000001/..", 7])
async def test_a_list_that_names_no_checkpoint_leads_nowhere(tmp_path, name):
    async def listed(request):
        return JSONResponse({"items": [{"name": name, "files": []}]})

    with plain_server(Route("/list", listed)) as url:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(StoreError, match="an invalid checkpoint name"):
                await fetch_checkpoint(http, url, "/list", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_file_outside_its_checkpoint_is_not_written(tmp_path):
    async def listed(request):
        return JSONResponse({"items": [{"name": "step-000001", "files": [{"name": "../../taken"}]}]})

    with plain_server(Route("/list", listed)) as url:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(StoreError, match="outside its checkpoint"):
                await fetch_checkpoint(http, url, "/list", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["@evil.example/x", ".evil.example/x", "http://evil.example/x", ":1/x"])
def test_weights_are_on_the_server_itself_which_alone_gets_the_token(url):
    told = {"type": "update_model", "v": 1, "model_state": {"version": 1, "url": url}}
    with pytest.raises(BadMessage, match="url"):
        read(json.dumps(told), "server")
