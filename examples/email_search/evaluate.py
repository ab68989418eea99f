"""Evaluate a model or a run on held-out tasks: python -m examples.email_search.evaluate runs/my-run --temperature 1"""

import argparse
import os

import art_core as art

from .agent import build_agent
from .reward import reward
from .tasks import held_out_tasks

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="tiny", help="tiny, a model folder or a run folder")
parser.add_argument("--eval-tasks", type=int, default=300, help="held-out tasks (default 300)")
parser.add_argument("--temperature", type=float, help="default: the agent's own, 0")


if __name__ == "__main__":
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    tasks = held_out_tasks(options.eval_tasks)
    report = art.evaluate_sync(
        build_agent(), tasks, model=options.model, reward=reward, temperature=options.temperature
    )
    print(f"{report} on {len(tasks)} held-out tasks")
