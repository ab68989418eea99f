"""The command ``art audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from art_audit.audit import audit as examine
from art_audit.report import Audit
from art_core.errors import ConfigError
from art_core.plugin_api import plural, printable

PROBLEMS_SHOWN = 20
ROUNDED = 0.5
"""Nats; the rounding of an engine in 16 bits can explain differences of a token's logprob up to this."""
ROUNDING = "an engine in 16 bits rounds logprobs by this much; if the run used one, pass --tolerance {:g}"
KEEP = "; train with keep_checkpoints=None and checkpoint_every=1 to keep all weights"


def audit(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    sample: Annotated[
        int | None, typer.Option(min=1, help="Number of calls to recompute per version of the weights; default: all.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest acceptable difference of a logprob, in nats; default: 0.0001, or 0.001 from 10M parameters. Use 0.5 "
            "for engines in bfloat16.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that exactly the sampled tokens were trained.

    Exit codes: 0: clean; 1: problems; 2: no run to audit. docs/audit.md describes what an audit can't prove.

    Recomputes the stored calls with the weights that sampled them, if these still exist, and checks the store, its digests
    and the records of the steps against each other.
    """
    try:
        result = examine(run, sample=sample, tolerance=tolerance)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error  # exit code 2: nothing was audited
    if json_:
        print(json.dumps(result.as_json()))  # noqa: T201 - the command's result
    else:
        print_audit(result, Console())
    if not result.clean:
        raise typer.Exit(1)


def print_audit(audit: Audit, console: Console) -> None:
    """Print an audit's numbers and problems."""
    table = Table.grid("", "", padding=(0, 2))
    unknown = f", {audit.not_kept} whose weights no longer exist" if audit.not_kept else ""
    drawn = f", {audit.not_drawn} not drawn" if audit.not_drawn else ""
    table.add_row("calls", f"{audit.calls}: {audit.checked} recomputed{unknown}{drawn}")
    elsewhere = f"; {audit.trained_elsewhere} trajectories came from elsewhere" if audit.trained_elsewhere else ""
    table.add_row("trained", f"{audit.trained_tokens} tokens in {plural(audit.updates, 'optimizer step')}{elsewhere}")
    if audit.checked:
        table.add_row(
            "logprobs",
            f"{audit.checked_tokens} tokens: mean |difference| {audit.mismatch_mean:.2g}, largest {audit.mismatch_max:.2g} "
            f"nats (tolerance {audit.tolerance:g})",
        )
        table.add_row("KL(stored || recomputed)", f"k1 {audit.kl_k1:.2g}, k3 {audit.kl_k3:.2g}")
    console.print(table)
    for problem in audit.problems[:PROBLEMS_SHOWN]:
        console.print(printable(str(problem)), markup=False, highlight=False, soft_wrap=True)
    if len(audit.problems) > PROBLEMS_SHOWN:
        console.print(f"and {len(audit.problems) - PROBLEMS_SHOWN} more: --json shows all", highlight=False)
    if not audit.clean:
        verdict = f"NOT CLEAN: {plural(len(audit.problems), 'problem')}"
    elif 0 < audit.calls == audit.checked and not audit.trained_elsewhere:
        verdict = "clean: every call's logprobs match its weights, and exactly the sampled tokens were trained"
    else:
        verdict = f"clean as far as could be checked{KEEP if audit.not_kept else ''}"
    console.print(verdict, highlight=False, soft_wrap=True)
    only_logprobs = all(problem.kind == "logprob" for problem in audit.problems)
    if audit.problems and only_logprobs and audit.mismatch_max <= ROUNDED:
        console.print(ROUNDING.format(ROUNDED), highlight=False, soft_wrap=True)
