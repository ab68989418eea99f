"""``art plan``: what it prints, what it refuses."""

import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from art_core.config import make_config
from art_core.errors import ConfigError
from art_vllm.plan_command import add_to

app = typer.Typer()
add_to(app)
app.command("other")(lambda: None)  # a single command would have no name

SEVEN_B = ("--model", "Qwen/Qwen2.5-7B-Instruct")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output or result.exception
    return result.output


def json_of(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


def refused(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_plan_says_what_is_taken_whether_it_fits_and_what_to_paste():
    said = run(*SEVEN_B, "--gpu", "H100", "--context", "4096")
    assert "7.62B parameters; LoRA of rank 16 by unsloth; served by vllm on H100" in said
    assert "keys and values" in said and "fits, engine and learner side by side" in said
    assert 'art.train(..., model="Qwen/Qwen2.5-7B-Instruct", engine="vllm", learner="unsloth"' in said
    assert "gpu-memory-utilization" in said and "max_context=4096" in said


def test_the_settings_to_paste_are_settings_of_a_run():
    said = run(
        *SEVEN_B, "--gpu", "24GB", "--serve-in-8bit", "--staleness", "1", "--context", "2048", "--group-size", "4"
    )
    line = next(line for line in said.splitlines() if line.startswith("settings: "))
    given = eval(line.removeprefix("settings: art.train(...,").join(("dict(", "")))
    config = make_config({key: value for key, value in given.items() if key not in ("engine", "learner")})
    assert config.load_in_4bit and config.max_staleness == 1 and config.group_size == 4
    assert config.engine_args["quantization"] == "fp8" and "enable-sleep-mode" not in config.engine_args


def test_what_does_not_fit_says_what_is_missing_and_what_to_change():
    said = run("--model", "Qwen/Qwen2.5-14B-Instruct", "--gpu", "24GB", code=1)
    assert "does not fit: " in said and "GiB are missing" in said
    assert "another GPU: " in said and "a smaller model: Qwen/Qwen2.5-3B-Instruct" in said
    assert "art.train(" not in said


def test_json_is_one_object_with_bytes():
    found = json_of(*SEVEN_B, "--gpu", "H100")
    assert found["parameters"] == 7_615_616_512 and found["fits"] is True
    assert found["peak"]["rollouts"] <= found["usable"]
    assert sum(it["size"] for it in found["memory"]) >= found["peak"]["rollouts"]
    assert found["bytes_per_token"] == 57_344
    assert found["step"]["seconds"] > 0 and found["step"]["dollars"] is None


def test_the_embedded_engine_has_no_options_of_vllm():
    found = json_of("--model", "tiny", "--gpu", "T4", "--engine", "embedded", "--context", "1024")
    assert found["engine_args"] == {} and found["turns"] is False
    assert found["bytes_per_token"] == 2 * 4 * 2 * 2 * 32  # keys and values, layers, heads, heads' size, bfloat16


def test_a_mixture_of_experts_says_how_much_of_it_is_active():
    said = run("--model", "Qwen/Qwen3-30B-A3B", "--gpu", "B200", "--learner", "unsloth")
    assert "30.53B parameters (3.35B active per token)" in said
    assert "PEFT's all-linear adapts every expert" in said


def test_assumptions_are_said_to_be_assumptions():
    said = run(*SEVEN_B, "--gpu", "A100-80GB", "--calls", "5", "--dollars-per-hour", "2")
    assert "assumed: 5 calls a run, a first prompt of 1000 tokens, 150 sampled tokens a call" in said
    assert "prompts at 50% and learning at 30% of the peak arithmetic" in said
    assert "dollars" in said
    assert "no seconds: a size has no speed" in run(*SEVEN_B, "--gpu", "80GB")


def test_a_type_that_is_not_known_is_counted_and_said_to_be_an_estimate(tmp_path):
    config = {
        "model_type": "novel", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 32000,
        "layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = run("--model", str(tmp_path), "--gpu", "24GB", "--context", "2048")
    assert "type 'novel' is counted like a Llama" in said and "6 layers keep a state" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "Qwen/Qwen2.5-7B-Instruckt", "--gpu", "H100"), "nearest known names"),
        ((*SEVEN_B, "--gpu", "24"), "neither a size"),
        ((*SEVEN_B, "--gpu", "H100", "--full", "--lora-rank", "8"), "--full trains all weights"),
        ((*SEVEN_B, "--gpu", "80GB", "--dollars-per-hour", "2"), "name the GPU"),
        ((*SEVEN_B, "--gpu", "H100", "--run", "nowhere"), "not a run folder"),
        ((*SEVEN_B, "--gpu", "H100", "--context", "99999"), "32768 positions"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, says):
    assert says in refused(*arguments)


def test_help_has_an_example():
    assert "art plan --model Qwen/Qwen2.5-7B-Instruct --gpu 24GB" in " ".join(run("--help").split())


def test_a_terminal_gets_a_table(monkeypatch):
    from art_vllm import plan_report
    from art_vllm.cost import cost
    from art_vllm.gpus import find_gpu
    from art_vllm.known_shapes import find_shape
    from art_vllm.plan import Setup, plan
    from art_vllm.workload import assumed

    found = plan(Setup(shape=find_shape("qwen3-8b"), gpu=find_gpu("H100")))
    console = Console(force_terminal=True, width=120, record=True)
    plan_report.show(found, cost(found, assumed(64, 8, calls=3, prompt=1000, sampled=150)), console)
    said = console.export_text()
    assert "┃" in said and "free at the peak" in said
