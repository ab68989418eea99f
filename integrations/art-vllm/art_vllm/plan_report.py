"""Prints a plan: a table, a verdict, settings to paste, or JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from art_core import TrainConfig
from art_vllm.cost import ASSUMED, NOT_COUNTED, Cost
from art_vllm.gpus import GIB, machine
from art_vllm.known_shapes import known_shapes
from art_vllm.plan import Plan, Setup, batched_tokens, machine_parts, plan, remedies, sequence_bytes
from art_vllm.shapes import COUNTED, Shape

MAX_ADVICE = 6
"""Most changes that are suggested."""


def report(planned: Plan, step: Cost) -> Iterator[str]:
    """Yield the lines of a plan: memory, verdict, suggested changes, notes, cost, and the settings to paste if it fits."""
    yield _heading(planned.setup)
    yield from _memory(planned)
    yield from verdict(planned)
    yield from machine_memory(planned)
    yield from notes(planned.setup)
    yield from cost_lines(planned, step)
    if planned.fits:
        settings = _settings(planned)
        yield f"settings: art.train(..., {', '.join(f'{name}={_python(value)}' for name, value in settings.items())})"
        yield f"in a command: art serve {' '.join(_option(name, value) for name, value in settings.items())}"


def _memory(planned: Plan) -> Iterator[str]:
    phases = ("rollouts", "learning")
    yield f"{'GiB':24}{phases[0]:>9}{phases[1]:>9}"
    for part in planned.parts:
        rollouts, learning = (_gib(part.size) if not planned.turns or phase in part.phases else "-" for phase in phases)
        yield f"{part.name:24}{rollouts:>9}{learning:>9}  {part.why}"
    rollouts, learning = (_gib(planned.held(phase)) for phase in phases)
    margin = f"{planned.setup.gpu.name} less {_margin(planned)}"
    yield f"{'total':24}{rollouts:>9}{learning:>9}  of {_gib(planned.usable)} usable: {margin}"


def _heading(setup: Setup) -> str:
    shape = setup.shape
    count = shape.parameters
    size = f"{count / 1e9:.2f}B parameters" if count >= 1e7 else f"{count / 1e6:.2f}M parameters"
    if shape.experts:
        size += f" ({shape.active / 1e9:.2f}B active per token)"
    trained = f"LoRA of rank {setup.rank}" if setup.rank else "all weights trained"
    bits = " on 4-bit weights" if setup.in_4bit else ""
    served = f"served by {setup.engine} on {machine(setup.gpu, setup.gpus)}"
    return f"{shape.name}: {size}; {trained}{bits} by {setup.trainer}; {served}"


def verdict(planned: Plan) -> Iterator[str]:
    """Yield whether the plan fits and how, and what to change if it doesn't or is tight."""
    setup = planned.setup
    if not planned.fits:
        yield f"doesn't fit: {_gib(planned.missing)} GiB short for one sequence of {setup.context} tokens and a training step"
    else:
        way = (
            "engine and learner take turns (vLLM sleeps during a step)"
            if planned.turns
            else "engine and learner side by side"
        )
        yield (
            f"fits, {way}: {planned.sequences} concurrent sequences of {setup.context} tokens (rollouts: up to "
            f"{setup.at_once}), {planned.pass_tokens:,} tokens per pass"
        )
        yield from _other_way(planned)
    if not planned.comfortable:
        yield from _advice(planned)


def _advice(planned: Plan) -> Iterator[str]:
    better = islice(remedies(planned), MAX_ADVICE)
    lines = [f"  {change}: {changed.sequences} concurrent sequences" for change, changed in better]
    if not planned.fits and (smaller := smaller_that_fits(planned.setup)):
        lines.append(f"  a smaller model: {smaller.name}")
    if lines:
        yield "for more concurrent sequences:" if planned.fits else "to make it fit:"
        yield from lines
    elif not planned.fits:
        yield "no change known to `art plan` makes it fit"


