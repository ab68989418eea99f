"""Checks on one machine with an NVIDIA GPU: exactness, speed and memory of the tree's forward pass, with random weights.

    python -m bench.gpu_check --out gpu.md
    python -m bench.gpu_check --device cpu --tiny          the same code at a toy size

Needs torch, transformers and peft, but no network. Every section runs in its own process, so that none can end another;
failures are in the table with their errors. ``--only`` selects sections, ``--timeout`` limits each; what was measured before
the limit is in the table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.tables import table

if TYPE_CHECKING:
    import torch

    from art_core.types import TokenTree

# torch, transformers and their importers are imported in functions, because Unsloth must be imported before them.

BACKENDS = ("flex", "dense", "segments", "paths")
"""art_core's ways to compute a tree; which are available depends on the device."""
CALLS = "call by call"
CHOICE = "art_core's choice"
ROW = "row: "
"""Begins a line that a child prints for a row; libraries print others."""
HEAD = ["model", "tokens", "way", "seconds", "tree tokens/s", "computed tokens/s", "peak GiB above weights", "note"]

Work = Callable[[], Sequence[object]]
Row = Sequence[object]


class Machine:
    """The device and the sizes to measure."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.torch = torch
        self.device = torch.device(options.device)
        self.tiny = options.tiny
        self.repeats = options.repeats
        self.sizes: list[str] = ["toy"] if self.tiny else options.sizes.split(",")
        self.tokens = [128] if self.tiny else [int(it) for it in options.tokens.split(",")]
        self.runs = options.runs
        self.backends: list[str] = options.backends.split(",")

    @property
    def vocabulary(self) -> int:
        from bench.shapes import QWEN3_VOCABULARY

        return 512 if self.tiny else QWEN3_VOCABULARY

    def model(self, size: str, dtype: torch.dtype) -> torch.nn.Module:
        from bench.shapes import random_model

        return random_model(size, self.vocabulary, dtype, self.device)

    def tree(self, tokens: int) -> TokenTree:
        from art_core.token_tree import build_tree
        from bench.synthetic import random_trajectories

        trajectories = random_trajectories(tokens, self.vocabulary, runs=self.runs)
        return build_tree(trajectories, [1.0 if number % 2 else -0.5 for number in range(self.runs)])

    def group(self) -> TokenTree:
        """Return the tree of 8 answers of 1,024 tokens to one prompt of 16,384; 8 and 64 if the model is a toy."""
        from bench.learner_speed import group

        prompt, answer = (64, 8) if self.tiny else (16_384, 1024)
        return group(0, prompt, answer, self.vocabulary)[0]

    def clear(self) -> None:
        """Give back the memory of the GPU that nothing uses any more."""
        if self.device.type == "cuda":
            gc.collect()
            self.torch.cuda.empty_cache()

    def timed(self, work: Callable[[], None]) -> tuple[float, float | None]:
        """Return the median seconds of ``work`` after a first, unmeasured run, and its peak memory in GiB above that
        before (None on the CPU)."""
        cuda = self.torch.cuda if self.device.type == "cuda" else None
        work()  # compiles kernels, if the way has any
        self.clear()
        before = cuda.memory_allocated() if cuda else 0
        if cuda:
            cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            work()
            if cuda:
                cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return median(seconds), (cuda.max_memory_allocated() - before) / 2**30 if cuda else None


def exactness(machine: Machine) -> Iterator[Row]:
    """Logprobs and gradients of every way, compared with call by call in float32."""
    torch = machine.torch
    tree = machine.tree(min(machine.tokens[0], 4096))
    size = machine.sizes[0]
    reference, gradient = _logprobs_and_gradient(machine, machine.model(size, torch.float32), tree, CALLS)
    yield "dtype", "way", "largest logprob gap", "mean gap", "relative gradient error", "note"
    for dtype in (torch.float32, torch.bfloat16):
        model = machine.model(size, torch.float32).to(dtype)  # the same numbers, rounded
        for way in (CALLS, CHOICE, *machine.backends):

            def work(way: str = way, model: Any = model) -> Sequence[object]:
                new, new_gradient = _logprobs_and_gradient(machine, model, tree, way)
                gap = (new - reference).abs()
                error = float((new_gradient - gradient).norm() / gradient.norm())
                return [f"{float(gap.max()):.1e}", f"{float(gap.mean()):.1e}", f"{error:.1e}"]

            yield str(dtype).removeprefix("torch."), way, *attempt(work, 3)
        del model
        machine.clear()


def _logprobs_and_gradient(machine: Machine, model: Any, tree: TokenTree, way: str) -> tuple[Any, Any]:
    """Return the logprobs, and the gradient of a fixed sum of them, both in float32."""
    torch = machine.torch
    model.zero_grad()
    new = torch.cat([it.detach() for it in _backward(model, tree, way)])
    parameters = [it for it in model.parameters() if it.grad is not None]
    gradient = torch.cat([it.grad.flatten().float() for it in parameters])
    model.zero_grad()
    return new.float(), gradient


def _backward(model: Any, tree: TokenTree, way: str) -> list[Any]:
    """Add the gradient of the sum of advantage * logprob / targets; return the logprobs, in the tree's order."""
    import numpy as np
    import torch

    from bench import tree as ours
    from bench.plain import call_batches

    device = next(model.parameters()).device
    weights = torch.from_numpy(tree.advantages[np.flatnonzero(tree.weights)]).to(device) / tree.num_targets
    if way != CALLS:
        new = ours.logprobs(model, tree, None if way == CHOICE else way)
        (new * weights).sum().backward()
        return [new]
    ordered = torch.zeros_like(weights)
    for places, new in call_batches(model, tree):
        index = torch.from_numpy(places).to(device)
        (new * weights[index]).sum().backward()
        ordered[index] = new.detach()
    return [ordered]


