"""What the embedded engine can do beside answering: score a text, and count what it computes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from art_core.errors import UpstreamError
from art_core.types import Weights
from art_embedded.kv import PackedKeyValues

PACKED = ["qwen3", "qwen3_moe", "llama", "gemma2", "gemma3", "gpt_oss"]
PLAIN = ["bloom", "mamba"]
IDS = [(37 * place * place + 11 * place + 5) % 300 for place in range(60)]
"""Longer than the sliding windows."""


def ask(text: str, **settings) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": 8, **settings}


def sampled(answer: dict) -> tuple[list[int], list[float]]:
    [choice] = answer["choices"]
    return choice["token_ids"], choice["token_logprobs"]


@torch.no_grad()
def plain(folder: str, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
    return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def furthest(found: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max())


@pytest.mark.parametrize("piece", [512, 7])
@pytest.mark.parametrize("family", PACKED + PLAIN)
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_a_scored_text_has_the_logprobs_of_a_plain_forward(family, piece, open_engine, save_model, monkeypatch):
    monkeypatch.setattr("art_embedded.score.PIECE", piece)
    engine = await open_engine(family)
    assert isinstance(engine._scheduler.rows.kv, PackedKeyValues) == (family in PACKED)
    found = await engine.score(IDS)
    assert len(found) == len(IDS) - 1
    assert furthest(found, plain(save_model(family), IDS)) < 1e-4
    assert await engine.score(IDS[:1]) == []


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "bloom"])
async def test_answers_before_and_after_a_score_are_the_same(family, open_engine):
    """A score leaves what is stored as it is: a prompt of before is found again, and is still right."""
    engine = await open_engine(family)
    asked = [ask("the weather in Rome is " * 4 + str(number)) for number in range(3)]
    before = [await engine.chat(it) for it in asked]
    tokens, logprobs = sampled(before[0])
    ids = [*before[0]["prompt_token_ids"], *tokens]
    scored, *during = await asyncio.gather(engine.score(ids), *(engine.chat(it) for it in asked))
    after = [await engine.chat(it) for it in asked]
    for again in (during, after):
        for one, other in zip(before, again, strict=True):
            assert sampled(one)[0] == sampled(other)[0]
            assert sampled(one)[1] == pytest.approx(sampled(other)[1], abs=1e-4)
    assert scored[-len(tokens) :] == pytest.approx(logprobs, abs=1e-4)
    if family != "bloom":
        assert all(it["usage"]["prompt_tokens_details"]["cached_tokens"] > 20 for it in after)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_a_score_is_of_the_newest_weights(family, open_engine, save_model):
    engine = await open_engine(family)
    first = await engine.score(IDS)
    model = AutoModelForCausalLM.from_pretrained(save_model(family))
    live = {name: (tensor * 1.1).detach() for name, tensor in model.named_parameters()}
    await engine.load(Weights(version=1, path=None, live=live))
    second = await engine.score(IDS)
    model.load_state_dict(live, strict=False)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)
    assert furthest(second, logprobs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]) < 1e-4
    assert furthest(first, torch.tensor(second)) > 0.01


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "1 to 512 tokens, got 0"),
        ([1] * 513, "1 to 512 tokens, got 513"),
        ([1, 100000], "token id 100000 is out of range"),
    ],
)
async def test_what_cannot_be_scored_is_refused(ids, says, open_engine):
    engine = await open_engine("qwen3")
    with pytest.raises(UpstreamError, match=says) as caught:
        await engine.score(ids)
    assert caught.value.status == 400


async def test_what_is_computed_is_counted(open_engine):
    engine = await open_engine("qwen3")
    assert await engine.counters() == {"prompt_tokens": 0, "cached_tokens": 0, "sampled_tokens": 0}
    answers = [await engine.chat(ask("the weather in Rome is " * 4)) for _ in range(2)]
    prompts = sum(len(it["prompt_token_ids"]) for it in answers)
    cached = sum(it["usage"]["prompt_tokens_details"]["cached_tokens"] for it in answers)
    assert cached > 20
    tokens = sum(it["usage"]["completion_tokens"] for it in answers)
    assert await engine.counters() == {"prompt_tokens": prompts, "cached_tokens": cached, "sampled_tokens": tokens}
