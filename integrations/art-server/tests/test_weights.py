"""A worker that wants the weights themselves."""

import asyncio

import pytest
from reward_fakes import unlike

from art_core.errors import StoreError
from art_core.testing import FakeEngine, ScriptedAgent


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
