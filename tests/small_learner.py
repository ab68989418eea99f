"""A learner of a model of a few thousand weights, and trees for it."""

from dataclasses import replace

import torch
from tree_cases import FORKED, make_model

from art_core.config import TrainConfig
from art_core.learner import TorchLearner, tree_logprobs
from art_core.losses import grpo
from art_core.token_tree import build_tree


def save_model(folder):
    make_model("qwen3").half().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_learner(folder, loss=grpo, **settings):
    return TorchLearner(folder, TrainConfig(**{"warmup_steps": 0, "seed": 3, **settings}), loss)


def make_trees(learner):
    """FORKED, with the logprobs that the learner's start weights give."""
    tree = build_tree(FORKED, [1.0, -1.0, 0.5])
    with torch.no_grad():
        logprobs = tree_logprobs(learner.model, tree)
    return [replace(tree, old_logprobs=logprobs.cpu().numpy())]


def live(learner):
    return {name: tensor.clone() for name, tensor in learner.weights().live.items()}