def smaller_that_fits(setup: Setup) -> Shape | None:
    """Return the largest well-known model of the same series that fits, or None."""
    series, size = _series(setup.shape.name), setup.shape.parameters
    smaller = [shape for shape in known_shapes() if _series(shape.name) == series and shape.parameters < size]
    for shape in sorted(smaller, key=lambda shape: -shape.parameters):
        # ``Setup`` rejects some numbers of heads and positions.
        if (
            shape.heads % setup.gpus == 0
            and shape.positions >= setup.context
            and plan(replace(setup, shape=shape)).fits
        ):
            return shape
    return None


def _series(name: str) -> str:
    return re.sub(r"\d+(\.\d+)?B", "", name)


def _other_way(planned: Plan) -> Iterator[str]:
    setup = planned.setup
    if setup.engine != "vllm" or setup.staleness:
        return
    other = plan(setup, turns=not planned.turns)
    name = "side by side" if planned.turns else "taking turns"
    if other.fits:
        passes = "" if other.pass_tokens == planned.pass_tokens else f", {other.pass_tokens:,} tokens per pass"
        yield f"{name}: {other.sequences} sequences, gpu-memory-utilization {other.utilization:.2f}{passes}"
    else:
        yield f"{name}: doesn't fit"


def machine_memory(planned: Plan) -> Iterator[str]:
    """Yield what a run keeps in main memory to spare the GPU's."""
    parts = [f"{_gib(size)} GiB for {name}" for name, size in machine_parts(planned).items()]
    if parts and planned.fits:
        yield f"main memory: {', '.join(parts)}"


def notes(setup: Setup) -> Iterator[str]:
    """Yield what was estimated and what is not supported."""
    shape, adapted = setup.shape, bool(setup.shape.experts and setup.rank)
    candidates = (
        (shape.family not in COUNTED, f"model type {shape.family!r} is unknown and counted as a Llama, so this is an estimate"),
        (shape.stateful, f"{shape.stateful} layers keep a fixed-size state, which is not counted; install art-hybrid"),
        (shape.tied, "LM head and embedding share their weights, which are counted once"),
        (adapted, "PEFT's all-linear adapts every expert and the router, which make up most of the adapter"),
        (shape.experts and setup.in_4bit, "bitsandbytes can't quantize fused experts, so they are counted in 16 bits"),
        (shape.packed, "its files have fewer than 16 bits per weight, so vLLM may need less than is counted here"),
        (setup.serve_in_8bit, "served and trained weights differ in precision, so importance_cap=2; watch logprob_gap"),
        (setup.engine == "embedded", "times assume an engine that keeps the GPU busy, which the embedded engine doesn't"),
        (setup.gpus > 1, "the learner uses one GPU; the others help serving only"),
        (setup.gpu.name == "T4", "a T4 doesn't support bfloat16; float16 is used"),
    )  # fmt: skip
    yield from (f"note: {text}" for applies, text in candidates if applies)


def cost_lines(planned: Plan, step: Cost) -> Iterator[str]:
    """Yield what a step computes, how long that takes and what it costs."""
    work, learner = step.workload, step.workload.learner
    yield f"one step, {work.source}:"
    yield (
        f"  {work.runs:.0f} rollouts, {work.calls:.0f} calls; {work.prefill.count:,.0f} prompt tokens, shared prefixes once "
        f"({work.prompts.count:,.0f} without sharing), {work.decode.count:,.0f} sampled, {learner.count:,.0f} trained as trees"
    )
    if work.longest > planned.setup.context:
        yield f"  note: rollouts of up to {work.longest:,} tokens don't fit into a context of {planned.setup.context:,}"
    for part in step.parts:
        yield f"  {part.name:9} {part.tokens:12,.0f} tokens {part.flops:9.2e} FLOP{_seconds(part.seconds)}"
    if step.seconds is None:
        yield (
            "  no time estimate: the plan doesn't fit"
            if planned.setup.gpu.half
            else "  no time estimate: --gpu is only a size; name the GPU, such as --gpu 'RTX 4090'"
        )
        return
    price = "" if step.dollars is None else f", ${step.dollars:.4f} (${100 * step.dollars:.2f} for 100 steps)"
    yield f"  total {step.seconds:.1f} s per step{price}, {step.batch:.0f} sequences per decoding batch"
    yield f"  assumed: {ASSUMED}; {NOT_COUNTED}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f" {value:8.1f} s"