def speed(machine: Machine) -> Iterator[Row]:
    """Forward and backward in bfloat16, all weights trained."""
    yield from _all_weights(machine, machine.sizes[0])


def hybrid(machine: Machine) -> Iterator[Row]:
    """Forward and backward of a model shaped like Qwen3.5 in bfloat16, all weights trained."""
    from bench.shapes import HYBRID

    yield from _all_weights(machine, HYBRID + machine.sizes[0])


def _all_weights(machine: Machine, size: str) -> Iterator[Row]:
    yield HEAD
    model = machine.model(size, machine.torch.bfloat16)
    yield from _speed_rows(machine, model, size, (CALLS, CHOICE, *machine.backends))


def lora(machine: Machine) -> Iterator[Row]:
    """LoRA of rank 16 on every linear layer with gradient checkpointing, bfloat16."""
    from peft import LoraConfig, get_peft_model

    yield HEAD
    size = machine.sizes[-1]
    model = machine.model(size, machine.torch.bfloat16)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config).train()
    yield from _speed_rows(machine, model, f"{size} LoRA", (CALLS, CHOICE))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield from _speed_rows(machine, model, f"{size} LoRA, checkpointing", (CALLS, CHOICE, *machine.backends))


def _speed_rows(machine: Machine, model: Any, name: str, ways: Sequence[str]) -> Iterator[Row]:
    from bench.plain import call_tokens, path_tokens

    for tree in (*map(machine.tree, machine.tokens), machine.group()):
        for way in ways:

            def work(tree: TokenTree = tree, way: str = way) -> Sequence[object]:
                def step() -> None:
                    _backward(model, tree, way)
                    model.zero_grad()

                seconds, peak = machine.timed(step)
                computed = {CALLS: call_tokens, "paths": path_tokens}.get(way, lambda it: it.num_tokens)(tree)
                return [seconds, tree.num_tokens / seconds, computed / seconds, peak]

            yield name, tree.num_tokens, way, *attempt(work, 4)
            model.zero_grad()
            machine.clear()


def unsloth(machine: Machine) -> Iterator[Row]:
    """Unsloth's FastLanguageModel with LoRA of rank 16: call by call, and through the tree; and a step of its learner."""
    from unsloth import FastLanguageModel

    from art_core.learner.unsloth_learner import UnslothLearner

    torch = machine.torch
    yield HEAD
    with _saved(machine) as folder:
        yield _step_row(machine, "Unsloth's learner", UnslothLearner, folder)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=max(machine.tokens), dtype=torch.bfloat16, load_in_4bit=False, local_files_only=True
        )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, use_gradient_checkpointing="unsloth")
    model.config.use_cache = False
    yield from _speed_rows(machine, model.train(), f"{machine.sizes[0]} Unsloth LoRA", (CALLS, CHOICE, "paths"))


def learner(machine: Machine) -> Iterator[Row]:
    """A step of the torch learner, LoRA of rank 16."""
    from art_core.learner.torch_learner import TorchLearner

    yield HEAD
    with _saved(machine) as folder:
        yield _step_row(machine, "torch learner", TorchLearner, folder)


