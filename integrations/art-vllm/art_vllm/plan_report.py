"""A plan -> lines: a table, a verdict, settings to paste, or JSON. Knows nothing about how it was counted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from art_core.config import TrainConfig
from art_vllm.cost import ASSUMED, NOT_COUNTED, Cost
from art_vllm.gpus import GIB
from art_vllm.known_shapes import known_shapes
from art_vllm.plan import Plan, Setup, batched_tokens, machine_parts, plan, remedies, sequence_bytes
from art_vllm.shapes import COUNTED, Shape

MOST_ADVICE = 6
"""Things to change that are named."""


def report(found: Plan, step: Cost) -> Iterator[str]:
    """Yield what a plan takes, whether it fits, what to change and the settings to paste, line by line."""
    yield _heading(found.setup)
    yield from _memory(found)
    yield from verdict(found)
    yield from machine_memory(found)
    yield from notes(found.setup)
    yield from cost_lines(found, step)
    if found.fits:
        yield f"settings: art.train(..., {', '.join(_settings(found))})"


def _memory(found: Plan) -> Iterator[str]:
    phases = ("rollouts", "learning")
    yield f"{'GiB':24}{phases[0]:>9}{phases[1]:>9}"
    for it in found.parts:
        rollouts, learning = (_gib(it.size) if not found.turns or phase in it.phases else "-" for phase in phases)
        yield f"{it.name:24}{rollouts:>9}{learning:>9}  {it.why}"
    rollouts, learning = (_gib(found.held(phase)) for phase in phases)
    margin = f"{found.setup.gpu.name} less {_margin(found)}"
    yield f"{'taken':24}{rollouts:>9}{learning:>9}  of {_gib(found.usable)} usable: {margin}"


def _heading(setup: Setup) -> str:
    shape = setup.shape
    count = shape.parameters
    size = f"{count / 1e9:.2f}B parameters" if count >= 1e7 else f"{count / 1e6:.2f}M parameters"
    if shape.experts:
        size += f" ({shape.active / 1e9:.2f}B active per token)"
    trained = f"LoRA of rank {setup.rank}" if setup.rank else "all weights trained"
    bits = " on 4-bit weights" if setup.in_4bit else ""
    gpus = f"{setup.gpus} x {setup.gpu.name}" if setup.gpus > 1 else setup.gpu.name
    return f"{shape.name}: {size}; {trained}{bits} by {setup.trainer}; served by {setup.engine} on {gpus}"


def verdict(found: Plan) -> Iterator[str]:
    """Yield whether it fits, in which way, and what to change where it does not or is narrow."""
    setup = found.setup
    if not found.fits:
        yield f"does not fit: {_gib(found.missing)} GiB are missing for one sequence of {setup.context} tokens, and for a step"
    else:
        way = (
            "engine and learner take turns (vLLM sleeps during a step)"
            if found.turns
            else "engine and learner side by side"
        )
        yield (
            f"fits, {way}: {found.sequences} sequences of {setup.context} tokens at a time (runs: up to "
            f"{setup.at_once}), {found.pass_tokens:,} tokens a pass"
        )
        yield from _other_way(found)
    if not found.comfortable:
        yield from _advice(found)


def _advice(found: Plan) -> Iterator[str]:
    better = islice(remedies(found), MOST_ADVICE)
    lines = [f"  {what}: {it.sequences} sequences at a time" for what, it in better]
    if not found.fits and (smaller := smaller_that_fits(found.setup)):
        lines.append(f"  a smaller model: {smaller.name}")
    if lines:
        yield "for more at a time:" if found.fits else "what would make it fit:"
        yield from lines
    elif not found.fits:
        yield "nothing that is known here makes it fit"


def smaller_that_fits(setup: Setup) -> Shape | None:
    """Return the largest well-known model of the same series that fits, None where there is none."""
    series, size = _series(setup.shape.name), setup.shape.parameters
    alike = [it for it in known_shapes() if _series(it.name) == series and it.parameters < size]
    for shape in sorted(alike, key=lambda it: -it.parameters):
        # Another number of heads or positions may refuse the setup itself.
        if (
            shape.heads % setup.gpus == 0
            and shape.positions >= setup.context
            and plan(replace(setup, shape=shape)).fits
        ):
            return shape
    return None


def _series(name: str) -> str:
    return re.sub(r"\d+(\.\d+)?B", "", name)


def _other_way(found: Plan) -> Iterator[str]:
    setup = found.setup
    if setup.engine != "vllm" or setup.staleness:
        return
    other = plan(setup, turns=not found.turns)
    name = "side by side" if found.turns else "by turns"
    if other.fits:
        passes = "" if other.pass_tokens == found.pass_tokens else f", {other.pass_tokens:,} tokens a pass"
        yield f"{name}: {other.sequences} sequences, gpu-memory-utilization {other.utilization:.2f}{passes}"
    else:
        yield f"{name} it does not fit"


def machine_memory(found: Plan) -> Iterator[str]:
    """Yield what a run keeps in the machine's memory because of the GPU's."""
    parts = [f"{_gib(size)} GiB for {what}" for what, size in machine_parts(found).items()]
    if parts and found.fits:
        yield f"machine memory besides: {', '.join(parts)}"


def notes(setup: Setup) -> Iterator[str]:
    """Yield what was guessed and what is not supported."""
    shape, adapted = setup.shape, bool(setup.shape.experts and setup.rank)
    said = (
        (shape.family not in COUNTED, f"type {shape.family!r} is counted like a Llama of these sizes, so this is an estimate"),
        (shape.stateful, f"{shape.stateful} layers keep a state of fixed size, which is not counted; trees go path by path"),
        (shape.tied, "the LM head is the embedding, which is counted once"),
        (adapted, "PEFT's all-linear adapts every expert and the router, which is most of the adapter"),
        (shape.experts and setup.in_4bit, "bitsandbytes packs no fused experts, so they are counted in 16 bits"),
        (shape.packed, "its files hold fewer than 16 bits a weight, so vLLM may take less than is counted here"),
        (setup.serve_in_8bit, "what is served differs from what is trained, so importance_cap=2; watch logprob_gap"),
        (setup.engine == "embedded", "seconds are for an engine that keeps the GPU busy, which the embedded one does not"),
        (setup.gpus > 1, "the learner works on one GPU, so more of them help serving only"),
        (setup.gpu.name == "T4", "a T4 has no bfloat16; float16 is used"),
    )  # fmt: skip
    yield from (f"note: {text}" for holds, text in said if holds)


def cost_lines(found: Plan, step: Cost) -> Iterator[str]:
    """Yield what a step computes, and what that takes."""
    work, learner = step.workload, step.workload.learner
    yield f"a step, {work.source}:"
    yield (
        f"  {work.runs:.0f} runs, {work.calls:.0f} calls; prompts {work.prefill.count:,.0f} tokens with shared prefixes once "
        f"({work.prompts.count:,.0f} without), {work.decode.count:,.0f} sampled, {learner.count:,.0f} learnt from as trees"
    )
    if work.longest > found.setup.context:
        yield f"  note: a run of up to {work.longest:,} tokens does not fit into a context of {found.setup.context:,}"
    for it in step.parts:
        yield f"  {it.name:9} {it.tokens:12,.0f} tokens {it.flops:9.2e} FLOP{_seconds(it.seconds)}"
    if step.seconds is None:
        yield (
            "  no seconds: it does not fit"
            if found.setup.gpu.half
            else "  no seconds: a size has no speed; name the GPU, such as --gpu 'RTX 4090'"
        )
        return
    paid = "" if step.dollars is None else f", {step.dollars:.4f} dollars ({100 * step.dollars:.2f} for 100 steps)"
    yield f"  together {step.seconds:.1f} s a step{paid}, {step.batch:.0f} sequences decoded together"
    yield f"  assumed: {ASSUMED}; {NOT_COUNTED}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f" {value:8.1f} s"


def _settings(found: Plan) -> Iterator[str]:
    setup = found.setup
    yield f'model="{setup.shape.name}"'
    yield f'engine="{setup.engine}"'
    yield f'learner="{setup.trainer}"'
    yield f"lora_rank={setup.rank}"
    if setup.trainer == "unsloth":
        yield f"load_in_4bit={setup.in_4bit}"
    yield f"max_context={setup.context}"
    if found.pass_tokens != found.default_pass:
        yield f"max_tokens_per_pass={found.pass_tokens}"
    for name in ("group_size", "tasks_per_step"):
        if getattr(setup, name) != getattr(TrainConfig, name):
            yield f"{name}={getattr(setup, name)}"
    if setup.staleness:
        yield f"max_staleness={setup.staleness}"
    if setup.serve_in_8bit:
        yield "importance_cap=2"
    if setup.engine == "vllm":
        options = ", ".join(f'"{name}": {value!r}'.replace("'", '"') for name, value in engine_args(found).items())
        yield f"engine_args={{{options}}}"


def engine_args(found: Plan) -> dict[str, Any]:
    """Return vLLM's options that a run does not choose like this by itself."""
    setup = found.setup
    options: dict[str, Any] = {
        "gpu-memory-utilization": found.utilization,
        "max-num-batched-tokens": batched_tokens(setup.gpu),
    }
    if setup.gpus > 1:
        options["tensor-parallel-size"] = setup.gpus
    if setup.serve_in_8bit:
        options["quantization"] = "fp8"
    if not setup.staleness:  # where it never sleeps, a run leaves this out itself
        options["enable-sleep-mode"] = found.turns
    return options


def as_json(found: Plan, step: Cost) -> dict[str, Any]:
    """Return all that is known as one object; sizes in bytes."""
    setup = found.setup
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
        "turns": found.turns,
        "memory": [dataclasses.asdict(it) for it in found.parts],
        "machine_memory": machine_parts(found),
        "peak": {phase: found.held(phase) for phase in ("rollouts", "learning")},
        "usable": found.usable,
        "sequences": found.sequences,
        "bytes_per_token": sequence_bytes(setup) / setup.context,
        "max_tokens_per_pass": found.pass_tokens,
        "fits": found.fits,
        "verdict": list(verdict(found)),
        "notes": list(notes(setup)),
        "engine_args": engine_args(found) if setup.engine == "vllm" and found.fits else {},
        "step": {**dataclasses.asdict(step), "flops": step.flops, "assumed": [ASSUMED, NOT_COUNTED]},
    }


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _margin(found: Plan) -> str:
    return f"{1 - found.usable / found.setup.gpu.memory:.0%} for fragments"
