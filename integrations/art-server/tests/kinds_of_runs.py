"""Run folders as five kinds of training leave them: improved, flat, stopped, crashed, and one that hacked its reward."""

from recorded_runs import call

from art_core.store import Store

TASKS, STEPS, GROUP = 40, 9, 4
KINDS = ("improved", "flat", "stopped", "crashed", "hacked")


def run_of(folder, kind):
    """Write a run of that kind, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    done = 5 if kind in ("stopped", "crashed") else STEPS
    with Store(folder / "run.sqlite") as store:
        meta = {
            "model": "tiny",
            "config": {"max_logprob_gap": 1.0},
            "loss": "grpo",
            "reward": "right",
            "learner": "TorchLearner",
        }
        meta |= {"planned_steps": STEPS, "ended": "RuntimeError: CUDA out of memory" if kind == "crashed" else ""}
        meta["command"] = {
            "folder": "/",
            "given": {"agent": "app.py:agent", "tasks": "tasks.jsonl", "reward": "app.py:reward"},
        }
        if kind == "stopped":
            meta["stopped"] = {"step": done, "reason": "all rewards were equal within every group of the last 5 steps"}
        for name, value in meta.items():
            store.set_meta(name, value)
        evaluations = [evaluation(store, "before", 0, 8)]
        for step in range(1, done + 1):
            train(store, kind, step)
        if kind != "crashed":
            evaluations.append(
                evaluation(store, "after", done, {"improved": 30, "flat": 9, "stopped": 8, "hacked": 6}[kind])
            )
        store.set_meta("evaluations", evaluations)
    return folder


def train(store, kind, step):
    good = {"improved": step / STEPS, "hacked": step / STEPS, "crashed": step / STEPS}.get(kind, 0.25)
    for number in range(GROUP):
        name = f"{step}-{number}"
        store.add_rollout(name, task={"input": "Count."}, step=step, split="train", task_id="t", group=str(step))
        store.record(name, call((1, 2), tuple(range(300, 312)), request_id="r"))
        store.finish_rollout(name, output="x")
        store.add_scores([name], [float(number < 4 * good)])
    metrics = {"reward": good, "success": good, "groups_with_contrast": 1.0, "groups_sampled": 1.0, "seconds": 60.0}
    metrics |= {
        "trajectories": 4.0,
        "calls": 4.0,
        "prompt_tokens": 8.0,
        "sampled_tokens": 48.0,
        "logprob_gap": 1e-5,
        "loss": 0.1,
    }
    store.add_step(step, metrics)


def evaluation(store, name, step, solved):
    """Add an evaluation in which the first ``solved`` tasks succeed, but after training not task 0. Return what is stored."""
    ids = []
    for task in range(TASKS):
        right = task < solved and not (task == 0 and name == "after")
        rollout = f"{name}-{task}"
        store.add_rollout(rollout, task={"input": f"Question {task}?"}, step=step, split="eval", task_id=f"task{task}")
        finish = "length" if task % 5 == 4 else "stop"
        store.record(rollout, call((1, 2), (300, 301), answer=f"answer {task}", finish_reason=finish))
        error = "ValueError: no inbox" if task == 39 else None
        store.finish_rollout(rollout, output="x", error=error, seconds=1.0 + task)
        notes = {} if right else {"check": f"wrong {'date' if task % 2 else 'name'}"}
        store.add_scores(
            [rollout], [float(right)], metrics=[{"success": float(right), "called": float(task != 38)}], notes=[notes]
        )
        ids.append(rollout)
    rate = (solved - (name == "after")) / TASKS
    result = {
        "name": name,
        "step": step,
        "temperature": 1.0,
        "success": rate,
        "counts_successes": True,
        "n": TASKS,
        "unscored": 0,
    }
    return {
        **result,
        "stderr": 0.07,
        "interval": [max(0, rate - 0.14), rate + 0.14],
        "mean_reward": rate,
        "rollout_ids": ids,
    }
