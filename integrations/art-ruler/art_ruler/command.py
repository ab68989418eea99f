"""The command line of ``art judge``. Heavy imports wait until a command runs."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from art_core.store import Store
    from art_ruler.ruler import Ruler

DEFAULT = "run"
OBJECT = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""MODULE:NAME or FILE.py:NAME. A LiteLLM name with a colon has a slash or a dash before it, or a number after it."""


class WithDefault(TyperGroup):
    """``art judge RUN`` is short for ``art judge run RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            matches = difflib.get_close_matches(args[0], self.commands, n=1)
            if matches and not Path(args[0]).exists():
                ctx.fail(f"no such command or folder: {args[0]!r}; did you mean {matches[0]!r}?")
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=WithDefault,
    no_args_is_help=True,
    help="Judge stored rollouts, and evaluate judges. `art judge RUN` is short for `art judge run RUN`.",
    epilog="Examples: `art judge runs/mine --judge openai/gpt-6-luna`, `art judge show runs/mine`, `art judge prefer runs/mine "
    "--out mine.jsonl`, `art judge calibrate runs/mine mine.jsonl --judge openai/gpt-6-luna --judge openai/gpt-6.1-terra`",
)
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
JudgeName = Annotated[
    str | None,
    typer.Option(help="A LiteLLM model string, or a judge as MODULE:NAME or FILE.py:NAME; default: ART_JUDGE."),
]
Judges = Annotated[list[str], typer.Option("--judge", help="As for `art judge run`; repeatable.")]
Rubric = Annotated[
    str | None, typer.Option(help="Grading instructions, or a .txt or .md file with them; default: built in.")
]
Votes = Annotated[int, typer.Option(min=1, help="Independent answers per group; scores are their mean.")]
Seed = Annotated[int, typer.Option(help="Change it to bypass cached answers.")]
Budget = Annotated[
    float | None, typer.Option(help="US dollars that this command may spend; judging stops when they are spent.")
]
Price = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="IN OUT", help="US dollars per million input and output tokens; default: LiteLLM's price."),
]
ApiBase = Annotated[str | None, typer.Option(help="Address of the judge, for a LiteLLM model string.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests.")]
Split = Annotated[str | None, typer.Option(help="Only rollouts of this split, such as train or eval; default: all.")]
Single = Annotated[
    bool,
    typer.Option(
        "--single", help="Include groups of one rollout, as evaluations produce; nothing is compared in them."
    ),
]
Step = Annotated[int | None, typer.Option(help="Only rollouts of this step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(
    DEFAULT, epilog="Example: `art judge runs/mine --judge openai/gpt-6-luna --step 20 --budget 2 --price 0.1 0.5`"
)
def judge_run(
    run: RunDir,
    judge: JudgeName = None,
    rubric: Rubric = None,
    votes: Votes = 1,
    seed: Seed = 0,
    budget: Budget = None,
    price: Price = None,
    api_base: ApiBase = None,
    concurrency: Concurrency = 16,
    split: Split = None,
    step: Step = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Judge only the first N groups.")] = None,
    single: Single = False,
    again: Annotated[bool, typer.Option("--again", help="Judge groups again that this judge has scored.")] = False,
    json_: AsJson = False,
) -> None:
    """Judge stored rollouts; scores and explanations are added beside the existing ones and never replace them.

    Ctrl-C is safe: finished groups are stored, and the same command resumes. Exit code 1: some groups have no scores.
    """
    from art_ruler.report import Judged
    from art_ruler.stored import second_opinions

    with _opened(run) as store:
        groups = _groups(store, split, step, 1 if single else 2)[:limit]
        ruler = _ruler(
            judge, run, rubric=rubric, votes=votes, seed=seed, budget=budget, price=price, api_base=api_base,
            concurrency=concurrency,
        )  # fmt: skip
        with _progress("judging", len(groups)) as advance:
            opinions = asyncio.run(second_opinions(store, groups, ruler, again=again, progress=advance))
        judged = Judged(ruler, opinions, groups, {rollout.rollout_id: rollout.reward for rollout in store.rollouts()})
    _print(judged, json_)
    if opinions.unscored:
        raise typer.Exit(1)


@app.command("show", epilog="Example: `art judge show runs/mine --step 20 --limit 3`")
def show(
    run: RunDir,
    split: Split = None,
    step: Step = None,
    single: Single = False,
    limit: Annotated[int, typer.Option(min=1, help="Show only the last N groups.")] = 5,
) -> None:
    """Show every score of each rollout in a group, who gave it, and why."""
    from rich.console import Console

    from art_ruler.report import scores_table

    with _opened(run) as store:
        for group in _groups(store, split, step, 1 if single else 2)[-limit:]:
            Console().print(scores_table(store, group))


@app.command("prefer", epilog="Example: `art judge prefer runs/mine --out mine.jsonl --pairs 30`")
def prefer(
    run: RunDir,
    out: Annotated[Path, typer.Option(help="File to which preferences are appended.")],
    pairs: Annotated[int, typer.Option(min=1, help="Number of pairs to ask about.")] = 20,
    split: Split = None,
    step: Step = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing pairs.")] = 0,
) -> None:
    """Show pairs of rollouts and ask you which is better, for `art judge calibrate`. Every answer is saved at once."""
    from art_ruler.report import ask_preferences
    from art_ruler.stored import pairs_of

    with _opened(run) as store:
        ask_preferences(store, pairs_of(_groups(store, split, step, 2), seed), out, pairs)


@app.command(
    "calibrate",
    epilog="Example: `art judge calibrate runs/mine mine.jsonl --judge openai/gpt-6-luna --judge openai/gpt-6.1-terra`",
)
def calibrate(
    run: RunDir,
    preferences: Annotated[
        Path,
        typer.Argument(
            help='A .jsonl file of people\'s preferences, one per line: {"better": ID, "worse": ID}, a tie or a ranking.'
        ),
    ],
    judge: Judges,
    rubric: Rubric = None,
    votes: Votes = 1,
    seed: Seed = 0,
    api_base: ApiBase = None,
    price: Price = None,
    concurrency: Concurrency = 16,
    again: Annotated[
        bool, typer.Option("--again", help="Ignore stored scores and ask again, to measure the cost.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Measure how well each judge agrees with people, and its cost, to find the cheapest judge that agrees well enough.

    Scores are stored in the run folder like those of `art judge RUN`, so repeating the command costs nothing.
    """
    from art_ruler.calibration import read_preferences
    from art_ruler.report import Calibration
    from art_ruler.stored import groups_with, second_opinions

    pairs = read_preferences(preferences)
    if not pairs:
        raise typer.BadParameter(f"{preferences} is empty; collect preferences with `art judge prefer`")
    with _opened(run) as store:
        groups = groups_with(store, pairs)
        table = Calibration(pairs, {rollout.rollout_id: rollout.reward for rollout in store.rollouts()})
        for name in judge:
            ruler = _ruler(
                name,
                run,
                rubric=rubric,
                votes=votes,
                seed=seed,
                price=price,
                api_base=api_base,
                concurrency=concurrency,
            )
            with _progress(name, len(groups)) as advance:
                table.add(ruler, asyncio.run(second_opinions(store, groups, ruler, again=again, progress=advance)))
    _print(table, json_)


