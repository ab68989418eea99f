"""``art plan``: what it prints, what it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import art_core as art
from art_cli.arguments import parse_settings
from art_core.config import make_config
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call
from art_embedded import TINY
from art_vllm.candidates import CANDIDATES
from art_vllm.command_line import options
from art_vllm.gpus import GPUS
from art_vllm.known_shapes import known_shapes
from art_vllm.plan_command import EXAMPLE, add_to

ROOT = Path(__file__).parents[3]
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


def pasted(*arguments):
    """The config of a run with the settings that are printed."""
    line = next(line for line in run(*arguments).splitlines() if line.startswith("settings: "))
    given = eval(line.removeprefix("settings: art.train(...,").join(("dict(", "")))
    return make_config({key: value for key, value in given.items() if key not in ("engine", "learner")})


def test_the_settings_to_paste_are_settings_of_a_run():
    given = ("--serve-in-8bit", "--staleness", "1", "--context", "2048", "--group-size", "4")
    config = pasted(*SEVEN_B, "--gpu", "24GB", *given)
    assert config.load_in_4bit and config.max_staleness == 1 and config.group_size == 4
    assert config.engine_args["quantization"] == "fp8" and config.importance_cap == 2 and config.lora_rank == 16


def test_the_command_that_is_printed_has_the_same_settings():
    arguments = (*SEVEN_B, "--gpu", "24GB", "--serve-in-8bit", "--context", "2048", "--group-size", "4")
    line = next(line for line in run(*arguments).splitlines() if line.startswith("in a command: art serve "))
    words = shlex.split(line.removeprefix("in a command: art serve "))
    options_, pairs = words[:6], words[6:]
    assert options_ == ["--model", "Qwen/Qwen2.5-7B-Instruct", "--engine", "vllm", "--learner", "unsloth"]
    assert set(pairs[::2]) == {"--set"}
    settings = parse_settings(pairs[1::2], {"model", "run_dir", "engine", "learner", "loss"})  # as art serve reads them
    assert make_config({"model": SEVEN_B[1], **settings}) == pasted(*arguments)


def test_no_more_sequences_are_said_to_fit_than_have_room_in_the_settings():
    found = json_of("--model", "openbmb/MiniCPM5-1B", "--gpu", "H100")
    cache = next(part for part in found["memory"] if part["name"] == "keys and values")
    assert found["sequences"] == found["at_once"] == 64
    assert cache["size"] == 64 * found["bytes_per_token"] * found["context"]
    [row] = [line for line in run("--gpu", "H100").splitlines() if line.startswith("openbmb/MiniCPM5-1B ")]
    assert re.search(r" GiB +64 ", row)


def test_a_model_that_torch_trains_has_weights_of_32_bits():
    rows = {line.split()[0]: line for line in run("--gpu", "H100").splitlines() if " GiB  " in line}
    assert "32 bits" in rows["ibm-granite/granite-4.2-8b"] and "16 bits" in rows["Qwen/Qwen3-8B"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu", "H100"),  # side by side
        ("--gpu", "24GB", "--serve-in-8bit", "--context", "2048"),  # in turns
        ("--gpu", "H100", "--staleness", "2", "--tasks-per-step", "2", "--group-size", "4"),
        ("--gpu", "B200", "--gpus", "2", "--full", "--context", "2048"),
        ("--gpu", "H100", "--lora-rank", "24"),
    ],
)
def test_vllm_is_started_as_it_was_planned(arguments):
    found = json_of(*SEVEN_B, *arguments)
    started = options("Qwen/Qwen2.5-7B-Instruct", pasted(*SEVEN_B, *arguments), cuda=True)
    assert started["max-model-len"] == found["context"]
    assert started["max-num-seqs"] == found["at_once"]
    assert started["gpu-memory-utilization"] == found["engine_args"]["gpu-memory-utilization"]
    assert started["enable-sleep-mode"] == found["turns"]
    assert started.get("enable-lora", False) == bool(found["lora_rank"])
    assert started.get("max-lora-rank", 0) >= found["lora_rank"]


def test_a_small_model_that_unsloth_trains_is_served_with_room_for_its_adapter():
    config = pasted("--model", "tiny", "--gpu", "T4", "--learner", "unsloth", "--context", "1024")
    assert options(str(TINY), config, cuda=True)["max-lora-rank"] == 16


def test_what_does_not_fit_says_what_is_missing_and_what_to_change():
    said = run("--model", "Qwen/Qwen2.5-14B-Instruct", "--gpu", "24GB", code=1)
    assert "doesn't fit: " in said and "GiB short" in said
    assert "another GPU: " in said and "a smaller model: Qwen/Qwen2.5-3B-Instruct" in said
    assert "art.train(" not in said


def test_the_table_adds_up():
    rows = [line[:42] for line in run(*SEVEN_B, "--gpu", "H100").splitlines() if line.startswith(("learner:", "vllm:"))]
    rows += [line[:42] for line in run(*SEVEN_B, "--gpu", "H100").splitlines() if line.startswith(("keys", "total"))]
    *parts, taken = [float(row[24:33]) if "-" not in row[24:33] else 0.0 for row in rows]
    assert sum(parts) == pytest.approx(taken, abs=0.06) and taken > 0


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
    assert found["bytes_per_token"] == 2 * 4 * 2 * 4 * 32  # keys and values, layers, heads, float32, heads' size


def test_a_mixture_of_experts_says_how_much_of_it_is_active():
    said = run("--model", "Qwen/Qwen3-30B-A3B", "--gpu", "B200", "--learner", "unsloth")
    assert "30.53B parameters (3.35B active per token)" in said
    assert "PEFT's all-linear adapts every expert" in said


def test_assumptions_are_said_to_be_assumptions():
    said = run(*SEVEN_B, "--gpu", "A100-80GB", "--calls", "5", "--dollars-per-hour", "2")
    assert "assumed: 5 calls per rollout, a first prompt of 1000 tokens, 150 sampled tokens per call" in said
    assert "prompts at 50% and learning at 30% of peak compute" in said
    assert " per step, $" in said
    assert "no time estimate: --gpu is only a size" in run(*SEVEN_B, "--gpu", "80GB")


async def test_a_run_says_how_large_its_steps_are(tmp_path):
    sizes = {"group_size": 4, "tasks_per_step": 2}
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **sizes) as going:
        await going.learn(await going.score(await going.collect(ScriptedAgent(), ["a", "b"]), lambda run: 1.0))
    measured = ("--model", "tiny", "--gpu", "T4", "--run", str(tmp_path / "run"))
    said = run(*measured)
    assert "8 rollouts, " in said and "(rollouts: up to 8)" in said and "group_size=4, tasks_per_step=2" in said
    assert "(rollouts: up to 4)" in run(*measured, "--tasks-per-step", "1")


def test_models_are_compared_by_size_time_and_price():
    said = run("--gpu", "H100", "--dollars-per-hour", "2.5", "--steps", "100")
    rows = [
        line for line in said.splitlines() if line.endswith(tuple("0123456789")) and "/" in line and " GiB " in line
    ]
    sizes = [float(re.search(r" ([0-9.]+)B", row)[1]) for row in rows]
    assert sizes == sorted(sizes, reverse=True) and len(rows) >= 8
    assert "too large: " in said and "meta-llama/Llama-3.3-70B-Instruct" in said
    assert all(0 < float(re.search(r" ([0-9.]+) GiB", row)[1]) < 80 for row in rows)
    best = next(row.split()[0] for row in rows)
    assert "\nfits, " in run("--gpu", "H100", "--model", best)


def test_a_model_that_a_setting_excludes_is_named_with_the_reason():
    said = run("--gpu", "H200", "--context", "50000")
    assert "not Qwen/Qwen3-0.6B: context=50000 exceeds the 40960 positions" in said
    assert "Qwen/Qwen3-4B-Instruct-2507" in said.split("not ")[0]
    nothing = run("--gpu", "H200", "--context", "500000", code=1)
    assert "next:" not in nothing and "not meta-llama/Llama-3.3-70B-Instruct" in nothing


def test_several_gpus_serve_larger_models():
    assert "meta-llama/Llama-3.3-70B-Instruct  " in run("--gpu", "H100", "--gpus", "4")


def test_candidates_are_chosen_by_budget_and_licence():
    chosen = ("--gpu", "H100", "--dollars-per-hour", "2.5", "--licence", "Apache")
    found = json_of(*chosen, "--budget", "0.2")
    assert {it["licence"] for it in found} == {"Apache-2.0"}
    within = [it for it in found if it["within_budget"]]
    assert within and all(it["fits"] and it["dollars"] <= 0.2 for it in within)
    dear = [it["model"] for it in found if it["fits"] and not it["within_budget"]]
    assert dear and f"over the budget of $0.2: {', '.join(dear)}" in run(*chosen, "--budget", "0.2")
    assert "over the budget" in run(*chosen, "--budget", "0", code=1)


def test_a_candidate_has_the_memory_of_its_own_plan():
    found = json_of("--gpu", "H100")
    fitting = next(it for it in found if it["fits"])
    peak = json_of("--model", fitting["model"], "--gpu", "H100")["peak"]
    assert fitting["memory"] == max(peak.values())
    assert all(it["memory"] > 0.96 * 79.1 * 2**30 for it in found if not it["fits"])


def test_a_budget_proposes_models_for_each_gpu_that_has_a_price():
    priced = ("--dollars-per-hour", "H100=2.5", "--dollars-per-hour", "4090=0.4", "--steps", "200")
    said = run("--budget", "3", *priced)
    small, large = said.split("H100 at $2.5 per GPU and hour:")
    assert "RTX 4090 at $0.4 per GPU and hour:" in small and "Qwen/Qwen3-14B  " in large
    assert "over the budget of $3: " in large and "next: the same command with --gpu GPU" in large
    found = json_of("--budget", "3", *priced)
    assert {(it["gpu"], it["dollars_per_hour"]) for it in found} == {("H100", 2.5), ("RTX 4090", 0.4)}
    alone = {
        it["model"]: it["dollars"] for it in json_of("--gpu", "H100", "--dollars-per-hour", "2.5", "--steps", "200")
    }
    assert alone == {it["model"]: it["dollars"] for it in found if it["gpu"] == "H100"}


def test_one_price_stands_for_every_known_gpu():
    found = json_of("--budget", "20", "--dollars-per-hour", "2", "--dollars-per-hour", "B200=5")
    assert list(dict.fromkeys(it["gpu"] for it in found)) == [gpu.name for gpu in GPUS]
    assert {it["dollars_per_hour"] for it in found if it["gpu"] != "B200"} == {2.0}
    assert "at $" not in run("--gpu", "H100") and "over the budget" in run(
        "--budget", "0", "--dollars-per-hour", "2", code=1
    )


def test_a_gpus_own_price_is_taken_for_it():
    both = ("--dollars-per-hour", "9", "--dollars-per-hour", "H100=2.5")
    own, only = (
        json_of(*SEVEN_B, "--gpu", "H100", *both),
        json_of(*SEVEN_B, "--gpu", "H100", "--dollars-per-hour", "2.5"),
    )
    assert own["step"]["dollars"] == only["step"]["dollars"] > 0


def test_a_gpu_of_unknown_speed_compares_sizes_only():
    assert all(it["seconds"] is None and it["dollars"] is None for it in json_of("--gpu", "24GB"))


def test_every_candidate_is_a_well_known_model():
    names = {shape.name for shape in known_shapes()}
    assert set(CANDIDATES) <= names


def test_a_service_that_bills_tokens_is_priced_by_kind():
    found = json_of(
        *SEVEN_B, "--dollars-per-million", "1,2,4", "--calls", "2", "--prompt", "100", "--sampled", "10", "--steps", "3"
    )
    rows = 64 * 120
    assert found["tokens"] == {"prompt": 64 * 210 + rows, "sampled": 64 * 20, "trained": rows}
    assert found["dollars_per_step"] == pytest.approx((64 * 210 + rows + 2 * 64 * 20 + 4 * rows) / 1e6)
    assert found["dollars_total"] == pytest.approx(3 * found["dollars_per_step"])


async def test_a_run_says_how_many_tokens_its_rows_have(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), group_size=2) as going:
        await going.learn(await going.score(await going.collect(ScriptedAgent(), ["a"]), lambda run: 1.0))
        calls = [call for run_ in art.load_trajectories(tmp_path / "run") for call in run_.calls]
    found = json_of(*SEVEN_B, "--dollars-per-million", "1,1,1", "--run", str(tmp_path / "run"))
    assert found["tokens"]["sampled"] == sum(len(call.sampled_ids) for call in calls)
    longest = {call.prompt_ids + call.sampled_ids for call in calls}
    paths = [ids for ids in longest if not any(other != ids and other[: len(ids)] == ids for other in longest)]
    assert found["tokens"]["trained"] == sum(map(len, paths))


def evaluation(folder, calls, rollouts=3):
    """The folder of an evaluation whose calls a provider answered: only token counts are known."""
    with Store(folder / "run.sqlite") as store:
        store.set_meta("model", "live")
        for number in range(rollouts):
            name = f"rollout-{number}"
            store.add_rollout(name, task=number, step=0, split="eval", group=name)
            for prompt, sampled in calls:
                usage = {"prompt_tokens": float(prompt), "completion_tokens": float(sampled)} if prompt else {}
                store.record(name, Call(prompt_ids=(), sampled_ids=(), logprobs=(), policy_version=-1, usage=usage))
            store.finish_rollout(name, output=None, seconds=1.0)
    return ("--run", str(folder))


def test_an_evaluation_of_a_live_provider_says_how_large_steps_will_be(tmp_path):
    live = evaluation(tmp_path, [(1000, 150), (1150, 150), (1300, 150)])
    measured, assumed = (json_of(*SEVEN_B, "--gpu", "H100", *more)["step"] for more in (live, ()))
    for number in ("runs", "calls", "targets", "rows", "largest", "longest"):
        assert measured["workload"][number] == pytest.approx(assumed["workload"][number])
    assert measured["seconds"] == pytest.approx(assumed["seconds"], rel=1e-6)
    assert "measured: 3 evaluated rollouts of" in run("--gpu", "H100", *live) and "(model live)" in run(
        "--gpu", "H100", *live
    )


def test_results_of_tools_are_prompt_tokens_of_their_own(tmp_path):
    live = evaluation(tmp_path, [(1000, 150), (1650, 150)])
    found = json_of("--model", "Qwen/Qwen3-8B", "--gpu", "H100", *live, "--tasks-per-step", "1", "--group-size", "4")
    workload = found["step"]["workload"]
    assert workload["prefill"]["count"] == 1000 + 4 * 500 and workload["decode"]["count"] == 4 * 300
    assert workload["learner"]["count"] == 1000 + 4 * 800 and workload["longest"] == 1800


def test_hidden_thoughts_count_as_sampled_and_start_no_new_conversation(tmp_path):
    live = evaluation(tmp_path, [(1000, 1150), (1200, 1150), (1400, 1150)])
    found = json_of("--model", "Qwen/Qwen3-8B", "--gpu", "H100", *live, "--tasks-per-step", "1", "--group-size", "4")
    workload = found["step"]["workload"]
    assert workload["prefill"]["count"] == 1000 and workload["largest"] == 1000 + 4 * 3450


def test_an_evaluation_without_token_counts_is_refused(tmp_path):
    assert "nor an evaluation with token counts" in refused("--gpu", "H100", *evaluation(tmp_path, [(0, 0)]))


async def test_the_folder_of_an_evaluation_is_accepted(tmp_path):
    await art.evaluate(
        ScriptedAgent(), ["a", "b"], model="tiny", reward=lambda run: 1.0, run_dir=tmp_path / "run", engine=FakeEngine(),
        progress=False,
    )  # fmt: skip
    said = run("--model", "tiny", "--gpu", "T4", "--run", str(tmp_path / "run"))
    assert "measured: 2 evaluated rollouts of" in said and "64 rollouts, " in said


def test_runs_that_are_longer_than_the_context_are_said():
    said = run("--model", "tiny", "--gpu", "T4", "--context", "512")
    assert "rollouts of up to 1,450 tokens don't fit into a context of 512" in said
    assert "don't fit into" not in run("--model", "tiny", "--gpu", "T4", "--context", "512", "--prompt", "50")


def test_a_small_model_is_counted_in_millions():
    assert "tiny: 0.90M parameters" in run("--model", "tiny", "--gpu", "T4", "--context", "1024")


def test_the_context_is_what_the_model_has_where_that_is_less_than_usual(tmp_path):
    config = json.loads(Path(TINY, "config.json").read_text()) | {"max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "max_context=1024" in run("--model", str(tmp_path), "--gpu", "T4")
    assert "max_context=8192" in run(*SEVEN_B, "--gpu", "H100")


def test_a_type_that_is_not_known_is_counted_and_said_to_be_an_estimate(tmp_path):
    config = {
        "model_type": "novel", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 32000,
        "layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = run("--model", str(tmp_path), "--gpu", "24GB", "--context", "2048")
    assert "model type 'novel' is unknown and counted as a Llama" in said and "6 layers keep a fixed-size state" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "Qwen/Qwen2.5-7B-Instruckt", "--gpu", "H100"), "Did you mean Qwen/Qwen2.5-7B-Instruct"),
        (("--model", "", "--gpu", "H100"), "the shape of '' is unknown"),
        ((*SEVEN_B, "--gpu", "24"), "or a size such as 24GB"),
        ((*SEVEN_B, "--gpu", "H100", "--full", "--lora-rank", "8"), "--full trains all weights"),
        ((*SEVEN_B, "--gpu", "80GB", "--dollars-per-hour", "2"), "name the GPU"),
        ((*SEVEN_B, "--gpu", "H100", "--run", "nowhere"), "not a run folder"),
        (SEVEN_B, "pass either --gpu, or --dollars-per-million"),
        ((*SEVEN_B, "--gpu", "H100", "--dollars-per-million", "1,1,1"), "pass either --gpu, or --dollars-per-million"),
        ((*SEVEN_B, "--dollars-per-million", "1,1"), "must be three prices"),
        ((*SEVEN_B, "--dollars-per-million", "nan,1,1"), "must be three prices"),
        ((*SEVEN_B, "--dollars-per-million", "1,-5,1"), "must be three prices"),
        ((*SEVEN_B, "--dollars-per-million", "1,1,inf"), "must be three prices"),
        ((*SEVEN_B, "--gpu", "H100", "--context", "99999"), "32768 positions"),
        ((*SEVEN_B, "--gpu", "H100", "--budget", "3"), "choose between models"),
        (("--gpu", "H100", "--budget", "3"), "--budget needs your price of a GPU"),
        (("--budget", "3"), "--budget needs your price of a GPU"),
        ((*SEVEN_B, "--dollars-per-hour", "2"), "pass either --gpu, or --dollars-per-million"),
        (("--gpu", "H100", "--dollars-per-hour", "L4=1"), "no price of --gpu H100"),
        (("--dollars-per-hour", "24GB=1"), "24GB is only a size"),
        (("--dollars-per-hour", "H100=x"), "must be a price such as 2.5 or H100=2.5, got 'H100=x'"),
        (("--dollars-per-hour", "-1"), "must be a price"),
        (("--dollars-per-million", "1,1,1", "--dollars-per-hour", "2", *SEVEN_B), "is the price of a GPU"),
        (("--gpu", "H100", "--licence", "bsd"), "no candidate has the licence 'bsd'"),
        (("--dollars-per-million", "1,1,1"), "pass --gpu to compare models, or --dollars-per-hour"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, says):
    assert says in refused(*arguments)


def test_what_the_help_and_the_pages_advertise_fits():
    assert EXAMPLE.split("`")[1] in " ".join(run("--help").split())
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("integrations/*/README.md")]
    shown = re.findall(
        r"art (plan --(?:model|gpu|budget) [^`\n#]+)", "\n".join([EXAMPLE, *(page.read_text() for page in pages)])
    )
    complete = [it for it in shown if "NAME" not in it and "--run" not in it]
    assert len(complete) >= 6
    for command in complete:
        priced, chosen = "--dollars-per-million" in command, "--model" in command
        answer = " steps cost $" if priced else "\nfits, " if chosen else "next: the same command with "
        assert answer in run(*shlex.split(command)[1:]), command
