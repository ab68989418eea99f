"""Train any agent in this folder with the model "tiny": python -m examples.any_agent.train langgraph_team --steps 10"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art

from .inbox import ANSWER, Json, questions, reward

GRAPH = {"langgraph_team": {"train_nodes": ["searcher", "reader"]}}
"""Agents that are message graphs, and which of their nodes are trained."""
AGENTS = ("openai_function", "langgraph_team", "agents_handoff")


def run(agent: str, *, steps: int = 20, seed: int = 0, eval_tasks: int = 200, **settings: Any) -> art.TrainResult:
    """Train one of ``AGENTS``; ``settings`` are further keywords of ``art.train``."""
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    module = importlib.import_module(f".{agent}", __package__)
    if agent in GRAPH:
        settings = {"to_input": as_state, "to_output": answer_of, **GRAPH[agent], **settings}
    return art.train_sync(
        module.build_agent() if agent in GRAPH else module.agent,
        questions(500, seed),
        model="tiny",
        reward=reward,
        steps=steps,
        seed=seed,
        learning_rate=5e-4,
        eval_tasks=questions(eval_tasks, held_out=True),
        eval_temperatures=(1.0,),
        **settings,
    )


def as_state(task: Json) -> Json:
    """Return the start state of a message graph."""
    return {"messages": [("user", task["input"]["question"])], "mailbox": task["input"]["mailbox"]}


def answer_of(state: Json) -> str | None:
    """Return the text of the graph's last message if it is an answer."""
    last = state["messages"][-1]
    return last.text if getattr(last, "name", None) == ANSWER else None


def main(
    agent: Annotated[str, typer.Argument(help=f"One of {', '.join(AGENTS)}.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling.")] = 0,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train an agent and print held-out success before and after."""
    if agent not in AGENTS:
        raise typer.BadParameter(f"unknown agent {agent!r}; choose from {', '.join(AGENTS)}")
    result = run(agent, steps=steps, seed=seed, eval_tasks=eval_tasks, run_dir=run_dir)
    print(f"before: {result.before}\nafter:  {result.after}\n{result.run_dir}")


if __name__ == "__main__":
    typer.run(main)
