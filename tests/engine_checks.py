"""What an engine's answer is checked against: a plain forward pass of the same model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def worst_difference(model, completion: dict, temperature: float = 1.0) -> float:
    """The largest gap between a completion's logprobs and those of a plain forward over the same ids."""
    prompt, worst = completion["prompt_token_ids"], 0.0
    for choice in completion["choices"]:
        sampled = choice["token_ids"]
        assert len(sampled) == len(choice["token_logprobs"]) > 0
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
        expected = logprobs[torch.arange(len(sampled)), torch.tensor(sampled)]
        worst = max(worst, float((expected - torch.tensor(choice["token_logprobs"])).abs().max()))
    return worst


def plain_model(folder: str):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def dictate(monkeypatch, script: list[int]) -> None:
    """Make every sequence sample ``script``."""
    from art_embedded import scheduler
    from art_embedded.sampling import Sampled

    append = scheduler.Scheduler._append

    def append_dictated(self, sequence, token):
        append(self, sequence, Sampled(script[len(sequence.sampled)], token.logprob))

    monkeypatch.setattr(scheduler.Scheduler, "_append", append_dictated)