def _step_row(machine: Machine, way: str, make: Callable[..., Any], folder: str) -> Row:
    from art_core.config import TrainConfig
    from art_core.losses import grpo

    tree = machine.group()

    def work() -> Sequence[object]:
        trained = make(folder, TrainConfig(lora_rank=16), grpo)
        seconds, peak = machine.timed(lambda: trained.step([tree]) and None)
        return [seconds, tree.num_tokens / seconds, tree.num_tokens / seconds, peak]

    row = [f"{machine.sizes[0]} LoRA", tree.num_tokens, way, *attempt(work, 4)]
    machine.clear()
    return row


@contextmanager
def _saved(machine: Machine) -> Iterator[str]:
    """Save the smallest model with a tokenizer; yield its folder."""
    from art_embedded import TINY

    with tempfile.TemporaryDirectory(prefix="art-gpu-check") as folder:
        machine.model(machine.sizes[0], machine.torch.bfloat16).save_pretrained(folder)
        machine.clear()
        for file in (*TINY.glob("*token*"), TINY / "chat_template.jinja"):
            shutil.copy(file, folder)
        yield folder


SECTIONS = {
    "exactness": exactness, "speed": speed, "hybrid": hybrid, "lora": lora, "unsloth": unsloth, "learner": learner,
}  # fmt: skip


def attempt(work: Work, width: int) -> list[object]:
    """Return the ``width`` cells of ``work`` and an empty note, or empty cells and its error as the note."""
    try:
        return [*work(), ""]
    except Exception as error:  # noqa: BLE001 - if one way fails, the others are still measured
        return [*[None] * width, _short(f"{type(error).__name__}: {error}")]


def _short(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return first.strip().replace("|", "/")[:110]


def run_section(name: str, options: argparse.Namespace) -> str:
    """Return a section's table as Markdown, measured in a child process."""
    command = [sys.executable, "-m", "bench.gpu_check", "--child", name, "--device", options.device]
    for option in ("sizes", "tokens", "backends", "repeats", "runs"):
        command += [f"--{option}", str(getattr(options, option))]
    started = time.perf_counter()
    try:
        child = subprocess.run(
            [*command, *(["--tiny"] if options.tiny else [])], capture_output=True, timeout=options.timeout, check=False
        )
        printed = child.stdout
        lines = [line for line in child.stderr.decode().splitlines() if line.strip()] or ["no message"]
        end = f"failed with exit code {child.returncode}: {_short(lines[-1])}" if child.returncode else ""
    except subprocess.TimeoutExpired as error:
        printed, end = error.stdout or b"", f"not finished within {options.timeout:.0f} s"
    took = f"({time.perf_counter() - started:.0f} s with loading)"
    rows = [json.loads(line.removeprefix(ROW)) for line in printed.decode().splitlines() if line.startswith(ROW)]
    parts = [f"## {name}", f"{SECTIONS[name].__doc__} {took}", table(rows[0], rows[1:]) if rows[1:] else "", end]
    return "\n\n".join(part for part in parts if part) + "\n"


def describe(options: argparse.Namespace) -> str:
    """Return the description of the machine and the setup."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no NVIDIA GPU; pass --device cpu --tiny for the same code at a toy size")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    versions = []
    for package in ("torch", "transformers", "peft", "unsloth"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return (
        f"# {name}\n\n{', '.join(versions)}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}; random weights; "
        f"trees of {options.runs} rollouts of 4 turns, an eighth of each tree shared by all; median of {options.repeats}, the "
        "first left out; TF32 off\n"
    )


def sections(text: str) -> list[str]:
    """Read ``--only``."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="also write the tables here, after every section")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="a toy model and a small tree")
    add("--only", type=sections, default=list(SECTIONS), help=f"comma-separated sections, of {', '.join(SECTIONS)}")
    add("--sizes", default="0.6b,4b", help="models: the first for exactness, speed and Unsloth, the last for LoRA")
    add("--tokens", default="4096,8192,16384,32768", help="tokens per tree")
    add("--backends", default=",".join(BACKENDS))
    add("--runs", type=int, default=8)
    add("--repeats", type=int, default=3)
    add("--timeout", type=float, default=1200.0, help="seconds for each section")
    add("--child", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.child:
        if options.child == "unsloth":
            import unsloth as _  # noqa: F401 - must be imported before torch and transformers
        for row in SECTIONS[options.child](Machine(options)):
            print(f"\n{ROW}{json.dumps(row)}", flush=True)
        return
    report = describe(options)
    print(report, flush=True)
    for name in options.only:
        section = run_section(name, options)
        print(section, flush=True)
        report += "\n" + section
        if options.out:
            options.out.write_text(report)


if __name__ == "__main__":
    main()
