"""Compare art_core with its peers; see docs/benchmarks.md.

python -m bench.peers setup              create .bench, the environment with the peers (once, takes minutes)
python -m bench.peers                    everything
python -m bench.peers --only step --style text+fork --group-size 4
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from bench.peers import environment

PARTS = ("step", "pack", "memory")


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.action == "setup":
        environment.setup()
        return
    environment.enter("bench.peers", list(arguments), options.threads)
    warnings.filterwarnings("ignore")  # the peers emit many
    for part in options.only or PARTS:
        run_part(part, options)


def run_part(part: str, options: argparse.Namespace) -> None:
    """Run a part, importing it only now, because the first import takes the longest."""
    if part == "step":
        from bench.peers import step as module
    elif part == "pack":
        from bench.peers import packing as module
    else:
        from bench.peers import memory as module
    module.run(options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("action", nargs="?", choices=("run", "setup"), default="run")
    add("--only", action="append", choices=PARTS, help="run only this part; may be repeated")
    add(
        "--size",
        choices=[kind + size for kind in ("", "qwen3.5-") for size in ("toy", "tiny", "30m")],
        default="tiny",
        help="size of the random model: tiny has 3.7M parameters",
    )
    add("--group-size", type=int, default=8)
    add("--max-turns", type=int, default=10)
    add("--threads", type=int, default=1, help="torch threads; on shared cores, 1 is steadier")
    add("--repeats", type=int, default=3)
    add("--cpu-time", action="store_true", help="measure a step's processor time, if other work shares the cores")
    add(
        "--skip",
        default="",
        help="comma-separated words; sides whose names contain one are left out, such as ART,naive",
    )
    step = parser.add_argument_group("step").add_argument
    step("--style", default="text", help="text, tools, +fork, +subagent joined by +")
    step("--vocabulary", type=int, default=2048)
    step("--micro-batch", type=int, default=4, help="rows padded together, also for the memory part")
    step("--float64", action="store_true", help="for the gradient errors; slow")
    pack = parser.add_argument_group("pack").add_argument
    pack("--groups", type=int, default=3)
    pack("--row", type=int, default=4096, help="tokens per packed row")
    pack("--styles", default="", help="comma-separated; default: all")
    memory = parser.add_argument_group("memory").add_argument
    memory("--tokens", default="2048,4096,8192,16384", help="tokens of the tree")
    memory("--vocabularies", default="2048,150000")
    memory("--most-gb", type=float, default=12.0, help="a side that needs more is shown as -")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
