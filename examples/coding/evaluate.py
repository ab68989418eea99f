"""Evaluate a model or a run on held-out tasks: python -m examples.coding.evaluate runs/my-run --temperature 1"""

import argparse
import os

import art_core as art

from .agent import write_function
from .reward import reward
from .tasks import held_out_tasks
from .train import START

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default=str(START), help="a model folder, a Hugging Face name or a run folder")
parser.add_argument("--eval-tasks", type=int, default=200, help="held-out tasks (default 200)")
parser.add_argument("--temperature", type=float, help="default: the agent's own, 0")


if __name__ == "__main__":
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    tasks = held_out_tasks(options.eval_tasks)
    report = art.evaluate_sync(
        write_function, tasks, model=options.model, reward=reward, temperature=options.temperature
    )
    print(f"{report} on {len(tasks)} held-out tasks")
