"""Training and serving through Tinker's API, by SkyRL's server."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from art_audit import audit
from art_core import TrainConfig, losses
from art_core.learner.gradients import Totals, accumulate, join
from art_core.learner.pretrained import load_causal_lm
from art_core.learner.tree_forward import tree_outputs
from art_core.token_tree import build_tree
from art_core.types import Call, Trajectory
from art_embedded import TINY

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore::ResourceWarning")]
RATE = 1e-2
ROOT = Path(__file__).parents[3]


def trajectory(prompt, sampled):
    return Trajectory(task=None, calls=(Call(prompt_ids=prompt, sampled_ids=sampled, logprobs=(-1.0,) * len(sampled)),))


def trees():
    """Two groups of which one forks after a shared beginning; its rows have different lengths."""
    forked = [trajectory((5, 6, 7), (8, 9)), trajectory((5, 6, 7), (8, 10, 11, 12, 13, 14))]
    other = [trajectory((20,), (21, 22)), trajectory((20, 23, 24, 25, 26), (27,))]
    return [build_tree(forked, [1.0, -0.5]), build_tree(other, [-1.0, 2.0])]


def stepped_here(folder: Path, ids):
    """Return the gradient's norm of plain PyTorch at the adapter in ``folder``, and the logprobs of ``ids`` after a step."""
    model = PeftModel.from_pretrained(load_causal_lm(TINY), folder / "adapter", is_trainable=True)
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    accumulate(
        [join(trees())], Totals.of(trees()), losses.grpo, forward=lambda tree: tree_outputs(model, tree, weighted_only=True),
        reference=lambda _: None, proximal=False,
    )  # fmt: skip
    norm = float(torch.nn.utils.get_total_norm([it.grad for it in trained]))
    optimizer.step()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return norm, logits[torch.arange(len(ids) - 1), ids[1:]].numpy()


@pytest.mark.timeout(600)
def test_a_step_on_the_server_is_a_step_of_plain_pytorch_from_the_same_adapter(server, tmp_path):
    from art_tinker.learner import TinkerLearner

    config = TrainConfig(
        model="tiny",
        temperature=1.0,
        max_temperature=1.0,
        learning_rate=RATE,
        warmup_steps=0,
        lora_rank=8,
        learner_args={"averages": True},
    )
    learner, ids = TinkerLearner(str(TINY), config, losses.grpo), list(range(5, 25))
    learner.save(tmp_path / "before")
    before = np.array(learner.score(ids))
    metrics = learner.step(trees())
    after = np.array(learner.score(ids))
    assert metrics["targets"] == 11 and learner.version == 1
    change = abs(after - before).max()
    assert change > 0.01
    norm, expected = stepped_here(tmp_path / "before", ids)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    # Adam makes a full step also where a gradient is only rounding.
    assert abs(after - expected).max() < 0.02 * change
    learner.restore(tmp_path / "before")
    assert learner.version == 0 and learner.score(ids) == pytest.approx(before, abs=1e-5)
    learner.close()


def test_what_the_server_keeps_for_a_removed_checkpoint_is_deleted_there(server, tmp_path):
    from art_tinker.learner import TinkerLearner
    from art_tinker.service import STATE

    def kept():
        found = learner._service.create_rest_client().list_checkpoints(run).result().checkpoints
        return {it.tinker_path.rpartition("/")[2] for it in found}

    learner = TinkerLearner(str(TINY), TrainConfig(model="tiny", temperature=1.0, max_temperature=1.0), losses.grpo)
    learner.save(tmp_path / "first")
    first = json.loads((tmp_path / "first" / "learner.json").read_text())[STATE]
    run = first.removeprefix("tinker://").partition("/")[0]
    assert len(kept()) == 2
    shutil.rmtree(tmp_path / "first")
    learner.save(tmp_path / "second")
    until = time.monotonic() + 30
    while len(kept()) != 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(kept()) == 2 and first.rpartition("/")[2] not in kept()
    learner.close()


def start(run_dir: Path) -> subprocess.Popen:
    program = [sys.executable, Path(__file__).with_name("train_on_tinker.py"), run_dir]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(600)  # the server compiles for each new length
def test_a_run_that_was_killed_continues_and_its_ledger_is_clean(server, tmp_path):
    run_dir = tmp_path / "run"
    killed = start(run_dir)
    while killed.poll() is None and not (run_dir / "checkpoints" / "step-000001" / "learner.json").exists():
        time.sleep(0.1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    continued = start(run_dir)
    output, _ = continued.communicate()
    assert continued.returncode == 0, output
    assert "resum" in output and "the engine served the new weights after every step" in output
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [it["step"] for it in metrics if "reward" in it] == [1, 2]
    found = audit(run_dir)
    assert found.clean and found.checked and found.mismatch_max < 1e-3
