"""Every family's tiny model goes from a served call of a tool to the swap; what cannot be trained is refused with a reason."""

import base64
import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner.pretrained import load_causal_lm, load_tokenizer, positions
from art_embedded.engine import EmbeddedEngine
from bench.family_loop import QUESTION, take_through
from bench.family_models import FAMILIES, LLAMA3_ROPE, SIZES, YARN, make_tokenizer, save

NOISE = 5e-5
"""Nats; what engine and learner may differ by in float32."""
DOC = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
pytestmark = pytest.mark.filterwarnings("ignore:.*attention_mask:UserWarning")


async def through(name, tmp_path, *, request=None, sizes=None, **settings):
    folder = save(name, tmp_path / "model", **sizes or {})
    engine = EmbeddedEngine(folder, TrainConfig(threads=1))
    return await take_through(name, folder, tmp_path / "run", engine, request=request, **settings)


def check_learnt(seen):
    """The step trained what was sampled, and the swap serves what it made."""
    assert seen.tree_tokens < seen.call_tokens, "the runs share at least their question"
    assert seen.metrics["targets"] > 0 and seen.metrics["grad_norm"] > 0
    assert seen.metrics["logprob_gap"] < NOISE, "before the step the learner agrees with what was recorded"
    assert seen.metrics["mismatch"] < NOISE and seen.metrics["cannot_tell"] == 0
    assert (seen.before.policy_version, seen.after.policy_version) == (0, 1)
    assert seen.before.prompt_ids == seen.after.prompt_ids
    assert abs(seen.before.logprobs[0] - seen.after.logprobs[0]) > NOISE
    assert (seen.problems, seen.recomputed) == ([], 10), "the audit computes every call again"


def messages_of(seen):
    return [run.calls[0].response for run in seen.trajectories]


@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("qwen3", "qwen3-moe", "kimi-k2")])
async def test_a_family_goes_the_whole_way(name, tmp_path):
    seen = await through(name, tmp_path)
    check_learnt(seen)
    assert seen.extends, "nothing of the first turn is dropped, so the second goes on from its very ids"
    for message in messages_of(seen):
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}


@pytest.mark.system
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
async def test_thinking_is_answered_apart_and_dropped_from_the_next_turn_which_is_a_branch(name, tmp_path):
    seen = await through(name, tmp_path)
    check_learnt(seen)
    assert any(message.get("reasoning_content") for message in messages_of(seen))
    begins = load_tokenizer(tmp_path / "model").convert_tokens_to_ids("<think>")
    for message, (first, second) in zip(messages_of(seen), [run.calls for run in seen.trajectories], strict=True):
        assert len(message["tool_calls"]) == 1 and "think" not in (message["content"] or "")
        whole = first.prompt_ids + first.sampled_ids
        thought = first.sampled_ids[0] == begins
        assert (second.prompt_ids[: len(whole)] == whole) is not thought


@pytest.mark.system
async def test_thinking_that_is_turned_off_leaves_one_path(tmp_path):
    seen = await through("qwen3", tmp_path, request={"chat_template_kwargs": {"enable_thinking": False}})
    check_learnt(seen)
    assert not any("reasoning_content" in message for message in messages_of(seen))
    assert all(len(message["tool_calls"]) == 1 for message in messages_of(seen))


@pytest.mark.system
async def test_kimi_k2_is_computed_as_the_deepseek_v3_that_it_is(tmp_path):
    seen = await through("kimi-k2", tmp_path)
    check_learnt(seen)
    assert seen.extends
    for message in messages_of(seen):
        [call] = message["tool_calls"]
        assert call["id"].startswith("functions.get_weather:")
    model = load_causal_lm(tmp_path / "model", torch.float32)
    assert type(model) is transformers.DeepseekV3ForCausalLM
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["model_type"], saved["topk_method"]) == ("deepseek_v3", "noaux_tc"), "vLLM reads both"
    assert type(load_causal_lm(tmp_path / "again", torch.float32)) is transformers.DeepseekV3ForCausalLM


@pytest.mark.system
@pytest.mark.parametrize("name", ["qwen2.5", "kimi-k2", "qwen3-next"])
async def test_all_weights_can_be_trained_too(name, tmp_path):
    seen = await through(name, tmp_path, lora_rank=0, learning_rate=1e-3)
    check_learnt(seen)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen2_5Omni", "Qwen3OmniMoe"])
def test_a_multimodal_model_is_refused_with_the_reason_and_a_text_model(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"is multimodal .* images and sound aren't tokens.* such as Qwen/Qwen"
    ) as caught:
        load_causal_lm(tmp_path, torch.float32)
    assert str(tmp_path) in str(caught.value)


TEXT = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, **SIZES}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
QWEN_EYES = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4,
             "num_position_embeddings": 16}  # fmt: skip
GEMMA_EYES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
}


@pytest.mark.system
@pytest.mark.parametrize(("kind", "text", "eyes"), [("Qwen3_5", LINEAR, QWEN_EYES), ("Gemma3", WINDOWS, GEMMA_EYES)])
async def test_a_multimodal_folder_whose_text_model_transformers_loads_trains_on_text(kind, text, eyes, tmp_path):
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    text = TEXT | text | {"vocab_size": len(tokenizer)}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=eyes)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = EmbeddedEngine(str(tmp_path / "model"), TrainConfig(threads=1))
    check_learnt(await take_through("qwen2.5", str(tmp_path / "model"), tmp_path / "run", engine))


async def test_the_embedded_engine_refuses_a_multimodal_model(tmp_path):
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is multimodal"):
        await EmbeddedEngine(str(tmp_path), TrainConfig()).start()


