"""``art export``: what is written is what was trained, in forms that others load, or it is not written."""

import asyncio
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from tree_cases import make_model
from typer.testing import CliRunner

import art_core as art
from art_core.__main__ import app
from art_core.config import TINY
from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner.replay import load_weights
from art_core.plugins import Plugins
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_vllm import export_check
from art_vllm.export import export

AGENT = ScriptedAgent(turns=2, max_tokens=10)
IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 90, 12, 400, 3]])
_scored = itertools.count()


def contrast(trajectory):
    return float(next(_scored) % 2)


async def train(run_dir, model="tiny", steps=2, **settings):
    """Steps large enough to be seen, with the real learner and the real engine."""
    settings = {"learning_rate": 2e-3, "warmup_steps": 0, "keep_checkpoints": None, "learner": "torch", **settings}
    async with art.open_run(run_dir, model=model, **settings) as run:
        for _ in range(steps):
            await run.learn(await run.score(await run.collect(AGENT, ["one", "two"], group_size=4), contrast))
            await run.checkpoint()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function lora_rank -> the folder of a run of two steps."""
    folders = {}

    def of(lora_rank):
        if lora_rank not in folders:
            folders[lora_rank] = tmp_path_factory.mktemp("runs") / f"rank{lora_rank}"
            asyncio.run(train(folders[lora_rank], lora_rank=lora_rank))
        return folders[lora_rank]

    return of


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of a run with an adapter, to be spoilt."""
    return shutil.copytree(trained(8), tmp_path / "run")


@torch.no_grad()
def logprobs(model):
    model = model.eval().float()
    return torch.log_softmax(model(IDS).logits, -1)


def as_trained(run_dir, step=2):
    return load_weights(str(TINY), run_dir / "checkpoints" / f"step-{step:06d}")


def far(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("lora_rank", [8, 0])
def test_the_merged_folder_is_a_plain_model_with_the_trained_logprobs(trained, tmp_path, lora_rank):
    exported = export(trained(lora_rank), tmp_path / "out")
    expected = logprobs(as_trained(trained(lora_rank)))
    back = AutoModelForCausalLM.from_pretrained(exported.merged)
    assert far(logprobs(back), expected) < 1e-4
    assert far(logprobs(AutoModelForCausalLM.from_pretrained(TINY)), expected) > 1e-2  # there was something to lose
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (exported.merged / name).read_bytes() == (TINY / name).read_bytes()
    message = [{"role": "user", "content": "hi"}]
    theirs, ours = (AutoTokenizer.from_pretrained(it) for it in (TINY, exported.merged))
    assert theirs.apply_chat_template(message) == ours.apply_chat_template(message)
    assert exported.check.largest < 1e-4
    assert exported.check.tokens > 1
    assert (exported.adapter is None) == (lora_rank == 0)


def test_the_adapter_is_loaded_by_peft_with_the_base_that_it_names(trained, tmp_path):
    exported = export(trained(8), tmp_path / "out", merged=False)
    assert exported.merged is None and not (tmp_path / "out" / "merged").exists()
    base = json.loads((exported.adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    back = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(exported.adapter))
    assert far(logprobs(back), logprobs(as_trained(trained(8)))) < 1e-4
    assert exported.check.largest < 1e-4


def test_an_older_step_is_exported_where_it_is_kept(trained, tmp_path):
    exported = export(trained(8), tmp_path / "out", step=1)
    back = AutoModelForCausalLM.from_pretrained(exported.merged)
    assert far(logprobs(back), logprobs(as_trained(trained(8), 1))) < 1e-4
    record = json.loads((exported.folder / "export.json").read_text())
    assert (record["step"], record["version"]) == (1, 1)
    assert exported.check.text == "a stored call of version 1"
    with pytest.raises(ConfigError, match="no checkpoint of step 7; there are: 1, 2"):
        export(trained(8), tmp_path / "other", step=7)
