"""``art export``: what is written is what was trained, in forms that others load, or it is not written."""

import asyncio
import itertools
import json
import shlex
import shutil
import sys
from pathlib import Path
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
from art_cli import main
from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner.replay import load_weights
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_embedded import TINY
from art_vllm import export_check
from art_vllm.export import export
from bench.family_models import save

AGENT = ScriptedAgent(turns=2, max_tokens=10)
IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 90, 12, 400, 3]])
_scored = itertools.count()


def contrast(trajectory):
    return float(next(_scored) % 2)


async def train(run_dir, model="tiny", steps=2, **settings):
    """Steps of the real learner, large enough to be seen."""
    settings = {
        "learning_rate": 2e-3,
        "warmup_steps": 0,
        "keep_checkpoints": None,
        "learner": "torch",
        "engine": FakeEngine(),
        **settings,
    }
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


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """What was exported of the run with an adapter; to be read only."""
    return export(trained(8), tmp_path_factory.mktemp("exports") / "out")


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


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.parametrize("lora_rank", [8, 0])
def test_the_merged_folder_is_a_plain_model_with_the_trained_logprobs(trained, exported, tmp_path, lora_rank):
    exported = exported if lora_rank else export(trained(lora_rank), tmp_path / "out")
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
    with pytest.raises(ConfigError, match="no checkpoint of step 7; available steps: 1, 2"):
        export(trained(8), tmp_path / "other", step=7)


def test_before_anything_was_sampled_by_it_a_version_is_compared_on_the_newest_call(exported):
    assert exported.check.text == "a stored call of version 1"


async def test_where_no_call_was_recorded_a_fixed_text_is_compared(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner="torch", lora_rank=2) as run:
        await run.checkpoint()
    exported = export(tmp_path / "run", tmp_path / "out")
    assert exported.check.text == "a fixed text"
    assert exported.check.moved == 0


def test_whoever_may_read_the_config_may_read_the_weights(exported):
    modes = {it.name: it.stat().st_mode for it in exported.merged.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_the_number_format_is_the_start_weights_unless_another_is_asked_for(trained, exported, tmp_path):
    half = export(trained(8), tmp_path / "half", dtype="bfloat16")
    for written, dtype in ((exported, "F32"), (half, "BF16")):
        with safe_open(written.merged / "model.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {dtype}  # noqa: SIM118
    assert json.loads((half.merged / "config.json").read_text())["dtype"] == "bfloat16"
    assert 1e-4 < half.check.largest < 0.5
    assert half.check.mean < half.check.moved and not half.notes


@pytest.mark.system
def test_what_a_number_format_takes_away_is_said(tmp_path):
    asyncio.run(train(tmp_path / "run", steps=1, lora_rank=8, learning_rate=1e-5))
    exported = export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert "rounding to bfloat16 removes what was trained" in exported.notes[0]


def test_the_record_holds_where_it_comes_from_and_every_file(trained, exported):
    record = json.loads((exported.folder / "export.json").read_text())
    with Store(trained(8) / "run.sqlite") as store:
        assert record["start_weights"] == store.meta("start_weights")
    assert (record["run"], record["step"], record["version"]) == (str(trained(8).resolve()), 2, 2)
    there = {str(file.relative_to(exported.folder)) for file in exported.folder.rglob("*") if file.is_file()}
    assert set(record["files"]) == there - {"export.json"}
    assert record["check"]["largest"] == exported.check.largest


def test_every_way_to_serve_it_is_written_down(exported):
    page = (exported.folder / "SERVE.md").read_text()
    assert "--model merged --served-model-name rank8 --dtype float32" in page
    assert f"--model {TINY} --dtype float32 --enable-lora --max-lora-rank 8 --lora-modules rank8=adapter" in page
    assert page.count("--enable-auto-tool-choice --tool-call-parser hermes") == 2
    assert f"--model {exported.merged}" in exported.commands["merged"]
    assert f"rank8={exported.adapter}" in exported.commands["adapter"]


async def test_tools_that_art_wrote_into_the_prompt_are_in_the_exports_template(tmp_path):
    start = shutil.copytree(TINY, tmp_path / "model")
    (start / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    await train(tmp_path / "run", str(start), steps=1, lora_rank=2)
    exported = export(tmp_path / "run", tmp_path / "out")
    tool = {"type": "function", "function": {"name": "get_weather"}}
    for folder in (exported.merged, exported.adapter):
        tokenizer = AutoTokenizer.from_pretrained(start, chat_template=(folder / "chat_template.jinja").read_text())
        assert "get_weather" in tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], [tool], tokenize=False
        )
    assert "get_weather" in AutoTokenizer.from_pretrained(exported.merged).apply_chat_template(
        [{"role": "user", "content": "hi"}], [tool], tokenize=False
    )
    assert (
        "--lora-modules run=adapter --chat-template adapter/chat_template.jinja"
        in (exported.folder / "SERVE.md").read_text()
    )


@pytest.mark.engines
async def test_the_merged_folder_is_a_model_to_evaluate(trained, exported, tmp_path):
    report = await art.evaluate(
        AGENT, ["one", "two"], model=exported.merged, reward=lambda t: 1.0, run_dir=tmp_path / "eval", progress=False
    )
    assert report.mean_reward == 1.0
    with Store(tmp_path / "eval" / "run.sqlite") as store:
        call = store.trajectories()[0].calls[0]
    model = as_trained(trained(8))
    ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0] / (call.temperature or 1.0), -1)
    found = expected[range(len(call.prompt_ids) - 1, ids.shape[1] - 1), list(call.sampled_ids)]
    assert np.allclose(found, call.logprobs, atol=1e-4)


