"""The measurements at a toy size, so that they cannot rot. No timing is looked at."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tree_cases import FORKED, make_model

from art_core.config import TrainConfig
from art_core.learner import TorchLearner, tree_logprobs
from art_core.losses import grpo
from art_core.token_tree import build_tree
from art_embedded import TINY
from bench import exported, families, gpu_check, recipes, sample_efficiency, tables
from bench import tree as ours
from bench.peers import art_side, environment, memory, packing, step, tree_row
from bench.peers.__main__ import parse
from bench.peers.batch import load_tokenizer, make_batch, trie_size
from bench.plain import call_logprobs, call_tokens, dense_tree_logprobs, path_to, path_tokens
from bench.shapes import random_model
from bench.synthetic import random_trajectories

TOY = ["--size", "toy", "--group-size", "2", "--max-turns", "2", "--repeats", "1"]


@pytest.mark.parametrize("size", [1, 3])
def test_the_reference_computes_every_call_in_a_row_of_its_own(size):
    model, tree = make_model("qwen3"), build_tree(FORKED)
    trained = np.flatnonzero(tree.weights)
    torch.testing.assert_close(call_logprobs(model, tree, size), tree_logprobs(model, tree)[trained].float())


def test_tokens_are_counted_as_the_calls_and_paths_have_them():
    tree = build_tree(FORKED)
    trained = [call for trajectory in FORKED for call in trajectory.calls if call.finish_reason != "aborted"]
    assert call_tokens(tree) == sum(len(call.prompt_ids) + len(call.sampled_ids) for call in trained)
    assert path_tokens(tree) == 9 + 6 + 8


def test_random_runs_make_a_tree_of_the_size_that_was_asked_for():
    tree = build_tree(random_trajectories(1000, 2048))
    assert tree.num_tokens == 1000
    assert len(np.unique(tree.call)) == 8 * 4


@pytest.mark.system
def test_all_sides_of_the_step_have_one_gradient(capsys):
    batch = make_batch(load_tokenizer(), style="text+fork", group_size=2, max_turns=3)
    assert batch.trained == batch.tree.num_targets
    sides = step.make_sides(load_tokenizer(), random_model("toy", 2048), batch, 2, "TRL,ART,AReaL")
    step.measure(sides, 1)
    _, rows = step.rows_of(sides, batch)
    assert [row[0] for row in rows] == [step.CALLS, step.HISTORIES, step.PADDED, step.DENSE, step.PATHS, step.OURS]
    assert all(float(row[-1]) < 1e-5 for row in rows)


@pytest.mark.system
def test_a_hybrid_model_has_the_same_gradient_by_tree_as_by_histories(capsys):
    batch = make_batch(load_tokenizer(), style="text+fork", group_size=2, max_turns=3)
    sides = step.make_sides(
        load_tokenizer(), random_model("qwen3.5-toy", 2048), batch, 2, "TRL,ART,AReaL,naive,each,padded"
    )
    step.measure(sides, 1)
    _, rows = step.rows_of(sides, batch)
    assert [row[0] for row in rows] == [step.HISTORIES, step.PATHS, step.OURS]
    assert rows[-1][5] == batch.tree.num_tokens
    assert all(float(row[-1]) < 1e-5 for row in rows)


def test_the_step_says_what_the_tree_saves(capsys):
    step.run(parse(["--only", "step", *TOY, "--skip", "TRL,ART,AReaL,naive,padded"]))
    said = capsys.readouterr().out
    assert "| ours " in said
    assert "| full histories, unpadded " in said and "| full histories, padded " not in said
    assert "x the tree's tokens, ours" in said


@pytest.mark.smoke
@pytest.mark.system
def test_packing_computes_no_token_of_a_group_twice(capsys):
    groups = packing.make_groups(load_tokenizer(), "tools+fork+subagent", 2, 2, 3)
    trees, _ = packing.measure_ours(groups, 1)
    assert ours.computed_tokens(trees) == sum(trie_size(calls) for calls in groups.calls)
    packing.run(parse(["--only", "pack", *TOY, "--groups", "1", "--styles", "text"]))
    assert "| text " in capsys.readouterr().out


def test_the_replaced_kernel_of_a_tree_row_is_causal_attention_along_each_path():
    tree, generator = build_tree(FORKED), torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tree.num_tokens, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    paths = [path_to(tree, end - 1) for end in tree.node_starts[1:].tolist()]
    gathered = torch.from_numpy(np.concatenate(paths))
    ends = torch.tensor(np.cumsum([0, *map(len, paths)]))
    found = tree_row.varlen_attention(
        query, key[gathered], value[gathered], torch.from_numpy(tree.node_starts), ends, 0, 0, softmax_scale=0.5,
        causal=True, window_size=(-1, -1),
    )  # fmt: skip
    for token in range(tree.num_tokens):
        seen = torch.from_numpy(path_to(tree, token))
        for head in range(4):
            weights = (0.5 * key[seen, head // 2] @ query[token, head]).softmax(0)
            torch.testing.assert_close(found[token, head], weights @ value[seen, head // 2])
    with pytest.raises(NotImplementedError, match="window"):
        tree_row.varlen_attention(
            query, key, value, ends, ends, 0, 0, softmax_scale=0.5, causal=True, window_size=(7, 0)
        )


def test_a_tree_row_is_closed_by_a_sample_that_fills_it():
    sample = {"input_ids": np.array([1, 2, 3])}
    first, last = tree_row.closed([sample], 8)
    assert first is sample
    assert len(last["input_ids"]) == len(last["completion_mask"]) == 8
    assert not last["completion_mask"].any() and min(last["input_ids"]) == max(last["input_ids"]) == -1


def test_art_is_given_the_answers_of_vllm_with_their_tokens():
    batch = make_batch(load_tokenizer(), style="tools", group_size=2, max_turns=2)
    call, tokens = batch.chats[0][-1], batch.runs[0][-1]
    answer = art_side.answer_of(call, tokens)
    [choice] = answer["choices"]
    assert (tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"])) == (tokens.prompt, tokens.sampled)
    assert len(choice["logprobs"]["content"]) == len(tokens.sampled)
    plain, sdk = (art_side.request_of(call, sdk=sdk)["messages"] for sdk in (False, True))
    assert [message for message in sdk if "refusal" in message] and not any("refusal" in it for it in plain)
    assert "refusal" not in call.messages[2], "the rollout itself is not changed"


def test_packing_leaves_out_the_peers_that_are_missing_or_skipped(monkeypatch, capsys):
    for name in ("trl", "areal", "art"):
        monkeypatch.setitem(sys.modules, name, None)  # its import then raises ImportError
    options = ["--only", "pack", *TOY, "--groups", "1", "--styles", "text"]
    packing.run(parse(options))
    said = capsys.readouterr().out
    assert [said.count(f"left out: {name}") for name in ("TRL TreeRow", "ART", "AReaL tree")] == [1, 1, 1]
    [row] = [line for line in said.splitlines() if line.startswith("| text ") and line.count("|") == 11]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[5:9] == ["-"] * 4
    group = packing.make_groups(load_tokenizer(), "text", 1, 2, 2)
    tokens = sum(len(call.prompt) + len(call.sampled) for run in group.runs[0] for call in run)
    assert float(cells[3]) == pytest.approx(tokens / trie_size(group.calls[0]), rel=0.01)
    packing.run(parse([*options, "--skip", "TRL,ART,AReaL"]))
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pythons", "command"),
    [
        ({sys.executable: "3.12"}, [sys.executable, "-m", "venv"]),
        ({"/bin/python3.12": "3.12"}, ["/bin/python3.12", "-m", "venv"]),
        ({"/bin/uv": ""}, ["/bin/uv", "venv", "--clear", "--seed", "--python", "3.12"]),
    ],
)
def test_the_environment_of_the_peers_gets_python_312(monkeypatch, pythons, command):
    def which(name, path=None):
        return f"/bin/{name}" if f"/bin/{name}" in pythons else None

    monkeypatch.setattr(environment.shutil, "which", which)
    monkeypatch.setattr(environment, "version_of", lambda python: pythons.get(python, "3.11"))
    assert list(environment.creation())[: len(command)] == command


def test_without_python_312_and_uv_setup_says_what_to_install(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(environment, "version_of", lambda python: "3.11")
    with pytest.raises(SystemExit, match=r"need Python 3\.12"):
        environment.creation()


@pytest.mark.system
def test_the_version_of_an_interpreter_that_cannot_start_is_empty(tmp_path):
    assert environment.version_of(str(tmp_path / "python")) == ""
    assert environment.version_of(sys.executable) == "{}.{}".format(*sys.version_info)


@pytest.mark.system
def test_memory_is_measured_in_a_process_of_its_own():
    options = parse(["--only", "memory", *TOY])
    peak = memory.peak_of_child("ours", 512, 2048, options)
    assert peak is not None
    assert 0 < peak < 1000


@pytest.mark.engines
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_a_side_that_needs_too_much_memory_has_no_figure():
    options = parse(["--only", "memory", *TOY, "--most-gb", "2"])
    assert memory.peak_of_child("naive tree, dense mask", 20_000, 2048, options) is None


@pytest.mark.system
@pytest.mark.parametrize("section", ["exactness", "speed", "hybrid", "lora", "learner"])
def test_the_gpu_check_runs_without_a_gpu(section):
    options = gpu_check.parse(["--device", "cpu", "--tiny", "--repeats", "1", "--backends", "no such way"])
    head, *rows = gpu_check.SECTIONS[section](gpu_check.Machine(options))
    assert all(len(row) == len(head) for row in rows)
    failed = [row for row in rows if row[-1]]
    assert {row[head.index("way")] for row in failed} == (set() if section == "learner" else {"no such way"})
    if section == "exactness":
        assert all(float(row[-2]) < 1e-5 for row in rows if row[0] == "float32" and row not in failed)


@pytest.mark.system
def test_a_section_that_does_not_finish_stands_in_the_report(tmp_path, capsys):
    out = tmp_path / "gpu.md"
    gpu_check.main(["--device", "cpu", "--tiny", "--only", "speed,lora", "--timeout", "0.01", "--out", str(out)])
    assert out.read_text().count("not finished within") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "speed,nosuch"], "no section nosuch; choose from exactness, speed"),
        pytest.param(
            [], "torch finds no NVIDIA GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
        ),
    ],
)
def test_what_the_gpu_check_cannot_measure_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu_check.main(arguments)
    assert says in f"{refused.value}" + capsys.readouterr().err


@pytest.mark.system
def test_families_are_compared_with_their_calls(capsys):
    families.main(["qwen3", "mamba", "rembert", "no such family"])
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    found = {row[1]: row[2] for row in rows if len(row) > 2}
    assert (found["qwen3"], found["mamba"]) == ("segments", "paths")
    assert not any("WRONG" in row for row in rows)
    assert ["2 measured; 1 refused:"] in rows and ["1 not made:"] in rows
    assert any(row[0].startswith("- rembert: RemBertForCausalLM is not causal") for row in rows)


def test_dense_masks_agree_with_the_reference():
    model, tree = random_model("toy", 64).double(), build_tree(random_trajectories(200, 64))
    torch.testing.assert_close(
        dense_tree_logprobs(model, tree).float(), call_logprobs(model, tree), atol=1e-5, rtol=1e-5
    )


def test_call_by_call_takes_the_same_step_as_the_tree():
    calls = [random_trajectories(120, 800, runs=3, seed=seed) for seed in (1, 2)]
    trees = [build_tree([replace(it, reward=None) for it in group], [1.0, -1.0, 0.5]) for group in calls]
    config = TrainConfig(learning_rate=1e-3, max_grad_norm=1e9)
    learners = TorchLearner(TINY, config, grpo), sample_efficiency.CallByCallLearner(TINY, config, grpo)
    norms = [learner.step(trees)["grad_norm"] for learner in learners]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert learners[0].version == learners[1].version == 1


@pytest.mark.system  # on a new machine matplotlib first asks the system, by a process, for its fonts
def test_curves_of_several_seeds_are_pooled_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for which in sample_efficiency.LEARNERS:
        for seed, (start, n) in enumerate([(0.25, 20), (0.5, 80)]):
            folder = tmp_path / f"{which}-{seed}"
            folder.mkdir()
            found = [
                {"step": at, "temperature": 1.0, "success": start + 0.1 * at, "n": n, "interval": [0.1, 0.9]}
                for at in (0, 1, 2)
            ]
            (folder / "report.json").write_text(json.dumps({"evaluations": found, "steps": 2}))
            lines = [json.dumps({"step": at, "learner/seconds": 1.5}) for at in (1, 2)]
            (folder / "metrics.jsonl").write_text("\n".join(lines))
    picture = tmp_path / "curves.png"
    sample_efficiency.main(["--seeds", "0", "1", "--out", str(tmp_path), "--picture", str(picture), "--draw-only"])
    assert picture.stat().st_size > 1000
    assert "65.0% (55.3% to 73.6%, n=100)" in capsys.readouterr().out


def test_a_table_is_markdown():
    assert tables.table(["a", "b"], [["x", 1234.5], ["yy", None]]) == (
        "| a  | b     |\n|----|-------|\n| x  | 1,234 |\n| yy | -     |"
    )


def test_runs_with_another_model_or_other_steps_have_folders_of_their_own():
    def name(*arguments):
        return recipes.folder_name("rate 1e-4", 0, recipes.parse(["words", *arguments]))

    assert name() == name("--steps", "60", "--model", "smollm2-135m") == "words-rate-1e-4-0"
    others = [name(*it) for it in (["--steps", "5"], ["--model", "a/b"], ["--model", "a-b"], ["--model", "/a/b"])]
    assert len({name(), *others}) == 5
    assert not any("/" in it for it in others)


def test_the_judge_of_words_is_refused_for_tools(capsys):
    with pytest.raises(SystemExit):
        recipes.parse(["tools", "--recipes", "RULER"])
    assert "the recipe RULER is for words" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_a_last_call_counts_without_its_closing_marker(end):
    task = {"input": {"messages": [{"role": "user", "content": "Add 1 and 2."}], "tools": []}}
    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}\n{end}'
    [call] = exported.outcome(task, text)["messages"][-1]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
