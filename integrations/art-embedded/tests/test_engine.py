"""The embedded engine through its public API, against a plain forward pass of the same model."""

from __future__ import annotations

import asyncio
import shutil
import time
import weakref
from pathlib import Path

import httpx
import pytest
import torch
from capture_fakes import ListRecorder, wait_until
from engine_checks import plain_model, worst_difference
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, T5Config

from art_core.config import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.runtime import memory
from art_core.serving import ServingProxy
from art_core.types import Call, Weights
from art_embedded import TINY, loading
from art_embedded.engine import EmbeddedEngine
from art_embedded.kv import Batch, PackedKeyValues
from art_embedded.loading import load_model, make_key_values
from art_embedded.rows import SMALLEST_CAPACITY
from art_embedded.sampling import sample

ROME = "the weather in Rome is "


def ask(text: str, **settings) -> dict:
    return {"messages": [{"role": "user", "content": text}], **settings}


async def talk(engine: EmbeddedEngine, client: int) -> list[tuple[dict, float]]:
    """Three turns whose lengths, temperatures and numbers of choices differ from client to client."""
    temperature = (1.0, 0.7, 0.0)[client % 3]
    messages = [{"role": "user", "content": ROME * (1 + client % 4) + str(client)}]
    answers = []
    for _ in range(3):
        request = {"messages": messages, "max_tokens": 3 + 4 * (client % 5), "n": 1 + client % 2}
        completion = await engine.chat({**request, "temperature": temperature, "top_p": 0.9, "top_k": 50})
        answers.append((completion, temperature))
        answer = completion["choices"][0]["message"]
        messages = [*messages, answer, {"role": "user", "content": "and then? " * (client % 3)}]
    return answers


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_logprobs_are_those_of_a_plain_forward_while_requests_join_and_leave(family, open_engine, save_model):
    engine = await open_engine(family, max_concurrent=4)
    assert isinstance(engine._scheduler.rows.kv, PackedKeyValues)
    talks = await asyncio.gather(*[talk(engine, client) for client in range(10)])
    model = plain_model(save_model(family))
    assert max(worst_difference(model, *answer) for answers in talks for answer in answers) < 1e-4
    assert any(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 10 for answers in talks for answer, _ in answers
    )


async def test_a_model_with_an_attention_of_its_own_is_served_too(open_engine, save_model, caplog):
    engine = await open_engine("bloom")
    assert "one sequence at a time" in caplog.text
    talks = await asyncio.gather(*[talk(engine, client) for client in range(3)])
    model = AutoModelForCausalLM.from_pretrained(save_model("bloom")).eval()
    assert max(worst_difference(model, *answer) for answers in talks for answer in answers) < 1e-4


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
async def test_a_state_is_kept_at_the_end_of_a_prompt_for_the_rest_of_its_group(
    family, open_engine, save_model, monkeypatch
):
    monkeypatch.setattr("art_embedded.scheduler.PROMPT_TOKENS_PER_STEP", 32)
    engine = await open_engine(family, max_concurrent=4)
    group = await asyncio.gather(*[engine.chat(ask(ROME * 4, max_tokens=6, n=2)) for _ in range(4)])
    [prompt] = {len(answer["prompt_token_ids"]) for answer in group}
    assert sum(cached(answer) == prompt - 1 for answer in group) >= 3
    # A turn that doesn't repeat what was sampled still finds the prompt; one that does, the whole.
    asked = [{"role": "user", "content": ROME * 4}]
    turns = [
        await engine.chat({"messages": [*asked, said, {"role": "user", "content": "and then?"}], "max_tokens": 6})
        for said in ({"role": "assistant", "content": "Rome!"}, group[0]["choices"][0]["message"])
    ]
    assert cached(turns[0]) == prompt - 1
    model = plain_model(save_model(family))
    assert max(worst_difference(model, answer) for answer in [*group, *turns]) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
async def test_answers_of_a_model_with_states_are_right_while_requests_join_and_leave(family, open_engine, save_model):
    engine = await open_engine(family, max_concurrent=4)
    talks = await asyncio.gather(*[talk(engine, client) for client in range(10)])
    model = plain_model(save_model(family))
    assert max(worst_difference(model, *answer) for answers in talks for answer in answers) < 1e-4
    assert any(cached(answer) > 10 for answers in talks for answer, _ in answers)