def _settings(planned: Plan) -> dict[str, Any]:
    """Return the settings of a run with this plan."""
    setup = planned.setup
    settings: dict[str, Any] = {
        "model": setup.shape.name, "engine": setup.engine, "learner": setup.trainer, "lora_rank": setup.rank,
    }  # fmt: skip
    if setup.trainer == "unsloth":
        settings["load_in_4bit"] = setup.in_4bit
    settings["max_context"] = setup.context
    if planned.pass_tokens != planned.default_pass:
        settings["max_tokens_per_pass"] = planned.pass_tokens
    for name in ("group_size", "tasks_per_step"):
        if getattr(setup, name) != getattr(TrainConfig, name):
            settings[name] = getattr(setup, name)
    if setup.staleness:
        settings["max_staleness"] = setup.staleness
    if setup.serve_in_8bit:
        settings["importance_cap"] = 2
    if setup.engine == "vllm":
        settings["engine_args"] = engine_args(planned)
    return settings


def _python(value: Any) -> str:
    return repr(value).replace("'", '"')


def _option(name: str, value: Any) -> str:
    if name in ("model", "engine", "learner"):
        return f"--{name} {shlex.quote(value)}"
    return f"--set {shlex.quote(f'{name}={json.dumps(value)}')}"


def engine_args(planned: Plan) -> dict[str, Any]:
    """Return the vLLM options of this plan that differ from a run's own choice."""
    setup = planned.setup
    options: dict[str, Any] = {
        "gpu-memory-utilization": planned.utilization,
        "max-num-batched-tokens": batched_tokens(setup.gpu),
    }
    if setup.gpus > 1:
        options["tensor-parallel-size"] = setup.gpus
    if setup.serve_in_8bit:
        options["quantization"] = "fp8"
    if not setup.staleness:  # with staleness vLLM never sleeps, and a run omits the option itself
        options["enable-sleep-mode"] = planned.turns
    return options


def as_json(planned: Plan, step: Cost) -> dict[str, Any]:
    """Return the plan and its cost as one JSON object; sizes in bytes."""
    setup = planned.setup
    return {
        "model": setup.shape.name,
        "shape": dataclasses.asdict(setup.shape),
        "parameters": setup.shape.parameters,
        "active_parameters": setup.shape.active,
        "gpu": dataclasses.asdict(setup.gpu),
        "gpus": setup.gpus,
        "learner": setup.trainer,
        "lora_rank": setup.rank,
        "adapter_parameters": setup.shape.adapter_parameters(setup.rank),
        "in_4bit": setup.in_4bit,
        "engine": setup.engine,
        "context": setup.context,
        "at_once": setup.at_once,
        "turns": planned.turns,
        "memory": [dataclasses.asdict(part) for part in planned.parts],
        "machine_memory": machine_parts(planned),
        "peak": {phase: planned.held(phase) for phase in ("rollouts", "learning")},
        "usable": planned.usable,
        "sequences": planned.sequences,
        "bytes_per_token": sequence_bytes(setup) / setup.context,
        "max_tokens_per_pass": planned.pass_tokens,
        "fits": planned.fits,
        "verdict": list(verdict(planned)),
        "notes": list(notes(setup)),
        "engine_args": engine_args(planned) if setup.engine == "vllm" and planned.fits else {},
        "step": {**dataclasses.asdict(step), "flops": step.flops, "assumed": [ASSUMED, NOT_COUNTED]},
    }


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _margin(planned: Plan) -> str:
    return f"{1 - planned.usable / planned.setup.gpu.memory:.0%} for fragmentation"
