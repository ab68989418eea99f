"""``python -m fuzz TARGET --seconds 600``: fuzz a target, and keep what was found in its corpus."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fuzz.corpus import TARGETS, Entry, entries, keep
from fuzz.minimize import fewest

LONGEST = 2048
"""Bytes of an input."""
SLOW = 20
"""Seconds for one input, beyond which it is a finding."""
MEMORY = 6000
"""MiB of the process, beyond which the input is a finding."""


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    executions: int
    per_second: int
    edges: int
    features: int
    new: int
    """Inputs that reached what none before them had."""
    found: tuple[Entry, ...]
    inputs: tuple[bytes, ...]


def fuzz(name: str, seconds: int) -> Outcome:
    """Fuzz a target for so many seconds, beginning with its corpus."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, found = Path(folder) / "inputs", Path(folder) / "found"
        inputs.mkdir()
        found.mkdir()
        for place, entry in enumerate(entries(name)):
            (inputs / f"known-{place}").write_bytes(entry.data)
        options = [
            f"-max_total_time={seconds}", f"-max_len={LONGEST}", f"-timeout={SLOW}", f"-rss_limit_mb={MEMORY}",
            "-print_final_stats=1",
            "-seed=1", "-len_control=20", f"-artifact_prefix={found}/", str(inputs),
        ]  # fmt: skip
        command = [sys.executable, "-m", "fuzz.instrumented", name, str(found), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            said = list(_shown(process.stderr or ()))
        files = [it for it in found.iterdir() if it.suffix != ".txt"]
        if process.returncode and not files:
            raise SystemExit(
                f"the fuzzer of {name} failed with exit status {process.returncode}:\n{''.join(said[-40:])}"
            )
        return _outcome(said, [_finding(it) for it in files], [it.read_bytes() for it in inputs.iterdir()])


def _shown(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        if (
            line.startswith(("FOUND", "==", "ALARM", "Timeout (", "Thread", "Current thread", "  File"))
            or "pulse" in line
        ):
            print(line, end="", flush=True)
        yield line


def _finding(file: Path) -> Entry:
    told = file.with_suffix(".txt")
    return Entry(file.read_bytes(), told.read_text().splitlines()[0] if told.exists() else file.name.partition("-")[0])


def _outcome(said: list[str], found: list[Entry], inputs: list[bytes]) -> Outcome:
    text = "".join(said)

    def last(pattern: str) -> int:
        return int((re.findall(pattern, text) or ["0"])[-1])

    return Outcome(
        last(r"stat::number_of_executed_units: +(\d+)") or last(r"^#(\d+)"),
        last(r"stat::average_exec_per_sec: +(\d+)"),
        last(r"cov: (\d+)"), last(r"ft: (\d+)"), last(r"stat::new_units_added: +(\d+)"), tuple(found), tuple(inputs),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--keep", action="store_true", help="write what reached new code, and what was found, to the corpus"
    )
    chosen = parser.parse_args()
    outcome = fuzz(chosen.target, chosen.seconds)
    print(
        f"{chosen.target}: {chosen.seconds} s, {outcome.executions} executions ({outcome.per_second}/s), {outcome.edges} edges, "
        f"{outcome.features} features, {outcome.new} new inputs, {len(outcome.found)} findings"
    )
    for entry in outcome.found:
        print(f"  {entry.found}: {entry.data!r}")
    if chosen.keep:
        before = entries(chosen.target)
        few = fewest(chosen.target, [it.data for it in before] + list(outcome.inputs))
        keep(chosen.target, [*(it for it in before if it.found), *outcome.found, *map(Entry, few)])
        print(f"the corpus holds {len(entries(chosen.target))} inputs now")
    sys.exit(bool(outcome.found))


if __name__ == "__main__":
    main()
