"""From a run's config to vLLM's options and environment."""

import json
import os
import shutil
import subprocess

import pytest

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_embedded import TINY
from art_vllm import command_line, environment


def options(*, cuda: bool = False, model: str = str(TINY), **settings) -> dict:
    return command_line.options(model, TrainConfig(**settings), cuda=cuda)


def test_a_small_model_is_served_without_adapters_because_all_its_weights_are_trained():
    assert "enable-lora" not in options()
    assert options(lora_rank=4)["max-lora-rank"] == 8
    assert options(model="some/model-on-the-hub")["max-lora-rank"] == 16


def test_there_is_room_for_every_version_that_is_served_at_a_time():
    assert options(lora_rank=8)["max-loras"] == 2
    assert options(lora_rank=8, max_staleness=3)["max-loras"] == 5


def test_an_adapter_of_too_high_a_rank_is_refused():
    with pytest.raises(ConfigError, match="up to rank 512"):
        options(lora_rank=600)


def test_concurrency_follows_from_the_groups_up_to_the_runs_limit():
    assert options(tasks_per_step=2, group_size=4)["max-num-seqs"] == 8
    assert options(tasks_per_step=2, group_size=4, max_staleness=1)["max-num-seqs"] == 16
    assert options(tasks_per_step=100, group_size=8)["max-num-seqs"] == 64


def test_logprobs_are_of_the_distribution_that_training_samples_from():
    assert options()["logprobs-mode"] == "raw_logprobs"
    assert options(temperature=0.7)["logprobs-mode"] == "processed_logprobs"


def test_without_a_gpu_it_computes_in_float32_and_compiles_nothing():
    assert (options()["dtype"], options()["enforce-eager"]) == ("float32", True)
    with_gpu = options(cuda=True)
    assert (with_gpu["dtype"], with_gpu["enable-sleep-mode"], with_gpu["gpu-memory-utilization"]) == ("auto", True, 0.5)


def test_without_max_context_the_context_is_what_fits_into_the_memory():
    assert options(cuda=True)["max-model-len"] == "auto"
    assert options(cuda=True, max_context=4096)["max-model-len"] == 4096


def test_engine_args_override_and_add():
    given = {
        "--enforce_eager": False,
        "seed": None,
        "speculative-config": {"n": 1},
        "lora-modules": ["a", "b"],
    }
    line = command_line.arguments(options(engine_args=given))
    assert "--no-enforce-eager" in line and "--seed" not in line
    assert json.loads(line[line.index("--speculative-config") + 1]) == {"n": 1}
    assert line[line.index("--lora-modules") + 1 : line.index("--lora-modules") + 3] == ["a", "b"]


@pytest.mark.parametrize("name", ["model", "--served_model_name", "port"])
def test_engine_args_cannot_change_where_and_for_what_the_server_is_asked(name):
    with pytest.raises(ConfigError, match=f"engine_args can't change {name.strip('-').replace('_', '-')}"):
        options(engine_args={name: "x"})


def test_it_sleeps_only_where_rollouts_and_learning_take_turns():
    assert options(cuda=True)["enable-sleep-mode"] and not options(cuda=True, max_staleness=1)["enable-sleep-mode"]


def test_parsers_suit_the_model():
    assert options()["tool-call-parser"] == "hermes"
    llama = options(model="meta-llama/Llama-3.1-8B-Instruct")
    assert (llama["tool-call-parser"], llama["reasoning-parser"]) == ("llama3_json", None)
    assert options(model="Qwen/Qwen3-8B")["reasoning-parser"] == "qwen3"
    assert "--enable-auto-tool-choice" not in command_line.arguments(options(model="some/model-on-the-hub"))


def test_parsers_can_be_named_and_left_out():
    named = options(tool_parser="llama3_json", reasoning_parser="qwen3")
    assert (named["tool-call-parser"], named["reasoning-parser"]) == ("llama3_json", "qwen3")
    assert "--enable-auto-tool-choice" not in command_line.arguments(options(tool_parser="none"))
    assert options(reasoning_parser="none")["reasoning-parser"] is None


