"""The golden run: one training run of the email agent, the help of every command, and the public surface.

    PYTHONPATH=tests python -m tests.golden_run

rewrites ``tests/golden/``; ``test_golden.py`` compares. The policy is scripted and everything runs one rollout at a time, so
that nothing is left to chance.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import doc_shell

import art_core as art
from art_core.store import Store
from art_core.testing import FakeEngine

GOLDEN = Path(__file__).parent / "golden"
TOOLS = ("search_inbox", "read_email", "return_final_answer")
REPORTED = ("before", "after", "steps", "seed", "stopped")
"""Of the report, what no other run of the same training changes."""
LOGPROB = -17.0
"""Of every token: about what the model really says of bytes, so that ratios lie around 1 and the step is one."""
SURFACE = {
    "art_core": ("train", "train_sync", "evaluate", "open_run", "Run.collect", "Run.score", "Run.learn", "Run.rollout"),
    "art_core.types": ("Call", "Trajectory", "Group", "TokenTree", "LossInputs", "LossOutputs", "Weights"),
    "art_core.token_tree": ("build_tree",),
    "art_core.learner": ("tree_logprobs",),
    "art_core.losses": ("grpo", "dr_grpo", "dapo", "cispo", "gspo"),
    "art_classic.environment": ("Environment",),
    "art_classic.agent": ("Agent",),
    "art_classic.trainer": ("GRPOTrainer",),
    "art_ruler": ("Ruler", "RULERRewardSystem"),
    "art_wandb": ("ARTWandbLogger",),
    "art_langfuse": ("ARTLangfuseTracker",),
    "art_server": ("TrainingServer", "TrainingClient", "connect"),
}
"""By module, what ``docs/`` promises."""


class Policy:
    """Choose by the conversation alone, so that every run of it says the same: a search, an email to read, an answer."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        messages = request["messages"]
        key = json.dumps([(it["role"], it.get("content")) for it in messages])
        self.asked[key] += 1
        chance = hashlib.sha256(f"{key} {self.asked[key]}".encode()).digest()
        words, last = messages[1]["content"].strip("?.").split(), str(messages[-1]["content"])
        numbers, facts = re.findall(r"id (\d+)", last) or ["1"], re.findall(r" is (.+?)\. ", last) or ["none"]
        name = TOOLS[min(len(messages) // 2 - 1 + (chance[0] % 4 == 0), 2)]
        arguments: dict[str, Any] = {
            "search_inbox": {"keywords": words[-2:] if chance[1] % 2 else words[-1:]},
            "read_email": {"id": int(numbers[chance[1] % len(numbers)])},
            "return_final_answer": {"answer": facts[chance[1] % len(facts)]},
        }[name]
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "content": None,
            "tool_calls": [{"id": f"call_{len(messages)}", "type": "function", "function": function}],
        }


def trained(folder: Path) -> dict[str, Any]:
    """Train the email example's agent for two steps; return what is left in its folder, without names and times of this run."""
    from examples.email_search.agent import build_agent
    from examples.email_search.reward import reward
    from examples.email_search.tasks import held_out_tasks, training_tasks

    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    art.train_sync(
        build_agent(), training_tasks(6, 0), model="tiny", reward=reward, steps=2, tasks_per_step=3, group_size=4, seed=0,
        engine=FakeEngine(Policy(), logprob=LOGPROB), learner="torch", max_concurrent=1, learning_rate=1e-3,
        max_logprob_gap=None, run_dir=folder, progress=False, eval_tasks=held_out_tasks(4), eval_reward=reward,
    )  # fmt: skip
    with Store(folder / "run.sqlite") as store:
        rows = [_row(it) for it in store.trajectories()]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    report = json.loads((folder / "report.json").read_text())
    return {
        "report": {key: report[key] for key in REPORTED},
        "metrics": [_compared(json.loads(line)) for line in lines],
        "rows": rows,
        "weights": changed_weights(folder),
    }


def _compared(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out what depends on the machine: seconds, tokens per second, and memory."""
    return {key: value for key, value in sorted(metrics.items()) if "second" not in key and key != "memory_bytes"}


def _row(trajectory: art.Trajectory) -> dict[str, Any]:
    calls = [
        [len(it.prompt_ids), _digest(it.prompt_ids), _digest(it.sampled_ids), it.policy_version, it.agent]
        for it in trajectory.calls
    ]
    return {"reward": trajectory.reward, "metrics": trajectory.metrics, "error": trajectory.error, "calls": calls}


def _digest(ids: Any) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:12]


def changed_weights(folder: Path) -> dict[str, float]:
    """Return by how much training moved each of the model's tensors: the sum of the absolute differences."""
    from safetensors.torch import load_file

    from art_embedded import TINY

    before, after = (load_file(it / "model.safetensors") for it in (TINY, folder / "checkpoints" / "step-000002"))
    return {name: float((after[name].float() - before[name].float()).abs().sum()) for name in sorted(before)}


def helps() -> str:
    """Return what ``--help`` of ``art``, of every command and of every command of a command is made of."""
    return "\n".join(_help("art", doc_shell.art())) + "\n"


def _help(name: str, command: Any) -> list[str]:
    lines = [name, str(command.help), str(command.epilog)]
    lines += [f"  {'/'.join(it.opts)} [{it.default}] {getattr(it, 'help', '')}" for it in command.params]
    for part, under in sorted(getattr(command, "commands", {}).items()):
        lines += _help(f"{name} {part}", under)
    return lines


def surface() -> str:
    """Return a line for each public name: how it is called, or which fields it has."""
    lines = []
    for module, names in SURFACE.items():
        for name in names:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            lines.append(f"{module}.{name}{inspect.signature(found)}")
    return re.sub(r" at 0x\w+", "", "\n".join(lines)) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder) / "run")
    (GOLDEN / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (GOLDEN / "help.txt").write_text(helps())
    (GOLDEN / "surface.txt").write_text(surface())


if __name__ == "__main__":
    sys.exit(main())
