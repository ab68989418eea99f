"""Held-out success of a run's exported model with plain transformers: python -m bench.exported runs/my-run tools

``generate`` samples, the model's own chat template renders, and the suite's reward scores; of art's engine only the parser of
tool calls is used. The run's own evaluation is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_core as art
from art_embedded.answer import Answer, message
from art_vllm.export import export
from bench.demo_seeds import evaluation, with_interval
from examples.pretrained.train import SUITES, TEMPERATURES

BATCH = 20


def answers(folder: Path, tasks: list[Any], temperature: float, max_tokens: int) -> list[str]:
    """Return the text that the model in ``folder`` answers to each task."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    texts = []
    for start in range(0, len(tasks), BATCH):
        inputs = [messages_and_tools(task) for task in tasks[start : start + BATCH]]
        prompts = [
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            for messages, tools in inputs
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(**batch, max_new_tokens=max_tokens, **sampling)
        texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def messages_and_tools(task: Any) -> tuple[list[Any], list[Any] | None]:
    """Return what the reference agent sends."""
    if isinstance(task["input"], list):
        return task["input"], None
    return task["input"]["messages"], task["input"]["tools"]


def outcome(task: Any, text: str) -> Any:
    """Return what the reference agent returns for an answer."""
    if isinstance(task["input"], list):
        return text.strip()
    answer = message(Answer(tools=True).feed(text, final=True))  # as the embedded engine parses it
    return {"messages": [*task["input"]["messages"], answer]}


def main(options: argparse.Namespace) -> None:
    """Export, sample, score and print."""
    torch.manual_seed(0)
    name, difficulty = SUITES[options.suite]
    suite = art.tasks(name, split="test", **difficulty)
    tasks = list(suite[: options.tasks])
    report = json.loads((options.run / "report.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        exported = export(options.run, Path(folder, "export")).merged
        for temperature in TEMPERATURES:
            texts = answers(exported, tasks, temperature, 128 if options.suite == "tools" else 64)
            answered = zip(tasks, texts, strict=True)
            trajectories = [art.Trajectory(task=task, calls=(), output=outcome(task, text)) for task, text in answered]
            for trajectory in trajectories:
                suite.reward(trajectory)
            found = with_interval(art.Report(tuple(trajectories), temperature).as_json())
            own = with_interval(evaluation(report, "after", temperature))
            print(f"temperature {temperature:g}: generate {found}, the run's engine {own}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--tasks", type=int, default=200)
    main(parser.parse_args())