@torch.inference_mode()
def test_a_model_that_cannot_continue_its_cache_recomputes_its_rows(save_model, caplog):
    model = load_model(save_model("qwen3_5"))
    whole_row = model.forward
    model.forward = lambda input_ids, past_key_values=None, use_cache=False: whole_row(input_ids=input_ids)
    cache = make_key_values(model)
    assert (
        "every token recomputes its whole row, because the cache can't be continued: its logits differ" in caplog.text
    )
    cache.resize(1, 8)
    cache.forward(Batch([5, 6, 7], [0, 1, 2], [0] * 3, runs=[(0, 3)], outputs=[2]))
    logits = cache.forward(Batch([8], [3], [0], decoding=1, outputs=[0]))
    torch.testing.assert_close(logits, whole_row(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1:])


async def test_a_prompt_longer_than_a_step_is_computed_in_pieces(open_engine, save_model, monkeypatch):
    monkeypatch.setattr("art_embedded.scheduler.PROMPT_TOKENS_PER_STEP", 32)
    engine = await open_engine("mistral")
    talks = await asyncio.gather(*[engine.chat(ask(ROME * 8 + str(n), max_tokens=6)) for n in range(5)])
    model = plain_model(save_model("mistral"))
    assert max(worst_difference(model, answer) for answer in talks) < 1e-4


async def test_a_row_s_logprobs_do_not_depend_on_the_length_of_its_neighbours(open_engine, save_model, caplog):
    engine = await open_engine("longrope")
    assert engine.max_context == 64
    assert "max_context is 64 instead of 512" in caplog.text
    asked = [ask("hi", max_tokens=30, stop="never"), ask(ROME * 20, max_tokens=30)]
    short, long = await asyncio.gather(*[engine.chat(request) for request in asked], return_exceptions=True)
    assert worst_difference(plain_model(save_model("longrope")), short) < 1e-4
    assert (long.status, long.code) == (400, "context_length_exceeded")


async def test_a_requested_context_within_the_fixed_frequencies_is_kept_without_a_warning(open_engine, caplog):
    assert (await open_engine("longrope", max_context=48)).max_context == 48
    assert (await open_engine("llama")).max_context == 512
    assert "max_context" not in caplog.text


async def test_requests_wait_for_memory_instead_of_failing(open_engine, monkeypatch):
    monkeypatch.setattr("art_embedded.engine.memory_budget", lambda: 1)
    engine = await open_engine()
    answers = await asyncio.gather(*[engine.chat(ask(ROME * n, max_tokens=4)) for n in (1, 30, 5)])
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4, 4, 4]


async def test_a_long_request_gets_its_turn_among_short_ones(open_engine):
    engine = await open_engine()
    rows = engine._scheduler.rows
    rows.budget = 4 * SMALLEST_CAPACITY * rows.kv.token_bytes
    ended = []

    async def one(name, text):
        await engine.chat(ask(text, max_tokens=4))
        ended.append(name)

    short = ["short"] * 10
    await asyncio.gather(*(one(name, ROME * (60 if name == "long" else 1)) for name in [*short[:2], "long", *short]))
    assert ended.index("long") < 5


async def test_an_engine_beside_a_small_one_keeps_its_threads(open_engine, monkeypatch):
    monkeypatch.setattr("art_embedded.engine.THREADS", 3)
    await open_engine()
    monkeypatch.setattr("art_embedded.engine.SMALL_MODEL", 0)
    larger = await open_engine()
    assert await larger._scheduler.call(torch.get_num_threads) == 3


