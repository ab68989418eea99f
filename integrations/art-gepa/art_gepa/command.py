"""The command ``art optimize``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from art_cli.arguments import load_agent, load_object, load_reward, load_tasks, parse_settings
from art_cli.main import AGENT, TASKS, Reward, RunDir, Settings
from art_cli.resuming import quoted, resume_hint, same_command
from art_core.plugin_api import plural
from art_core.store.run_folder import new_run_dir

if TYPE_CHECKING:
    from art_gepa.search import Result

NOT_SETTABLE = (
    "reward", "model", "seed", "run_dir", "reflector", "rollouts", "max_cost", "held_out", "plugins", "progress", "perfect",
)  # fmt: skip
"""Keywords of ``optimize`` that ``--set`` refuses, because the command passes them itself."""


def optimize(
    agent: Annotated[str, AGENT],
    tasks: Annotated[str, TASKS],
    reflector: Annotated[
        str,
        typer.Option(
            help="Reads rollouts and writes better texts: a LiteLLM model string, or MODULE:NAME of a function."
        ),
    ],
    reward: Reward,
    model: Annotated[
        str, typer.Option(help="tiny, a model folder, a Hugging Face name, or live for the agent's own provider.")
    ],
    rollouts: Annotated[
        int, typer.Option(min=1, help="Maximum number of rollouts; each held-out task needs two more.")
    ] = 200,
    max_cost: Annotated[
        float | None, typer.Option(help="End the search once the reflector has cost this many US dollars.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Tasks to evaluate before and after, in the same form as TASKS.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order and of sampling.")] = 0,
    run_dir: RunDir = None,
    set_: Settings = None,
) -> None:
    """Search for better system prompts, tool descriptions and examples. The agent and the model don't change."""
    from art_gepa import search

    run_dir = run_dir or new_run_dir(f"prompts-{Path(model).name}")
    settings = parse_settings(set_ or [], NOT_SETTABLE)
    loaded = (load_object if model == "live" else load_agent)(agent), load_tasks(tasks)
    with resume_hint(run_dir, same_command(run_dir)):
        work = search.optimize(
            *loaded, model=model, reward=load_reward(reward), rollouts=rollouts, max_cost=max_cost,
            reflector=load_reflector(reflector), seed=seed, run_dir=run_dir,
            held_out=load_tasks(held_out) if held_out else None, **settings,
        )  # fmt: skip
        result = asyncio.run(work)
    show(result)


def load_reflector(name: str) -> Any:
    """Return the function that MODULE:NAME names; any other name is a LiteLLM model string."""
    return load_object(name) if _is_function(name) else name


def _is_function(name: str) -> bool:
    """Return whether a reflector is MODULE:NAME or FILE.py:NAME; ollama/qwen3:8b is a model."""
    return ":" in name and ("/" not in name or ".py:" in name)


def show(result: Result) -> None:
    """Print what was found."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    spent = f"{plural(result.rollouts, 'rollout')}, {plural(result.reflections, 'reflection')}, ${result.cost:.2f}"
    if not result.changes:
        console.print(f"found no better prompt: {result.before:.3f} on the validation tasks ({spent})")
        return
    console.print(result.patch())
    console.print(f"\n{result.before:.3f} -> {result.after:.3f} on the validation tasks ({spent})")
    if result.held_out:
        before, after = result.held_out
        console.print(f"held out: {before}  ->  {after}")
    console.print(f"the new texts are in {result.file}")
    console.print(f"next: art train, art eval and art gateway accept them: --prompts {quoted(result.file)}")
