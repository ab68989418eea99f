"""A run folder as a training run leaves it, made without a model: for tests of what reads one."""

from __future__ import annotations

import json
import random
from pathlib import Path

from art_core import Call
from art_core.store import Store
from art_embedded import TINY


def encoded(text):
    from tokenizers import Tokenizer

    return tuple(Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids)


def call(prompt, sampled, *, agent="team/writer", version=0, messages=(), answer="", request_id="r", **more):
    return Call(
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=tuple(-0.1 * (place % 30) for place in range(len(sampled))),
        policy_version=version,
        agent=agent,
        request_id=request_id,
        request={"model": "policy", "temperature": 1.0, "messages": list(messages)},
        response={"role": "assistant", "content": answer},
        **more,
    )


def short_call(prompt=(1, 2, 3), sampled=(4, 5), **fields) -> Call:
    return Call(tuple(prompt), tuple(sampled), tuple(-0.5 * (i + 1) for i in range(len(sampled))), **fields)


def record(folder, *, steps=3, tasks=2, group_size=4, calls=2, model="tiny", seed=0):
    """Write a run of so many steps, and return its folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng, prompt = random.Random(seed), encoded("You answer questions about an inbox. Find the cost.")
    with Store(folder / "run.sqlite") as store:
        config = {
            "model": model,
            "steps": steps,
            "tasks_per_step": tasks,
            "group_size": group_size,
            "advantage": "mean",
        }
        meta = {"model": model, "config": config, "loss": "grpo", "reward": "right", "planned_steps": steps}
        for key, value in meta.items():
            store.set_meta(key, value)
        for step in range(1, steps + 1):
            for task in range(tasks):
                _group(store, rng, step, (step * tasks + task) % (3 * tasks), group_size, calls, prompt)
            metrics = {"reward": step / steps, "success": step / steps, "loss": -0.01 * step, "kl_old": 0.001 * step}
            metrics |= {"entropy": 1 / step, "mismatch": 1e-6, "seconds": 2.0, "groups_with_contrast": 2.0}
            store.add_step(step, metrics | {"groups_sampled": float(tasks)})
            if step % 50 == 0:
                store.flush()
        found = {"success": 0.25, "counts_successes": True, "n": 8, "stderr": 0.1, "interval": [0.1, 0.5]}
        before = {"name": "before", "step": 0, "temperature": None, "unscored": 0, "rollout_ids": ["x"], **found}
        store.set_meta("evaluations", [before, {**before, "name": "after", "step": steps, "success": 0.75}])
    (folder / "report.json").write_text(json.dumps({"steps": steps}))
    return folder


def _group(store, rng, step, task, size, calls, prompt):
    given = {"input": f"Question {task}?"}
    ids, rewards = [], []
    for number in range(size):
        rollout = f"s{step}-t{task}-{number}"
        store.add_rollout(rollout, task=given, step=step, split="train", task_id=f"task{task}", group=f"{step}/{task}")
        messages, shown = [{"role": "user", "content": given["input"]}], prompt
        for turn in range(calls):
            sampled = tuple(rng.randrange(300, 900) for _ in range(12))
            answer = f"answer {turn} of {rollout}"
            store.record(
                rollout, call(shown, sampled, version=step - 1, messages=messages, answer=answer, request_id=f"q{turn}")
            )
            messages = [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"go on {turn}"},
            ]
            shown = (*shown, *sampled, *prompt[:5])
        store.finish_rollout(rollout, output=answer, seconds=1.5)
        ids.append(rollout)
        rewards.append(float(number % 2))
    mean = sum(rewards) / len(rewards)
    store.add_scores(
        ids,
        rewards,
        metrics=[{"success": reward} for reward in rewards],
        notes=[{"ruler": f"scored {reward}: because"} for reward in rewards],
        advantages=[reward - mean for reward in rewards],
        by="ruler",
    )
