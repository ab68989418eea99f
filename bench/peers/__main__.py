"""Print art_core's figures beside those of its peers; see docs/benchmarks.md.

python -m bench.peers setup              make .bench, the environment with the peers (once, some minutes)
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
    warnings.filterwarnings("ignore")  # the peers' own, of which there are many
    for part in options.only or PARTS:
        run_part(part, options)


def run_part(part: str, options: argparse.Namespace) -> None:
    """Import a part only when it is run: the first import takes the longest."""
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
    add("--only", action="append", choices=PARTS, help="this part; may be given several times")
    add("--size", choices=("toy", "tiny", "30m"), default="tiny", help="of the random model: tiny is 3.7M parameters")
    add("--group-size", type=int, default=8)
    add("--max-turns", type=int, default=10)
    add("--threads", type=int, default=1, help="of torch; on shared cores one is steadier")
    add("--repeats", type=int, default=3)
    add(
        "--cpu-time", action="store_true", help="seconds of processor time of a step, where other work shares the cores"
    )
    add("--skip", default="", help="comma separated words: sides whose names hold one are left out, such as ART,naive")
    step = parser.add_argument_group("step").add_argument
    step("--style", default="text", help="text, tools, +fork, +subagent joined by +")
    step("--vocabulary", type=int, default=2048)
    step("--micro-batch", type=int, default=4, help="rows that are padded together, also in memory")
    step("--float64", action="store_true", help="for the gradients' error; slow")
    pack = parser.add_argument_group("pack").add_argument
    pack("--groups", type=int, default=3)
    pack("--row", type=int, default=4096, help="tokens of a packed row")
    pack("--styles", default="", help="comma separated; default: all")
    memory = parser.add_argument_group("memory").add_argument
    memory("--tokens", default="2048,4096,8192,16384", help="of the tree")
    memory("--vocabularies", default="2048,150000")
    memory("--most-gb", type=float, default=12.0, help="a side that needs more is shown as -")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
