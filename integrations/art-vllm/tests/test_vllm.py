"""The real vLLM serves the tiny model: its numbers against plain forward passes. One server for all of it."""

import asyncio
import json
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model

from art_core.config import TrainConfig
from art_core.errors import UpstreamError
from art_core.learner import checkpoint
from art_core.learner.pretrained import load_causal_lm
from art_core.types import Weights
from art_embedded import TINY
from art_vllm import VllmEngine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
EXACT = 1e-4
"""Nats: float32 on both sides."""
LONG = list(range(30, 430))
"""A prompt of more than one block of the prefix cache."""
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    engine = VllmEngine(str(TINY), TrainConfig(lora_rank=16, max_staleness=1))
    engine.begin(tmp_path_factory.mktemp("run"))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """By version: the start weights and two adapters, each a plain model with the weights that serve it."""
    found = {0: (load_causal_lm(TINY).eval(), None)}
    for version in (1, 2):
        torch.manual_seed(version)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(load_causal_lm(TINY), lora).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        folder = tmp_path_factory.mktemp("adapters")
        checkpoint.write_adapter(folder, model)
        found[version] = model, Weights(version, folder / checkpoint.ADAPTER)
    return found


@torch.no_grad()
def logprobs(model, ids: list[int]) -> list[float]:
    rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def gap(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def gap_to(model, prompt_ids: list[int], choice: dict) -> float:
    plain = logprobs(model, prompt_ids + choice["token_ids"])[len(prompt_ids) - 1 :]
    return gap(plain, choice["token_logprobs"])


def asking(text: str, **options) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 1.0, **options}


async def test_a_score_is_that_of_a_plain_forward_pass_also_where_the_prompt_is_cached(served, policies):
    plain = logprobs(policies[0][0], LONG)
    for _ in range(2):
        await served.chat({"prompt": LONG, "max_tokens": 1})
        assert gap(await served.score(LONG), plain) < EXACT
    counted = await served.counters()
    assert counted["prompt_tokens"] >= 4 * len(LONG) and counted["cached_tokens"] > 0 and counted["sampled_tokens"] >= 4


async def test_versions_in_one_batch_are_each_answered_by_their_own_weights(served, policies):
    for version in (1, 2):
        await served.load(policies[version][1])
        assert gap(await served.score(LONG), logprobs(policies[version][0], LONG)) < EXACT
    versions = [0, 1, 2] * 8
    asked = (served.at(version).chat(asking(f"hello {place}")) for place, version in enumerate(versions))
    for version, answer in zip(versions, await asyncio.gather(*asked), strict=True):
        assert answer["policy_version"] == version
        assert gap_to(policies[version][0], answer["prompt_token_ids"], answer["choices"][0]) < EXACT


async def test_a_streamed_tool_call_carries_every_sampled_token(served, policies):
    request = asking("find the mail of Ann", tools=[TOOL], tool_choice="required", temperature=0, max_tokens=100)
    whole = (await served.at(0).chat(request))["choices"][0]
    ids, found, arguments, prompt = [], [], "", []
    async for chunk in served.at(0).stream({**request, "stream": True}):
        prompt = chunk.get("prompt_token_ids") or prompt
        for choice in chunk["choices"]:
            last, ids = choice, ids + choice["token_ids"]
            found += choice["token_logprobs"]
            for call in choice["delta"].get("tool_calls") or ():
                arguments += call["function"].get("arguments") or ""
    assert ids == whole["token_ids"] and gap(found, whole["token_logprobs"]) < EXACT
    assert json.loads(arguments)
    # A grammar forced the name: the model would have called search_inbox. The logprobs are those before its mask.
    assert whole["forced"] and whole["forced"] == last["forced"]
    assert gap_to(policies[0][0], prompt, {"token_ids": ids, "token_logprobs": found}) < EXACT


async def test_a_retired_version_is_gone_and_the_others_stay(served, policies):
    await served.retire(1)
    with pytest.raises(UpstreamError, match="policy@1"):
        await served._client.chat(asking("hello", model="policy@1"))
    assert (await served.at(2).chat(asking("hello")))["policy_version"] == 2


async def test_whole_weights_are_reloaded_in_place_the_tied_head_too(served, policies, tmp_path):
    model = load_causal_lm(TINY).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    checkpoint.write_model(tmp_path, model, str(TINY))
    await served.load(Weights(3, tmp_path))
    answer = await served.chat({"prompt": LONG, "max_tokens": 8, "temperature": 1.0})
    assert answer["policy_version"] == 3
    assert gap_to(model, LONG, answer["choices"][0]) < EXACT
    assert gap(await served.score(LONG), logprobs(model, LONG)) < EXACT
    await served.load(Weights(4, Path(TINY)))
    assert gap(await served.score(LONG), logprobs(policies[0][0], LONG)) < EXACT