def test_a_model_whose_template_has_no_tools_is_served_with_one_that_has(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    extended = options(model=str(folder))
    assert extended["tool-call-parser"] == "hermes" and "<tool_call>" in extended["chat-template"]
    assert options(model=str(folder), tool_format="none")["chat-template"] is options()["chat-template"] is None


def test_a_foreign_python_is_not_given_our_modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "/ours" not in command_line.environment(str(TINY), cuda=True, own=False).get("PYTHONPATH", "")
    assert "/ours" in command_line.environment(str(TINY), cuda=True, own=True)["PYTHONPATH"]
    on_cpu = command_line.environment(str(TINY), cuda=False, own=False)
    assert on_cpu["PYTHONPATH"] == str(command_line.INSIDE) and on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_on_a_cpu_the_worker_shares_the_engines_process_with_threads_of_its_own(monkeypatch):
    on_cpu = command_line.environment(str(TINY), cuda=False, own=False)
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and int(on_cpu["OMP_NUM_THREADS"]) >= 1
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command_line.environment(str(TINY), cuda=True, own=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert command_line.environment(str(TINY), cuda=False, own=False)["OMP_NUM_THREADS"] == "7"


def test_a_key_for_another_vllm_is_not_asked_for_by_our_own(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "VLLM_API_KEY" not in command_line.environment(str(TINY), cuda=True, own=True)


@pytest.mark.system
def test_vllm_is_found_where_it_is_named(fake):
    found = environment.find()
    assert (found.python, found.version, found.cuda) == (os.environ["ART_VLLM_PYTHON"], "0.32.0", False)
    assert environment.describe()[0].startswith("0.32.0, CPU")


@pytest.mark.system
def test_an_environment_of_its_own_is_found_in_its_folder(fake, tmp_path, monkeypatch):
    program = tmp_path / "env" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(os.environ["ART_VLLM_PYTHON"])
    monkeypatch.delenv("ART_VLLM_PYTHON")
    monkeypatch.setenv("ART_VLLM_ENV", str(tmp_path / "env"))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert environment.find().python == str(program)


@pytest.mark.system
def test_where_there_is_no_vllm_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ART_VLLM_ENV", str(tmp_path / "none"))
    monkeypatch.delenv("ART_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"art doctor --install vllm.*ART_VLLM_PYTHON"):
        environment.find()
    state, advice = environment.describe()
    assert state == "missing" and "art doctor --install vllm" in advice
    monkeypatch.setenv("ART_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="isn't a Python with vLLM"):
        environment.find()


def test_a_folder_that_is_no_environment_is_not_replaced_by_one(tmp_path, monkeypatch):
    from art_cli import doctor

    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setenv("ART_VLLM_ENV", str(tmp_path))
    monkeypatch.setattr(environment, "install_packages", lambda *arguments, **options: False)
    said = []
    with pytest.raises(
        ConfigError, match="is not a Python environment; remove it, or set ART_VLLM_ENV to another folder"
    ):
        doctor.install("vllm", said.append)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert not said


def test_a_python_without_ensurepip_needs_uv(tmp_path, monkeypatch):
    created = []

    def create(root, *, clear, with_pip=False):
        if with_pip:
            raise subprocess.CalledProcessError(1, ["python", "-m", "ensurepip"])
        created.append(root)

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment, "install_packages", lambda *arguments, **options: False)
    monkeypatch.setenv("ART_VLLM_ENV", str(tmp_path / "vllm"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt install python3-venv"):
        environment.install(lambda line: None)
    (tmp_path / "uv").touch(mode=0o755)
    with pytest.raises(ConfigError, match="failed for the reason above"):
        environment.install(lambda line: None)
    assert created == [tmp_path / "vllm"]


def test_doctor_installs_for_an_engine_that_can_be_installed(monkeypatch):
    from art_cli import doctor

    said = []
    monkeypatch.setattr(environment.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="can't install vLLM on macOS"):
        doctor.install("vllm", said.append)
    with pytest.raises(ConfigError, match="can't install 'embedded'; it can install: bfcl, smollm2, vllm"):
        doctor.install("embedded", said.append)
    assert not said
