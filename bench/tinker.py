"""Train the email agent through Tinker's API, on SkyRL's server, which is started here, and compare what both counted.

python -m bench.tinker [--steps 12] [--seed 0] [--out runs/tinker]
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import art_core as art
from art_audit import audit
from art_core.store import Store
from art_core.store.run_folder import store_file
from bench.skyrl_server import SkyrlServer
from bench.tables import table
from examples.email_search.train import run

LEARNING_RATE = 5e-3


def train_email(run_dir: Path, steps: int, seed: int = 0, **settings: Any) -> art.TrainResult:
    """Train on the server that the environment names."""
    return run(
        steps, seed=seed, run_dir=run_dir, learning_rate=LEARNING_RATE, decay_steps=0, engine="tinker", learner="tinker",
        keep_checkpoints=None, learner_args={"averages": True}, eval_temperatures=(1.0,), **settings,
    )  # fmt: skip


def recorded(run_dir: Path) -> tuple[dict[str, int], list[float]]:
    """Return the tokens that the run has recorded, and the mean reward of every step."""
    with Store(store_file(run_dir)) as store:
        calls = [row.call for rollout in store.rollouts() for row in store.recorded(rollout.rollout_id)]
        steps = [metrics for _, metrics in store.steps()]
    tokens = {
        "prompt tokens": sum(len(call.prompt_ids) for call in calls),
        "sampled tokens": sum(len(call.sampled_ids) for call in calls),
        "trained tokens": int(sum(step.get("trained_tokens", 0) for step in steps)),
    }
    return tokens, [step["reward"] for step in steps]


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/tinker"))
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    server = SkyrlServer(options.out)
    os.environ |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-of-no-account"}
    run_dir = options.out / "run"
    try:
        result = train_email(run_dir, options.steps, options.seed, eval_tasks=40)
        counted = server.counts()
    finally:
        server.stop()
    tokens, rewards = recorded(run_dir)
    found = audit(run_dir)
    print(table(["", "recorded", "server"], [[name, str(it), str(counted[name])] for name, it in tokens.items()]))
    print(
        f"mean reward: first four steps {statistics.fmean(rewards[:4]):.3f}, last four {statistics.fmean(rewards[-4:]):.3f}"
    )
    print(
        f"success at temperature 1: {result.report['before']['success']:.1%} to {result.report['after']['success']:.1%}"
    )
    print(
        f"audit: clean={found.clean}, {found.checked} of {found.calls} calls, largest difference {found.mismatch_max:.2g} nats"
    )


if __name__ == "__main__":
    main()