# PEFT looks for the experts' names among modules only, and finds them among parameters all the same.
@pytest.mark.system
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_experts_trained_as_parameters_are_merged(tmp_path):
    folder = tmp_path / "model"
    sizes = {"vocab_size": 884, "intermediate_size": 32, "hidden_size": 32, "head_dim": 8}
    model = make_model("qwen3 with experts", torch.float32, **sizes, eos_token_id=2, max_position_embeddings=512)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)
    asyncio.run(train(tmp_path / "run", model=str(folder), lora_rank=4))
    exported = export(tmp_path / "run", tmp_path / "out")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    with safe_open(exported.adapter / "adapter_model.safetensors", "pt") as file:
        assert any("experts" in name for name in file.keys())  # noqa: SIM118
    assert "It adapts experts" in (exported.folder / "SERVE.md").read_text()
    expected = logprobs(load_weights(str(folder), checkpoint))
    assert far(logprobs(AutoModelForCausalLM.from_pretrained(exported.merged)), expected) < 1e-4
    assert far(logprobs(AutoModelForCausalLM.from_pretrained(folder)), expected) > 1e-3
    assert exported.check.largest < 1e-4


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_kimi_k2_is_exported_without_its_code(tmp_path):
    model = Path(save("kimi-k2", tmp_path / "model", vocab_size=884))
    (model / "configuration_deepseek.py").write_text("raise SystemExit('it was run')")
    asyncio.run(train(tmp_path / "run", model=str(model), steps=1, lora_rank=4))
    exported = export(tmp_path / "run", tmp_path / "out")
    assert json.loads((exported.merged / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert exported.check.largest < 1e-4 and exported.check.moved > 1e-4


def spoil(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(run_dir, tmp_path):
    spoil(run_dir / "checkpoints" / "step-000002" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(StoreError, match="is not what was saved"):
        export(run_dir, tmp_path / "out")
    assert {it.name for it in tmp_path.iterdir()} == {"run"}
    assert export(run_dir, tmp_path / "out", step=1).check.largest < 1e-4


def test_an_export_is_never_written_over(trained, tmp_path):
    export(trained(8), tmp_path / "out", merged=False)
    before = (tmp_path / "out" / "export.json").read_bytes()
    with pytest.raises(ConfigError, match="isn't empty; pass another --out"):
        export(trained(8), tmp_path / "out")
    assert (tmp_path / "out" / "export.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    export(trained(8), tmp_path / "empty", merged=False, check=False)
    with pytest.raises(ConfigError, match=r"export\.json is a file"):
        export(trained(8), tmp_path / "empty" / "export.json")


def test_two_exports_to_one_place_do_not_mix(trained, tmp_path):
    (tmp_path / ".out.unfinished" / "adapter").mkdir(parents=True)  # of one that was killed

    def again(what):
        if what == "hashing the files":
            with pytest.raises(ConfigError, match="another export is writing to"):
                export(trained(8), tmp_path / "out")

    export(trained(8), tmp_path / "out", merged=False, check=False, progress=again)
    assert {it.name for it in (tmp_path / "out").iterdir()} == {"adapter", "SERVE.md", "export.json"}
    assert not (tmp_path / ".out.unfinished").exists()


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_no_fault_of_the_disk(run_dir, tmp_path):
    def go_on(what):
        if what == "computing the trained weights' logprobs":
            shutil.rmtree(run_dir / "checkpoints" / "step-000002")

    with pytest.raises(StoreError, match="was deleted while it was exported: the run is training"):
        export(run_dir, tmp_path / "out", progress=go_on)
    assert {it.name for it in tmp_path.iterdir()} == {"run"}


def test_the_folder_that_one_stands_in_is_not_taken(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is the current directory; pass another --out"):
        export(trained(8), ".")


def test_an_export_that_computes_something_else_is_not_kept(trained, tmp_path, monkeypatch):
    """As if merging, writing or loading went wrong: what is loaded back is another model."""
    replay = export_check.replay
    monkeypatch.setattr(export_check, "replay", lambda model, tree: replay(model, tree) - isinstance(model, PeftModel))
    with pytest.raises(ArtError, match=r"differs by 1 nats .* nothing was written"):
        export(trained(8), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert export(trained(8), tmp_path / "out", check=False).check is None


def test_an_export_without_torch_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "art_vllm.export", None)  # as where torch is missing
    refused = command(tmp_path).exception
    assert isinstance(refused, ConfigError) and "install art-core[train]" in str(refused)


def test_what_cannot_be_exported_is_refused_with_the_reason(trained, run_dir, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not a run folder"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no adapter to export"):
        export(trained(0), tmp_path / "out", merged=False)
    with pytest.raises(ConfigError, match="must be one of float32, bfloat16, float16"):
        export(run_dir, tmp_path / "out", dtype="int8")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(StoreError, match="GB free; free up disk space"):
            export(run_dir, tmp_path / "out")
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        export(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_checkpoint_of_another_kind_of_learner_is_refused(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        await run.checkpoint()
    with pytest.raises(StoreError, match="not a checkpoint"):
        export(tmp_path / "run", tmp_path / "out")


def test_an_adapter_needs_the_start_weights_that_it_was_trained_on(trained, run_dir, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    whole = shutil.copytree(trained(0), tmp_path / "whole")
    for folder in (run_dir, whole):
        with Store(folder / "run.sqlite") as store:
            store.set_meta("model", str(model))
    spoil(model / "model.safetensors")
    with pytest.raises(ConfigError, match="have changed since the run began"):
        export(run_dir, tmp_path / "out")
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match="can't be exported without its start weights: there is no model folder"):
        export(run_dir, tmp_path / "out")
    assert export(whole, tmp_path / "out").check.largest < 1e-4  # it holds all that it needs


def test_what_was_trained_in_4_bits_is_merged_into_16_and_said(run_dir, tmp_path):
    manifest = run_dir / "checkpoints" / "step-000002" / "learner.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "in_4bit": True}))
    exported = export(run_dir, tmp_path / "out")
    assert "trained on 4-bit weights" in exported.notes[0]
    assert json.loads((exported.folder / "export.json").read_text())["trained_in_4bit"]


def test_an_adapter_of_a_run_with_signs_in_its_name_is_written_as_vllm_reads_it(run_dir, tmp_path):
    """vLLM cuts NAME=PATH at the first "=", and takes what has a comma for JSON."""
    name = "lr=2e-3,seed=1"
    exported = export(run_dir.rename(tmp_path / name), tmp_path / "out", merged=False, check=False)
    line = shlex.split(exported.commands["adapter"])
    module = json.loads(line[line.index("--lora-modules") + 1])
    assert module == {"name": name, "path": str(exported.adapter)}


def command(*arguments):
    return CliRunner().invoke(main.command(), ["export", *map(str, arguments)])


def test_the_command_prints_where_it_is_and_how_to_serve_it(trained, tmp_path):
    found = command(trained(8), "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    for said in (
        f"adapter: {tmp_path}/out/adapter",
        f"merged: {tmp_path}/out/merged (float32)",
        "checked: its logprobs match the trained weights'",
    ):
        assert said in found.stdout
    assert f"--model {tmp_path}/out/merged --served-model-name rank8" in found.stdout
    assert "--enable-lora" in found.stdout
    assert "loading the trained weights" in found.stderr
    again = command(trained(8), "--out", tmp_path / "out")
    assert isinstance(again.exception, ConfigError)


def test_the_command_tells_a_machine_the_same(trained, tmp_path):
    found = command(trained(8), "--out", tmp_path / "out", "--no-merged", "--no-check", "--step", 1, "--json")
    told = json.loads(found.stdout)
    assert (told["merged"], told["check"], told["adapter"]) == (None, None, f"{tmp_path}/out/adapter")
    assert list(told["commands"]) == ["adapter"]


def test_without_a_place_it_is_written_into_the_run(run_dir):
    assert command(run_dir, "--no-check", "--step", 1).exit_code == 0
    assert (run_dir / "exports" / "step-000001" / "merged" / "config.json").is_file()
