"""The command line of ``art plan``. Knows nothing about how memory or time is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from art_core.errors import ConfigError

EXAMPLE = (
    "Examples: `art plan --model Qwen/Qwen2.5-3B-Instruct --gpu 24GB`, "
    "`art plan --model Qwen/Qwen2.5-7B-Instruct --gpu 'RTX 4090' --context 4096 --serve-in-8bit`, "
    "`art plan --model Qwen/Qwen3-8B --gpu H100 --run runs/mine --dollars-per-hour 2.5`"
)


def plan(
    model: Annotated[
        str, typer.Option(help="A folder with a config.json, or the name of a cached or well-known model.")
    ],
    gpu: Annotated[
        str, typer.Option(help="Its memory (24GB is 24 * 10^9 bytes, 24GiB more), or its name: 'RTX 4090'.")
    ],
    gpus: Annotated[int, typer.Option(min=1, help="vLLM is split over all; the learner works on the first.")] = 1,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Of the adapter; default: the run's own.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False,
    load_in_4bit: Annotated[
        bool | None, typer.Option(help="The learner's frozen weights; default: where 16 bits take over half the GPU.")
    ] = None,
    serve_in_8bit: Annotated[bool, typer.Option("--serve-in-8bit", help="vLLM's copy of the weights in fp8.")] = False,
    learner: Annotated[
        Literal["auto", "unsloth", "torch"], typer.Option(help="auto: as on a GPU where Unsloth is installed.")
    ] = "auto",
    engine: Annotated[Literal["vllm", "embedded"], typer.Option(help="What serves the policy.")] = "vllm",
    context: Annotated[
        int | None, typer.Option(min=1, help="Prompt plus answer, in tokens: max_context; default: up to 8192.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Runs of a task; default: RUN's, else 8.")] = None,
    tasks_per_step: Annotated[int | None, typer.Option(min=1, help="Tasks of a step; default: RUN's, else 8.")] = None,
    staleness: Annotated[int, typer.Option(min=0, help="max_staleness; above 0 nobody takes turns.")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="A run folder: its newest steps say how many tokens a step has.")
    ] = None,
    calls: Annotated[int, typer.Option(min=1, help="Without --run: model calls of a run of the agent.")] = 3,
    prompt: Annotated[int, typer.Option(min=1, help="Without --run: tokens of the first prompt.")] = 1000,
    sampled: Annotated[int, typer.Option(min=1, help="Without --run: tokens of an answer.")] = 150,
    dollars_per_hour: Annotated[float | None, typer.Option(min=0, help="Price of one GPU.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model takes on a GPU, what fits, and the settings for it. Needs no weights, no GPU and no network.

    Exit code 0: it fits; 1: it does not.
    """
    from art_vllm.cost import cost
    from art_vllm.gpus import find_gpu
    from art_vllm.known_shapes import find_shape
    from art_vllm.plan import Setup
    from art_vllm.plan import plan as make_plan
    from art_vllm.plan_report import as_json, report
    from art_vllm.workload import assumed, measured, step_of

    if full and lora_rank is not None:
        raise ConfigError("--full trains all weights, so it has no --lora-rank; leave one of the two out")
    if dollars_per_hour is not None and find_gpu(gpu).half is None:
        raise ConfigError(
            f"--gpu {gpu} is only a size, so there are no seconds to pay for; name the GPU, such as 'RTX 4090'"
        )
    usual = step_of(run) if run else (Setup.group_size, Setup.tasks_per_step)
    group_size, tasks_per_step = group_size or usual[0], tasks_per_step or usual[1]
    runs = group_size * tasks_per_step
    work = measured(run) if run else assumed(runs, group_size, calls=calls, prompt=prompt, sampled=sampled)
    shape = find_shape(model)
    setup = Setup(
        shape=shape, gpu=find_gpu(gpu), gpus=gpus, lora_rank=0 if full else lora_rank,
        load_in_4bit=load_in_4bit, learner=learner, engine=engine, serve_in_8bit=serve_in_8bit,
        context=context or min(Setup.context, shape.positions),
        group_size=group_size, tasks_per_step=tasks_per_step, staleness=staleness, tree=work.largest,
    )  # fmt: skip
    found = make_plan(setup)
    step = cost(found, work, dollars_per_hour)
    if json_:
        typer.echo(json.dumps(as_json(found, step)))
    else:
        typer.echo("\n".join(report(found, step)))
    if not found.fits:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Add ``art plan`` to the ``art`` command."""
    app.command("plan", epilog=EXAMPLE)(plan)
