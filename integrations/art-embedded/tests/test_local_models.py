"""The classic agent outside every rollout: whose weights answer, and how long an engine lives."""

import asyncio
import json
import subprocess
import sys
import textwrap

import pytest

from art_classic.agent import Agent, ModelCallError
from art_core.errors import ConfigError, StoreError
from art_core.testing import FakeEngine


def test_art_model_replaces_the_model_that_the_code_names(monkeypatch):
    assert Agent("some/model").model_name == "some/model"
    monkeypatch.setenv("ART_MODEL", "tiny")
    assert Agent("some/model").model_name == "tiny"


@pytest.mark.system
def test_importing_the_classic_surface_is_light():
    modules = "art_classic.agent, art_classic.environment"
    code = f"import sys, {modules}; print({{'torch', 'transformers', 'aiohttp'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


async def test_a_cancelled_call_is_cancelled_also_where_the_engine_answers_all_the_same():
    class Half(FakeEngine):
        async def chat(self, request):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await super().chat(request)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Agent("tiny", engine=Half()).generate_response("hi")


async def test_an_engine_of_ones_own_refuses_as_an_address_does_and_loads_nothing_itself(tmp_path):
    agent = Agent("tiny", engine=FakeEngine())
    with pytest.raises(ModelCallError) as caught:
        await agent.generate_response([])
    assert caught.value.status == 400
    with pytest.raises(ConfigError, match="its own engine"):
        agent.load_checkpoint(tmp_path)


def folder(tmp_path, **files):
    path = tmp_path / "given"
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_json", ".json").replace("_sqlite", ".sqlite")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({}, ConfigError, "isn't a checkpoint"),
        ({"run_sqlite": ""}, ConfigError, "no checkpoint yet"),
        ({"learner_json": "{", "config_json": "{}"}, StoreError, "learner.json is damaged"),
        ({"adapter_config_json": "[1]"}, StoreError, "adapter_config.json is damaged"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path, files, error, says):
    with pytest.raises(error, match=says) as caught:
        Agent("tiny").load_checkpoint(folder(tmp_path, **files))
    assert "given" in str(caught.value)


def test_a_file_that_is_no_checkpoint_is_refused_and_never_unpickled(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint best_checkpoint.pt doesn't exist"):
        Agent("tiny").load_checkpoint("best_checkpoint.pt")
    (tmp_path / "x.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(ConfigError, match="never unpickles"):
        Agent("tiny").load_checkpoint(tmp_path / "x.pt")


async def test_a_model_that_is_not_there_is_named_at_the_first_call(tmp_path):
    agent = Agent("./nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        await agent.generate_response("hi")


SCRIPT = """
    import asyncio, threading
    from art_classic.agent import Agent

    def decoding():
        return sum(thread.name == "art-decode" for thread in threading.enumerate())

    async def main():
        first, second = Agent("some/model"), Agent("other/model")  # ART_MODEL makes both the same
        print(decoding())
        answers = await asyncio.gather(*(agent.generate_response("hi", 4, 0.0) for agent in (first, second, first)))
        print(len(set(answers)), decoding())
        await first.aclose()
        print(decoding(), await second.generate_response("hi", 4, 0.0) == answers[0])
        await second.aclose()
        print(decoding(), await first.generate_response("hi", 4, 0.0) == answers[0])

    asyncio.run(main())
    asyncio.run(main())
"""


@pytest.mark.system
def test_a_process_has_one_engine_per_model_which_starts_when_asked_ends_when_left_and_at_exit(monkeypatch):
    monkeypatch.setenv("ART_MODEL", "tiny")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = ["1 1", "1 True", "0 True"]
    assert done.stdout.split("\n") == ["0", *lines, "1", *lines, ""]


async def test_a_checkpoint_answers_from_the_next_call_on(tmp_path):
    """A whole checkpoint, the same as one file, a run folder, and the file again with other weights in it."""
    from safetensors.torch import load_file, save_file

    from art_core.config import TrainConfig
    from art_core.learner import TorchLearner, checkpoint
    from art_embedded import TINY

    run_dir = tmp_path / "run"
    learner = TorchLearner(str(TINY), TrainConfig(lora_rank=0), None)
    with_other = {name: tensor + 0.05 for name, tensor in load_file(TINY / "model.safetensors").items()}
    for name, tensor in learner.model.named_parameters():
        if name in with_other:
            tensor.data.copy_(with_other[name])
    learner.save(run_dir / "checkpoints" / "step-000001")
    (run_dir / "run.sqlite").touch()
    single = tmp_path / "best_checkpoint.pt"
    save_file(dict(load_file(run_dir / "checkpoints" / "step-000001" / "model.safetensors")), single)
    assert (run_dir / "checkpoints" / "step-000001" / checkpoint.MANIFEST).is_file()

    agent = Agent("tiny")

    async def answer():
        return await agent.generate_response("Which city?", max_tokens=8, temperature=0.0)

    try:
        start = await answer()
        agent.load_checkpoint(run_dir)
        trained = await answer()
        assert trained != start
        agent.load_checkpoint(run_dir / "checkpoints" / "step-000001")
        assert await answer() == trained
        agent.load_checkpoint(single)
        assert await answer() == trained
        save_file(dict(load_file(TINY / "model.safetensors")), single)
        agent.load_checkpoint(single)
        assert await answer() == start
    finally:
        await agent.aclose()


async def test_an_adapter_is_put_on_the_model_that_it_was_trained_on(tmp_path):
    import torch

    from art_core.config import TrainConfig
    from art_core.learner import TorchLearner
    from art_embedded import TINY

    learner = TorchLearner(str(TINY), TrainConfig(lora_rank=4), None)
    torch.manual_seed(0)
    for name, tensor in learner.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.5)
    saved = tmp_path / "saved.pt"
    learner.save(saved)
    answers = []
    # The second as if it had been trained on another machine, where the base model was somewhere else.
    for base in (str(TINY), "/nowhere/tiny"):
        manifest = saved / "learner.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "base_model": base}))
        agent = Agent("tiny")
        plain = await agent.generate_response("Which city?", max_tokens=8, temperature=0.0)
        agent.load_checkpoint(saved)
        answers.append(await agent.generate_response("Which city?", max_tokens=8, temperature=0.0))
        await agent.aclose()
    assert answers[0] == answers[1] != plain