def test_a_tokenizer_that_is_code_of_its_own_is_not_guessed(tmp_path):
    folder = Path(save("moonlight", tmp_path))
    config = folder / "tokenizer_config.json"
    code = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization.TikTokenTokenizer", None]},
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | code))
    (folder / "tokenizer.json").rename(folder / "elsewhere.json")
    with pytest.raises(
        ConfigError, match=r"is code of its own .* write a tokenizer\.json for it, as docs/models\.md says"
    ):
        load_tokenizer(folder)


KIMI_TOKENIZER = """
from transformers import PreTrainedTokenizer
import tiktoken
from tiktoken.load import load_tiktoken_bpe

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    pat_str = r"[0-9]|[a-z ]+|[^0-9a-z ]+"

    def __init__(self, vocab_file, **kwargs):
        self.vocab_file = vocab_file
        ranks = load_tiktoken_bpe(vocab_file)
        self.special_tokens = {"[EOS]": len(ranks) + 1, "[BOS]": len(ranks)}
        self.model = tiktoken.Encoding(
            "own", pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=self.special_tokens)
        self.n_words = self.model.n_vocab
        super().__init__(bos_token="[BOS]", eos_token="[EOS]", pad_token="[EOS]", **kwargs)

    vocab_size = property(lambda self: self.n_words)

    def get_vocab(self):
        return dict(self.special_tokens)

    def _tokenize(self, text):
        return [str(token) for token in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.special_tokens.get(token, int(token) if token.isdigit() else None)

    def _convert_id_to_token(self, token):
        return str(token)
"""
"""A tokenizer in the form of Kimi's: tiktoken's ranks, and a pattern of its own that cuts numbers into digits."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_recipe_of_the_docs_writes_a_tokenizer_that_cuts_texts_the_same(tmp_path):
    pytest.importorskip("tiktoken")
    folder = Path(save("moonlight", tmp_path / "model"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "tokenization_kimi.py").write_text(KIMI_TOKENIZER)
    pieces = [bytes([value]) for value in range(256)] + [b"12", b"ab", b"ab ", b"34"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TikTokenTokenizer", "auto_map": code})
    )
    with pytest.raises(ConfigError, match="is code of its own"):
        load_tokenizer(folder)
    own = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    [recipe] = re.findall(r"```python\n(from transformers import AutoTokenizer, .*?)```", DOC, flags=re.DOTALL)
    exec(compile(recipe, "models.md", "exec"), {"FOLDER": str(folder)})
    written = load_tokenizer(folder)
    for text in ("ab 1234 [EOS] Zürich 中文", "[BOS]ab ab12"):
        assert written(text)["input_ids"] == own.model.encode(text, allowed_special="all")
    assert (written.eos_token, written.bos_token) == ("[EOS]", "[BOS]")


def test_code_in_a_models_folder_is_not_run(tmp_path):
    folder = Path(save("qwen2.5", tmp_path))
    config = folder / "config.json"
    own = {"model_type": "its_own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_causal_lm(folder, torch.float32)


def test_a_name_without_a_network_is_one_line_with_what_there_is_here(monkeypatch):
    def away(*_, **__):
        raise OSError("We couldn't connect.\nSee 'https://hub.example'.")

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", away)
    with pytest.raises(
        ConfigError, match=r"model: We couldn't connect\. See 'https://hub.example'; pass .*model='tiny'"
    ) as refused:
        load_causal_lm("somebody/model", torch.float32)
    assert refused.value.__suppress_context__ and refused.value.__cause__ is None


@pytest.mark.parametrize(("config", "limit"), [
    (transformers.Qwen2Config(max_position_embeddings=32768), 32768),
    (transformers.Qwen2Config(max_position_embeddings=32768, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
    (transformers.Qwen3Config(max_position_embeddings=40960, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
    (transformers.LlamaConfig(max_position_embeddings=131072, rope_parameters=LLAMA3_ROPE), 131072),
    (transformers.DeepseekV3Config(max_position_embeddings=131072, rope_parameters={
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": 4096}), 131072),
    (transformers.DeepseekV3Config(max_position_embeddings=262144, rope_parameters={
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 4096}), 262144),
    (transformers.GPT2Config(n_positions=1024), 1024),
    (transformers.MambaConfig(), None),
], ids=["Qwen2.5", "Qwen2.5 with YaRN", "Qwen3 with YaRN", "Llama 3.1", "Kimi K2", "Kimi K2 0905", "GPT-2", "Mamba"])  # fmt: skip
def test_a_context_may_be_as_long_as_the_config_says_yarn_included(config, limit):
    assert positions(config) == limit


@pytest.mark.system
@pytest.mark.parametrize(("name", "sizes"), [
    ("qwen2.5", {"max_position_embeddings": 64, "rope_parameters": YARN}),
    ("llama3", {"max_position_embeddings": 2048, "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 64}}),
    ("kimi-k2", {"max_position_embeddings": 2048, "rope_parameters": YARN}),
])  # fmt: skip
async def test_a_prompt_beyond_the_original_length_is_served_and_trained(name, sizes, tmp_path):
    seen = await through(name, tmp_path, sizes=sizes)
    check_learnt(seen)
    longest = max(len(call.prompt_ids) for run in seen.trajectories for call in run.calls)
    assert longest > 4 * 64


async def test_without_a_longer_rope_a_long_prompt_is_refused(tmp_path):
    folder = save("qwen2.5", tmp_path / "model", max_position_embeddings=64)
    engine = EmbeddedEngine(folder, TrainConfig())
    await engine.start()
    try:
        with pytest.raises(Exception, match="maximum context length is 64 tokens"):
            await engine.chat({"messages": [QUESTION] * 20})
    finally:
        await engine.stop()