@pytest.mark.parametrize(
    ("limits", "bytes_"), [(["4000\n", None], 1000), ([None, "8000\n"], 2000), (["max\n", None], None)]
)
def test_a_container_s_limit_counts_where_it_is_below_the_machine_s(limits, bytes_, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", files)
    machine = loading.memory_budget()
    for file, limit in zip(files, limits, strict=True):
        if limit is not None:
            file.write_text(limit)
    assert loading.memory_budget() == (machine if bytes_ is None else bytes_)


def test_memory_in_use_is_the_container_s_where_its_limit_counts(tmp_path, monkeypatch):
    files = {
        "MEMINFO": "MemTotal: 100 kB\nMemAvailable: 40 kB\n",
        "limit": "max\n",
        "CONTAINER_USE": "anon 5000\nfile 9\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "MEMINFO")
    monkeypatch.setattr(memory, "CONTAINER_USE", tmp_path / "CONTAINER_USE")
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", (tmp_path / "limit",))
    assert memory.used_memory() == 60 * 1024
    (tmp_path / "limit").write_text("8000\n")
    assert memory.used_memory() == 5000
    (tmp_path / "CONTAINER_USE").unlink()
    assert memory.used_memory() == 0


async def test_choices_of_one_request_share_the_prompt(open_engine):
    engine = await open_engine()
    answer = await engine.chat(ask(ROME * 4, n=4, max_tokens=8))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    assert engine._scheduler.rows.lengths.tolist().count(0) <= 4, "the prompt was copied into four rows"


async def test_greedy_answers_agree_with_the_model_and_with_each_other(open_engine, save_model):
    engine = await open_engine()
    one, other = [await engine.chat(ask(ROME, temperature=0, max_tokens=10)) for _ in range(2)]
    ids = one["prompt_token_ids"] + one["choices"][0]["token_ids"]
    logits = plain_model(save_model())(input_ids=torch.tensor([ids])).logits[0]
    assert logits[len(one["prompt_token_ids"]) - 1 : -1].argmax(-1).tolist() == one["choices"][0]["token_ids"]
    assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]


async def test_a_seed_gives_the_same_answer_whatever_else_is_running(open_engine):
    engine = await open_engine()
    alone = await engine.chat(ask(ROME, seed=5, max_tokens=12))
    crowd = await asyncio.gather(*[engine.chat(ask(ROME, seed=seed, max_tokens=12)) for seed in (5, 6, 7)])
    sampled = [answer["choices"][0]["token_ids"] for answer in [alone, *crowd]]
    assert sampled[0] == sampled[1]
    assert sampled[1] != sampled[2] != sampled[3]


async def test_a_run_draws_the_same_again_and_one_that_goes_on_draws_anew(open_engine, save_model):
    async def answers(engine: EmbeddedEngine) -> list[list[int]]:
        asked = [await engine.chat(ask(ROME, max_tokens=12)) for _ in range(3)]
        return [answer["choices"][0]["token_ids"] for answer in asked]

    first, again, resumed, other = [await open_engine(seed=seed) for seed in (3, 3, 3, 4)]
    begun = await answers(first)
    assert begun == await answers(again)
    await resumed.load(Weights(version=2, path=Path(save_model())))
    assert not [answer for answer in await answers(resumed) if answer in begun], "the weights are the same"
    assert await answers(other) != begun


async def test_max_tokens_is_clipped_to_the_context(open_engine):
    engine = await open_engine(max_context=64)
    answer = await engine.chat(ask(ROME, max_tokens=1000, temperature=0, stop="never"))
    assert answer["usage"]["total_tokens"] <= 64
    if answer["usage"]["total_tokens"] == 64:
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_that_leaves_no_room_is_refused_in_the_words_that_frameworks_know(open_engine):
    engine = await open_engine(max_context=32)
    with pytest.raises(
        UpstreamError, match=r"This model's maximum context length is 32 tokens. However, you req"
    ) as caught:
        await engine.chat(ask(ROME * 10))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(open_engine):
    engine = await open_engine()
    free = await engine.chat(ask(ROME, seed=1, max_tokens=40))
    content = free["choices"][0]["message"]["content"]
    stop = next(content[place : place + 2] for place in range(5, len(content)) if content[place : place + 2].isascii())
    stopped = await engine.chat(ask(ROME, seed=1, max_tokens=40, stop=[stop, "not there"]))
    choice = stopped["choices"][0]
    assert choice["message"]["content"] == content[: content.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == free["choices"][0]["token_ids"][: len(choice["token_ids"])]
    chunks = [chunk async for chunk in engine.stream(ask(ROME, seed=1, max_tokens=40, stop=stop))]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == choice["message"]["content"]


async def test_logprobs_are_given_to_the_client_in_openai_s_form(open_engine):
    engine = await open_engine()
    answer = await engine.chat(ask(ROME, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0))
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == choice["token_logprobs"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"]) for entry in content)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}


SHAPING = [
    {"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 100}}, {"min_p": 0.1},
    {"typical_p": 0.9}, {"tfs_z": 0.5}, {"mirostat": 2}, {"min_tokens": 5}, {"ignore_eos": True}, {"stop_token_ids": [7]},
    {"bad_words": ["no"]}, {"allowed_token_ids": [7]}, {"use_beam_search": True}, {"structured_outputs": {"regex": "a"}},
    {"guided_json": {}}, {"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_grammar": "root ::= 'a'"}, {"regex": "a"},
    {"ebnf": "root ::= 'a'"}, {"logits_processors": ["a"]}, {"chat_template": "{{ messages }}"}, {"add_generation_prompt": False},
    {"continue_final_message": True}, {"truncate_prompt_tokens": 5},
]  # fmt: skip
"""Settings that change what is sampled, and that only other engines have."""
NEUTRAL = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_p": 0.0, "typical_p": 1,
    "tfs_z": 1, "mirostat": 0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "bad_words": [],
    "allowed_token_ids": None, "use_beam_search": False, "structured_outputs": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "regex": None, "ebnf": None, "logits_processors": [], "chat_template": None,
    "add_generation_prompt": True, "continue_final_message": False, "truncate_prompt_tokens": None,
}  # fmt: skip


async def test_settings_of_other_engines_are_accepted_if_they_change_nothing(open_engine):
    engine = await open_engine()
    assert {name for setting in SHAPING for name in setting} == set(NEUTRAL)
    plain, neutral = [await engine.chat(ask(ROME, seed=5, max_tokens=8, **more)) for more in ({}, NEUTRAL)]
    assert plain["choices"][0]["token_ids"] == neutral["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *((setting, next(iter(setting))) for setting in SHAPING),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 2}, "between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text models only"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_a_400(settings, says, open_engine):
    engine = await open_engine()
    with pytest.raises(UpstreamError, match=says) as caught:
        await engine.chat(ask("hi", **settings))
    assert caught.value.status == 400


async def test_a_token_beyond_the_model_s_rows_is_refused_and_the_engine_goes_on(open_engine, save_model, tmp_path):
    folder = shutil.copytree(save_model(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(folder)
    engine = await open_engine(folder=str(folder))
    last = len(tokenizer) - 1
    for request in (ask("see <image_soft_token>"), {"prompt": "see <image_soft_token>"}, {"prompt": [last]}):
        with pytest.raises(UpstreamError, match=rf"{last} \(<image_soft_token>\) .* 0 to {last - 1}") as caught:
            await engine.chat(request)
        assert caught.value.status == 400
    assert (await engine.chat(ask("hi", max_tokens=1)))["choices"][0]["token_ids"]


async def test_cancelling_frees_the_row_for_others(open_engine):
    engine = await open_engine()
    task = asyncio.create_task(engine.chat(ask(ROME, max_tokens=400, stop="never")))
    stream = engine.stream(ask(ROME, max_tokens=400, stop="never"))
    await anext(stream)
    await asyncio.sleep(0.05)
    task.cancel()
    await stream.aclose()
    assert (await task)["choices"][0]["finish_reason"] == "aborted"
    await engine.chat(ask("hi", max_tokens=1))
    assert not engine._scheduler._decoding
    assert all(occupant is None for occupant in engine._scheduler.rows.occupants)


@pytest.fixture
def slow_steps(monkeypatch):
    def slow_sample(logits, draws):
        time.sleep(0.01)
        return sample(logits, draws)

    monkeypatch.setattr("art_embedded.scheduler.sample", slow_sample)


def as_choice(call: Call) -> dict:
    return {"token_ids": list(call.sampled_ids), "token_logprobs": call.logprobs}


@pytest.mark.parametrize("leaves", ["the client", "the rollout"])
async def test_a_call_that_is_given_up_is_recorded_as_far_as_it_came(leaves, save_model, slow_steps):
    engine, recorder = EmbeddedEngine(save_model(), TrainConfig()), ListRecorder()
    async with await ServingProxy.start(lambda: engine, lambda: recorder, process=False) as serving:
        engine._scheduler.stop_ids = frozenset()
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            body = ask(ROME, max_tokens=400, n=2)
            asking = asyncio.create_task(client.post(f"{url}/chat/completions", json=body, timeout=60))
            decoding = engine._scheduler._decoding
            await asyncio.to_thread(wait_until, lambda: any(len(choice.sampled) > 3 for choice in list(decoding)))
            if leaves == "the client":
                asking.cancel()
            await serving.close("r1", grace=0.0)
            await asyncio.gather(asking, return_exceptions=True)
    calls = recorder.of("r1")
    assert [(call.choice, call.finish_reason) for call in calls] == [(0, "aborted"), (1, "aborted")]
    assert all(3 <= len(call.sampled_ids) < 400 for call in calls)
    completion = {"prompt_token_ids": list(calls[0].prompt_ids), "choices": [as_choice(call) for call in calls]}
    assert worst_difference(plain_model(save_model()), completion) < 1e-4


async def test_of_a_call_that_is_given_up_the_choices_that_had_ended_say_how(open_engine, slow_steps):
    engine = await open_engine()
    engine._scheduler.stop_ids = frozenset(range(0, 400, 10))
    task = asyncio.create_task(engine.chat(ask(ROME, seed=1, n=16, max_tokens=400)))
    decoding = engine._scheduler._decoding
    await asyncio.to_thread(wait_until, lambda: len(decoding) > 8)
    await asyncio.to_thread(wait_until, lambda: len(decoding) <= 8)
    task.cancel()
    choices = (await task)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "aborted"}
    for choice in choices:
        assert (choice["token_ids"][-1] % 10 == 0) == (choice["finish_reason"] == "stop")


async def test_live_weights_are_served_without_a_copy_and_change_the_answer_and_the_version(open_engine, save_model):
    engine = await open_engine()
    request = ask(ROME, temperature=0, max_tokens=6)
    before = await engine.chat(request)
    learner = plain_model(save_model())
    live = {name: parameter.data.share_memory_() for name, parameter in learner.named_parameters()}
    await engine.load(Weights(version=1, path=None, live=live))
    for tensor in live.values():
        tensor.add_(torch.randn_like(tensor), alpha=0.3)
    await engine.load(Weights(version=2, path=None, live=live))
    after = await engine.chat(request)
    assert (before["policy_version"], after["policy_version"]) == (0, 2)
    assert before["choices"][0]["token_logprobs"] != after["choices"][0]["token_logprobs"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert worst_difference(learner, after) < 1e-4
    served = dict(engine._model.named_parameters())
    assert all(served[name].data_ptr() == tensor.data_ptr() for name, tensor in live.items())


async def test_a_whole_state_dict_with_both_names_of_a_tied_weight_is_accepted(open_engine, save_model):
    engine = await open_engine()
    await engine.load(Weights(version=1, path=None, live=plain_model(save_model()).state_dict()))
    answer = await engine.chat(ask(ROME, max_tokens=3))
    assert answer["policy_version"] == 1


async def test_live_weights_of_another_model_are_refused_by_name(open_engine, save_model):
    engine = await open_engine()
    live = {f"base.{name}": tensor for name, tensor in plain_model(save_model()).state_dict().items()}
    with pytest.raises(ConfigError, match=r"are missing \(first: \['model.embed_tokens.weight'"):
        await engine.load(Weights(version=1, path=None, live=live))


async def test_weights_are_loaded_from_a_model_folder_and_from_an_adapter_folder(open_engine, save_model, tmp_path):
    from peft import LoraConfig, get_peft_model

    engine = await open_engine()
    other = plain_model(save_model())
    for parameter in other.parameters():
        parameter.data.mul_(0.9)
    other.save_pretrained(tmp_path / "full")
    await engine.load(Weights(version=1, path=tmp_path / "full"))
    assert worst_difference(other, await engine.chat(ask(ROME, max_tokens=5))) < 1e-4

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(plain_model(save_model()), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    await engine.load(Weights(version=2, path=tmp_path / "adapter"))
    answer = await engine.chat(ask(ROME, max_tokens=5))
    assert answer["policy_version"] == 2
    assert worst_difference(adapted, answer) < 1e-4


async def test_the_old_model_is_gone_before_the_new_one_gets_its_place_and_the_budget_stays(
    open_engine, save_model, tmp_path, monkeypatch
):
    budgets, left = iter([2**30, 1]), []
    monkeypatch.setattr("art_embedded.engine.memory_budget", lambda: next(budgets))
    engine = await open_engine()
    await engine.chat(ask(ROME, max_tokens=3))
    old = weakref.ref(engine._model)

    def place(model):
        left.append(old())
        return loading.place(model)

    monkeypatch.setattr("art_embedded.engine.place", place)
    with pytest.raises(ConfigError):
        await engine.load(Weights(version=1, path=tmp_path / "missing"))
    assert (await engine.chat(ask(ROME, max_tokens=3)))["policy_version"] == 0, "what can't be loaded replaces nothing"
    await engine.load(Weights(version=1, path=Path(save_model())))
    assert left == [None]
    assert engine._scheduler.rows.budget == 2**30
    assert (await engine.chat(ask(ROME, max_tokens=3)))["policy_version"] == 1


def out_of_memory(*_):
    raise MemoryError("no memory left")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_requests_fail_if_the_cache_cannot_grow_for_them(open_engine, monkeypatch):
    engine = await open_engine()
    await engine.chat(ask("hi", max_tokens=1))
    monkeypatch.setattr(engine._scheduler.rows.kv, "resize", out_of_memory)
    with pytest.raises(UpstreamError, match="no memory left") as caught:
        await asyncio.wait_for(engine.chat(ask(ROME, max_tokens=400, n=2)), 30)
    assert caught.value.status == 503


@pytest.mark.parametrize("step", ["place", "make_key_values"])
async def test_after_a_load_that_ran_out_of_memory_requests_fail_until_the_next_load(
    step, open_engine, save_model, monkeypatch
):
    engine, new = await open_engine(), Weights(version=1, path=Path(save_model()))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(f"art_embedded.engine.{step}", out_of_memory)
        await engine.load(new)
    for request in (engine.chat(ask("hi", max_tokens=1)), engine.score([1, 2])):
        with pytest.raises(UpstreamError, match="has no model") as caught:
            await asyncio.wait_for(request, 30)
        assert caught.value.status == 503
    await engine.load(new)
    assert (await engine.chat(ask("hi", max_tokens=1)))["policy_version"] == 1


async def test_a_load_waits_for_the_requests_in_flight(open_engine, save_model):
    engine = await open_engine()
    running = asyncio.create_task(engine.chat(ask(ROME, max_tokens=60, stop="never")))
    await asyncio.sleep(0.02)
    await engine.load(Weights(version=1, path=None, live=plain_model(save_model()).state_dict()))
    late = await engine.chat(ask(ROME, max_tokens=2))
    assert ((await running)["policy_version"], late["policy_version"]) == (0, 1)


async def test_what_is_no_causal_lm_is_a_config_error(tmp_path, save_model):
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        await EmbeddedEngine(str(tmp_path), TrainConfig()).start()
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        await EmbeddedEngine(str(tmp_path), TrainConfig()).start()
    AutoTokenizer.from_pretrained(save_model()).save_pretrained(tmp_path)
    T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=10).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        await EmbeddedEngine(str(tmp_path), TrainConfig()).start()


async def test_an_engine_that_is_not_running_says_so(save_model):
    engine = EmbeddedEngine(save_model(), TrainConfig())
    with pytest.raises(UpstreamError, match="hasn't been started"):
        await engine.chat(ask("hi"))
    await engine.start()
    waiting = asyncio.create_task(engine.chat(ask(ROME, max_tokens=450, stop="never")))
    await asyncio.sleep(0.02)
    await engine.stop()
    with pytest.raises(UpstreamError, match="stopped"):
        await waiting
    with pytest.raises(UpstreamError, match="has been stopped"):
        await engine.chat(ask("hi"))


@pytest.mark.skipif(not (TINY / "config.json").is_file(), reason="the tiny model has not been made")
async def test_the_tiny_model_is_served_with_exact_logprobs():
    engine = EmbeddedEngine(str(TINY), TrainConfig())
    await engine.start()
    try:
        answers = await asyncio.gather(*[engine.chat(ask(f"hello {n}", max_tokens=20)) for n in range(6)])
    finally:
        await engine.stop()
    model = plain_model(str(TINY))
    assert max(worst_difference(model, answer) for answer in answers) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer.apply_chat_template(ask("hello 0")["messages"], add_generation_prompt=True, return_dict=False)
    assert answers[0]["prompt_token_ids"] == ids


@pytest.mark.parametrize(
    "odd",
    [{"temperature": 1e-40}, {"temperature": 1e300}, {"top_k": 2**70}, {"top_p": 1e-300}, {"stop": "\ud800"}],
)
async def test_an_extreme_setting_is_answered_and_hurts_nobody_else(open_engine, odd):
    engine = await open_engine(max_tokens=20)
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    for answer in await asyncio.gather(*(engine.chat(asked | extra) for extra in ({}, odd, {}))):
        assert answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5}, {"stop": [1]}, {"tools": "x"}, {"tools": [None]}, {"stream_options": 5}, {"chat_template_kwargs": 5},
    ],
    ids=str,
)  # fmt: skip
async def test_a_setting_of_the_wrong_kind_is_a_400_that_names_it(open_engine, wrong):
    engine = await open_engine(max_tokens=4)
    with pytest.raises(UpstreamError, match=next(iter(wrong))) as caught:
        await engine.chat({"messages": [{"role": "user", "content": "hi"}], **wrong})
    assert caught.value.status == 400
