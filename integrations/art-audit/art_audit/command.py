"""``art audit``: the audit of a run folder on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from art_audit.audit import TOLERANCE
from art_audit.audit import audit as examine
from art_audit.report import Audit
from art_core.errors import ConfigError
from art_core.loop.display import plural
from art_core.redaction import printable

PROBLEMS_SHOWN = 20
ROUNDED = 0.5
"""Nats; differences of a token's logprob up to this may be the rounding of an engine in 16 bits."""
ROUNDING = "an engine in 16 bits rounds logprobs by this much; where the run's engine was one: --tolerance {:g}"


def audit(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    sample: Annotated[
        int | None, typer.Option(min=1, help="Recompute so many calls of each version of the weights; default: all.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, help="Largest difference of a logprob, in nats; default 0.0001; give 0.5 for engines in bfloat16."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that what was trained is what was sampled, id for id.

    Exit code 0: clean; 1: something is wrong; 2: there is no run to read. docs/audit.md says what this cannot prove.

    Recomputes the stored calls with the weights that sampled them, where these are kept, and checks the store, its digests
    and the records of the steps against each other.
    """
    try:
        found = examine(run, sample=sample, tolerance=TOLERANCE if tolerance is None else tolerance)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error  # exit code 2: nothing was found wrong, nothing was read
    if json_:
        print(json.dumps(found.as_json()))  # noqa: T201 - the command's result
    else:
        print_audit(found, Console())
    if not found.clean:
        raise typer.Exit(1)


def print_audit(audit: Audit, console: Console) -> None:
    """Print the numbers of an audit, and its problems."""
    table = Table.grid("", "", padding=(0, 2))
    unknown = f", {audit.not_kept} whose weights are not kept" if audit.not_kept else ""
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
        said = f"NOT CLEAN: {plural(len(audit.problems), 'problem')}"
    elif audit.checked == audit.calls:
        said = "clean: every call has the logprobs that its weights give it, and what was trained is what was sampled"
    else:
        said = "clean as far as could be checked; train with keep_checkpoints=None to keep all weights"
    console.print(said, highlight=False, soft_wrap=True)
    if audit.problems and all(it.kind == "logprob" for it in audit.problems) and audit.mismatch_max <= ROUNDED:
        console.print(ROUNDING.format(ROUNDED), highlight=False, soft_wrap=True)