def add_to(art: typer.Typer) -> None:
    """Add ``art judge``."""
    art.add_typer(app, name="judge")


@contextlib.contextmanager
def _opened(run: Path) -> Iterator[Store]:
    """Open the run's store, and keep other processes out of the run folder meanwhile."""
    from art_core.errors import ConfigError
    from art_core.store import Store
    from art_core.store.run_folder import claimed, store_file

    try:
        file = store_file(run)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="RUN") from error
    with claimed(run), Store(file) as store:
        try:
            yield store
        except KeyboardInterrupt:
            typer.echo("stopped; finished groups are stored, and the same command resumes", err=True)
            raise typer.Exit(130) from None


def _groups(store: Store, split: str | None, step: int | None, least: int) -> list[list[str]]:
    """Return the groups that the options select; BadParameter if there are none."""
    from art_ruler.stored import groups_of

    groups = groups_of(store, split=split, step=step, least=least)
    if groups:
        return groups
    single = len(groups_of(store, split=split, step=step, least=1))
    splits = ", ".join(sorted({str(rollout.split) for rollout in store.rollouts() if rollout.finished})) or "none"
    why = (
        f"{single} groups of a single rollout: pass --single" if single else f"splits with finished rollouts: {splits}"
    )
    raise typer.BadParameter(
        f"{store.path.parent} has no matching groups of finished rollouts ({why})", param_hint="RUN"
    )


def _ruler(judge: str | None, run: Path, *, rubric: str | None, **settings: Any) -> Ruler:
    from art_cli.arguments import load_object
    from art_ruler.ruler import Ruler

    if rubric is not None and rubric.endswith((".txt", ".md")):
        if not Path(rubric).is_file():
            raise typer.BadParameter(f"no such file: {rubric}", param_hint="--rubric")
        rubric = Path(rubric).read_text(encoding="utf-8")
    if not judge and not os.environ.get("ART_JUDGE"):
        raise typer.BadParameter("no judge; pass --judge or set ART_JUDGE", param_hint="--judge")
    is_object = judge is not None and OBJECT.fullmatch(judge) is not None
    ruler = Ruler(load_object(judge) if is_object else judge, rubric=rubric, cache=run / "judge.sqlite", **settings)
    if is_object:
        ruler.judge.name = judge  # its own name may be that of a function in another file
    return ruler


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _print(result: Any, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        result.print(Console())
