"""What test_unsloth.py runs in a process of its own: unsloth_child.py WHAT FAMILIES FOLDER; prints one line of JSON."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx

import art_core as art
from art_core import builtin
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner import unsloth
from art_core.losses import grpo
from art_core.token_tree import build_tree
from art_embedded import TINY

WHAT, FAMILIES, FOLDER = sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3])
MAKE = """
import shutil, sys, torch, transformers, tree_cases
from pathlib import Path
place, tiny, *families = sys.argv[1:]
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
tree_cases.TREE_FAMILIES.setdefault("qwen3-moe", (transformers.Qwen3MoeConfig, experts))
for family in families:
    folder = Path(place) / family
    tree_cases.make_model(family, torch.float32, vocab_size=884).save_pretrained(folder)
    for file in Path(tiny).glob("*token*"):
        shutil.copy(file, folder)
"""


def model_folder(family=FAMILIES[0]):
    """A random model with a tokenizer, made with all others where Unsloth changes nothing; or the tiny model."""
    if family == "tiny":
        return str(TINY)
    if not (FOLDER / family).exists():
        command = [sys.executable, "-c", MAKE, FOLDER, TINY, *FAMILIES]
        subprocess.run(command, check=True, stdout=2, stderr=subprocess.DEVNULL)
    return str(FOLDER / family)


def learner(make, folder, **settings):
    return make(folder, TrainConfig(**{"lora_rank": 4, "warmup_steps": 0, "seed": 3, **settings}), grpo)


def trees():
    from tree_cases import FORKED

    tree = build_tree(FORKED, [1.0, -1.0, 0.5])
    return [replace(tree, old_logprobs=tree.old_logprobs - 4)]


def fill_adapter(*learners):
    """Give all the same adapter; a new one's second half is zero, and so is the gradient of its first."""
    import torch

    torch.manual_seed(1)
    for parts in zip(*(it._trained.values() for it in learners), strict=True):
        value = 0.2 * torch.randn_like(parts[0])
        for part in parts:
            part.data.copy_(value)


def gradients():
    return {"families": {family: gradients_of(family) for family in FAMILIES}}


def paths():
    """A model that forgets the mask it is given, as Unsloth's own forward does in training mode unless it is told."""
    unsloth.load()
    from art_core.learner.unsloth_learner import UnslothLearner

    class Forgetful(UnslothLearner):
        def _add_adapter(self, model, rank):
            forget = lambda _, args, kwargs: (args, kwargs | {"attention_mask": None, "position_ids": None})  # noqa: E731
            model.get_decoder().register_forward_pre_hook(forget, with_kwargs=True)
            return super()._add_adapter(model, rank)

    return gradients_of(FAMILIES[0], Forgetful)


def gradients_of(family, make=builtin.unsloth_learner):
    import torch

    folder = model_folder(family)
    ours, torchs = learner(make, folder), learner(builtin.torch_learner, folder)
    assert list(ours._trained) == list(torchs._trained)
    fill_adapter(ours, torchs)
    passes = []
    ours.model.get_base_model().get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    for it in (ours, torchs):
        it._accumulate(trees())
    flat = [torch.cat([p.grad.flatten() for p in it._trained.values()]) for it in (ours, torchs)]
    return {
        "error": ((flat[0] - flat[1]).norm() / flat[1].norm()).item(),
        "gradients": int(flat[1].count_nonzero()),
        "passes": len(passes),
    }


def steps():
    from art_embedded.loading import load_adapter

    folder = model_folder()
    ours = learner(builtin.unsloth_learner, folder, learning_rate=0.01)
    fill_adapter(ours)
    before = {name: tensor.clone() for name, tensor in ours.weights().live.items()}
    ours.step(trees())
    ours.save(FOLDER / "saved")
    ours.step(trees())
    after = {name: tensor.clone() for name, tensor in ours.weights().live.items()}
    merged = dict(load_adapter(folder, FOLDER / "saved" / "adapter").named_parameters())
    other = learner(builtin.unsloth_learner, folder, learning_rate=0.01)
    other.restore(FOLDER / "saved")
    saved = other.weights().live
    of_peft = max((saved[name] - merged[name]).abs().max().item() for name in saved)
    other.step(trees())
    again = other.weights().live
    return {
        "changed": max((after[name] - before[name]).abs().max().item() for name in after),
        "after_restore": max((after[name] - again[name]).abs().max().item() for name in after),
        "adapter_merged_by_peft": of_peft,
    }


def agent(task, address):
    body = {"messages": [{"role": "user", "content": task}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {address.api_key}"}
    answer = httpx.post(f"{address.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    return answer.json()["choices"][0]["message"]["content"]


def train():
    turn = itertools.count()
    done = art.train_sync(
        agent, ["a", "b"], model="tiny", learner="auto", reward=lambda trajectory: float(next(turn) % 2), steps=3,
        tasks_per_step=2, group_size=4, lora_rank=4, learning_rate=0.003, warmup_steps=0, run_dir=FOLDER / "run",
    )  # fmt: skip
    lines = (done.run_dir / "metrics.jsonl").read_text().splitlines()
    return {
        "unsloth": "unsloth" in sys.modules,
        "gaps": [json.loads(line)["logprob_gap"] for line in lines],
        "grad_norms": [json.loads(line)["grad_norm"] for line in lines],
    }


def refusals():
    said = {}
    for name, settings in (("whole", {"lora_rank": 0}), ("four_bits", {"load_in_4bit": True})):
        try:
            learner(builtin.unsloth_learner, model_folder(), **settings)
        except ConfigError as error:
            said[name] = str(error)
    return said


def together():
    """How far the torch learner and the engine's model are off in this process, from a process without Unsloth."""
    import torch

    from art_embedded.loading import load_model

    folder = model_folder()
    plain = subprocess.check_output([sys.executable, __file__, "plain", FAMILIES[0], FOLDER], text=True)
    learner(builtin.unsloth_learner, folder).step(trees())
    loss = learner(builtin.torch_learner, folder).step(trees())["grad_norm"]
    logits = load_model(folder)(input_ids=torch.arange(3, 12)[None]).logits.abs().sum().item()
    expected = json.loads(plain)
    return {"torch_learner": abs(loss / expected["loss"] - 1), "engine": abs(logits / expected["logits"] - 1)}


def plain():
    import torch

    from art_embedded.loading import load_model

    folder = str(FOLDER / FAMILIES[0])
    loss = learner(builtin.torch_learner, folder).step(trees())["grad_norm"]
    return {
        "loss": loss,
        "logits": load_model(folder)(input_ids=torch.arange(3, 12)[None]).logits.abs().sum().item(),
    }


if __name__ == "__main__":
    import transformers

    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(globals()[WHAT]()))
