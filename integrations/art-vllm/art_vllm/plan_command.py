"""The ``art plan`` command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_vllm.gpus import Gpu
    from art_vllm.prices import Prices
    from art_vllm.workload import Workload

EXAMPLE = (
    "Examples: `art plan --gpu 'RTX 4090' --licence apache --dollars-per-hour 0.4 --budget 5 --steps 40`, "
    "`art plan --budget 20 --dollars-per-hour H100=2.5 --dollars-per-hour 'RTX 4090=0.4' --steps 200`, "
    "`art plan --model Qwen/Qwen2.5-3B-Instruct --gpu 24GB`, "
    "`art plan --model Qwen/Qwen2.5-7B-Instruct --gpu 'RTX 4090' --context 4096 --serve-in-8bit`, "
    "`art plan --model Qwen/Qwen3-8B --gpu H100 --run runs/live --dollars-per-hour 2.5`, "
    "`art plan --model Qwen/Qwen3-8B --dollars-per-million 0.1,0.4,0.4 --steps 50`"
)


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder (its config.json is enough), or the name of a cached or well-known model; default: compare "
            "models of all sizes."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU name such as 'RTX 4090', or memory size: 24GB (24 * 10^9 bytes) or 24GiB (24 * 2^30)."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs; vLLM uses all, the learner the first.")] = 1,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Adapter rank; default: as in a training run.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False,
    load_in_4bit: Annotated[
        bool | None,
        typer.Option(help="Quantize the learner's frozen weights; default: if 16 bits need over half the GPU."),
    ] = None,
    serve_in_8bit: Annotated[bool, typer.Option("--serve-in-8bit", help="Serve the weights in fp8.")] = False,
    learner: Annotated[
        Literal["auto", "unsloth", "torch"], typer.Option(help="auto: assumes that Unsloth is installed.")
    ] = "auto",
    engine: Annotated[Literal["vllm", "embedded"], typer.Option(help="What serves the policy.")] = "vllm",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt plus answer, as max_context; default: up to 8192.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(min=2, help="Rollouts per task; default: as in --run, else 8.")
    ] = None,
    tasks_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tasks per step; default: as in --run, else 8.")
    ] = None,
    staleness: Annotated[
        int, typer.Option(min=0, help="As max_staleness; above 0, engine and learner can't take turns.")
    ] = 0,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder that provides the token counts: the newest steps of a training run, or an evaluation of your tasks "
            "(`art eval --run-dir`, also with --live)."
        ),
    ] = None,
    calls: Annotated[int, typer.Option(min=1, help="Without --run: model calls per rollout.")] = 3,
    prompt: Annotated[int, typer.Option(min=1, help="Without --run: tokens in the first prompt.")] = 1000,
    sampled: Annotated[int, typer.Option(min=1, help="Without --run: tokens per answer.")] = 150,
    dollars_per_hour: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[GPU=]PRICE",
            help="Your price of one GPU per hour. Without --gpu: compares the GPUs that have a price, all known ones if "
            "no GPU is named; repeat it for several GPUs.",
        ),
    ] = None,
    dollars_per_million: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT,SAMPLED,TRAINED",
            help="Instead of --gpu: what a service such as Tinker bills for a million tokens of each kind.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of the whole run, for prices; ignored with --model and --gpu.")
    ] = 20,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Without --model: most dollars for all steps; needs --dollars-per-hour. Doesn't need --gpu."
        ),
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Without --model: a part of the licence's name, such as apache.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: an object, or without --model a list.")] = False,
) -> None:
    """Show which models you can train on a GPU or a budget, or the memory and settings of one. Needs no weights, GPU or network.

    Exits with 0 if the plan fits, 1 if it doesn't.
    """
    from art_vllm.candidates import plan_of
    from art_vllm.cost import cost
    from art_vllm.gpus import find_gpu
    from art_vllm.plan import Setup
    from art_vllm.plan_report import as_json, report
    from art_vllm.prices import read_prices
    from art_vllm.rented import price
    from art_vllm.workload import step_of

    prices = read_prices(dollars_per_hour or [])
    _check(model, gpu, full, lora_rank, prices, dollars_per_million)
    _check_candidates(model, gpu, budget, licence, prices, dollars_per_million)
    defaults = step_of(run) if run else (Setup.group_size, Setup.tasks_per_step)
    group_size, tasks_per_step = group_size or defaults[0], tasks_per_step or defaults[1]
    workload = _workload(run, group_size * tasks_per_step, group_size, calls=calls, prompt=prompt, sampled=sampled)
    if dollars_per_million is not None:
        priced = price(workload, dollars_per_million, steps)
        typer.echo(json.dumps(priced.as_json()) if json_ else priced.report(model or ""))
        return
    settings: dict[str, Any] = {
        "gpus": gpus, "lora_rank": 0 if full else lora_rank, "load_in_4bit": load_in_4bit, "learner": learner,
        "engine": engine, "serve_in_8bit": serve_in_8bit, "group_size": group_size, "tasks_per_step": tasks_per_step,
        "staleness": staleness, "tree": workload.largest,
    }  # fmt: skip
    kinds = (find_gpu(gpu),) if gpu else prices.gpus
    if model is None:
        choice = {"licence": licence, "steps": steps, "context": context}
        if not _compare(kinds, prices, settings, workload, choice, budget, as_json=json_):
            raise typer.Exit(1)
        return
    planned = plan_of(model, settings | {"gpu": kinds[0]}, context)
    step = cost(planned, workload, prices.of(kinds[0]))
    typer.echo(json.dumps(as_json(planned, step)) if json_ else "\n".join(report(planned, step)))
    if not planned.fits:
        raise typer.Exit(1)


def _workload(run: Path | None, rollouts: int, group_size: int, **assumptions: int) -> Workload:
    """Return a step's tokens: those of the run's steps, of its evaluation, or as assumed."""
    from art_vllm.evaluated import evaluated
    from art_vllm.workload import assumed, has_steps, measured

    if run is None:
        return assumed(rollouts, group_size, **assumptions)
    return measured(run) if has_steps(run) else evaluated(run, rollouts, group_size)


def _compare(
    kinds: Sequence[Gpu],
    prices: Prices,
    settings: Mapping[str, Any],
    workload: Workload,
    choice: Mapping[str, Any],
    budget: float | None,
    *,
    as_json: bool,
) -> bool:
    """Print the models that each kind of GPU can train. Return whether there is one."""
    from art_vllm.candidates import candidates, print_candidates

    found = [candidates({**settings, "gpu": gpu}, workload, dollars_per_hour=prices.of(gpu), **choice) for gpu in kinds]
    setting = f"{choice['steps']} steps of {workload.runs:.0f} rollouts ({workload.source})"
    return print_candidates(found, setting, budget, as_json=as_json)


def _check(
    model: str | None,
    gpu: str | None,
    full: bool,
    lora_rank: int | None,
    prices: Prices,
    dollars_per_million: str | None,
) -> None:
    """Raise ConfigError for options that contradict each other."""
    from art_vllm.prices import with_speed

    if (model is not None and gpu is None and dollars_per_million is None) or (gpu and dollars_per_million):
        raise ConfigError("pass either --gpu, or --dollars-per-million for a service that bills tokens")
    if full and lora_rank is not None:
        raise ConfigError("--full trains all weights, so it can't be combined with --lora-rank; remove one of them")
    if not prices.gpus:
        return
    if dollars_per_million is not None:
        raise ConfigError("--dollars-per-hour is the price of a GPU; drop it, or drop --dollars-per-million")
    if gpu is not None and prices.of(with_speed(gpu, f"--gpu {gpu}")) is None:
        raise ConfigError(
            f"--dollars-per-hour has no price of --gpu {gpu}; pass one, or drop --gpu to compare the GPUs that have one"
        )


def _check_candidates(
    model: str | None,
    gpu: str | None,
    budget: float | None,
    licence: str | None,
    prices: Prices,
    dollars_per_million: str | None,
) -> None:
    """Raise ConfigError for options that need, or don't go with, a comparison of models."""
    if model is not None and (budget is not None or licence is not None):
        raise ConfigError("--budget and --licence choose between models; drop them, or drop --model")
    if budget is not None and not prices.gpus:
        raise ConfigError(
            "--budget needs your price of a GPU: --dollars-per-hour 2 for the one of --gpu or for any, or --dollars-per-hour "
            "H100=2.5"
        )
    if model is None and (dollars_per_million is not None or (gpu is None and not prices.gpus)):
        raise ConfigError("pass --gpu to compare models, or --dollars-per-hour to compare GPUs too, or --model")


def add_to(app: typer.Typer) -> None:
    """Register ``art plan``."""
    app.command("plan", epilog=EXAMPLE)(plan)
