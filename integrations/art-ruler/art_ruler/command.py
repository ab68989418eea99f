"""The command line of ``art judge``. Knows nothing about how a judge is asked; what is heavy is imported when it runs."""

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
"""MODULE:NAME or FILE.py:NAME; LiteLLM's names with a colon have a slash or a dash before it, or a number behind."""


class WithDefault(TyperGroup):
    """``art judge RUN`` is short for ``art judge run RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            meant = difflib.get_close_matches(args[0], self.commands, n=1)
            if meant and not Path(args[0]).exists():
                ctx.fail(f"there is no command and no folder {args[0]!r}; did you mean {meant[0]!r}?")
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=WithDefault,
    no_args_is_help=True,
    help="Judge stored runs, and judge the judges. `art judge RUN` is short for `art judge run RUN`.",
    epilog="Examples: `art judge runs/mine --judge openai/gpt-6-luna`, `art judge show runs/mine`, `art judge prefer runs/mine "
    "--out mine.jsonl`, `art judge calibrate runs/mine mine.jsonl --judge openai/gpt-6-luna --judge openai/gpt-6.1-terra`",
)
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
JudgeName = Annotated[
    str | None,
    typer.Option(help="LiteLLM model string, or MODULE:NAME or FILE.py:NAME of a judge; default: ART_JUDGE."),
]
Judges = Annotated[list[str], typer.Option("--judge", help="As for `art judge run`; repeatable.")]
Rubric = Annotated[
    str | None, typer.Option(help="How to grade, or a .txt or .md file that says it; default: art's own.")
]
Votes = Annotated[int, typer.Option(min=1, help="Independent answers per group; their mean counts.")]
Seed = Annotated[int, typer.Option(help="Another seed asks again what is in the cache.")]
Budget = Annotated[
    float | None, typer.Option(help="US dollars for this command; once they are spent no more is asked.")
]
Price = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="IN OUT", help="US dollars per million input and output tokens; default: LiteLLM's price."),
]
ApiBase = Annotated[str | None, typer.Option(help="Where the judge is, for a LiteLLM model string.")]
Concurrency = Annotated[int, typer.Option(min=1, help="The most requests at a time.")]
Split = Annotated[str | None, typer.Option(help="train, eval or what else the runs were made for; default: all.")]
Single = Annotated[
    bool, typer.Option("--single", help="Also groups of one run, as evaluations make them: nothing is compared there.")
]
Step = Annotated[int | None, typer.Option(help="Only the runs of this step.")]
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
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many groups.")] = None,
    single: Single = False,
    again: Annotated[bool, typer.Option("--again", help="Also what this judge has judged before.")] = False,
    json_: AsJson = False,
) -> None:
    """Judge the stored runs; scores and explanations are written beside the old ones, never over them.

    Ctrl-C loses nothing: what is judged is kept, and the same command goes on. Exit code 1: some group has no scores.
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
        judged = Judged(ruler, opinions, groups, {it.rollout_id: it.reward for it in store.rollouts()})
    _print(judged, json_)
    if opinions.unscored:
        raise typer.Exit(1)


@app.command("show", epilog="Example: `art judge show runs/mine --step 20 --limit 3`")
def show(
    run: RunDir,
    split: Split = None,
    step: Step = None,
    single: Single = False,
    limit: Annotated[int, typer.Option(min=1, help="The last so many groups.")] = 5,
) -> None:
    """Show every score that the runs of a group were given, by whom, and why."""
    from rich.console import Console

    from art_ruler.report import scores_table

    with _opened(run) as store:
        for group in _groups(store, split, step, 1 if single else 2)[-limit:]:
            Console().print(scores_table(store, group))


@app.command("prefer", epilog="Example: `art judge prefer runs/mine --out mine.jsonl --pairs 30`")
def prefer(
    run: RunDir,
    out: Annotated[Path, typer.Option(help="The file of preferences; what is in it stays.")],
    pairs: Annotated[int, typer.Option(min=1, help="How many pairs to show.")] = 20,
    split: Split = None,
    step: Step = None,
    seed: Annotated[int, typer.Option(help="Of the choice of pairs.")] = 0,
) -> None:
    """Show pairs of runs and ask which is better; every answer is written at once. For `art judge calibrate`."""
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
            help='A .jsonl file of people\'s choices: {"better": ID, "worse": ID}, a tie or a ranking a line.'
        ),
    ],
    judge: Judges,
    rubric: Rubric = None,
    votes: Votes = 1,
    seed: Seed = 0,
    api_base: ApiBase = None,
    price: Price = None,
    concurrency: Concurrency = 16,
    again: Annotated[bool, typer.Option("--again", help="Ask again what is kept, to see what it costs.")] = False,
    json_: AsJson = False,
) -> None:
    """Tell how well each judge agrees with people, and what it costs: the cheapest that agrees well enough will do.

    Scores are kept in the run folder like those of `art judge RUN`, so that a second time costs nothing.
    """
    from art_ruler.calibration import read_preferences
    from art_ruler.report import Calibration
    from art_ruler.stored import groups_with, second_opinions

    wanted = read_preferences(preferences)
    if not wanted:
        raise typer.BadParameter(f"{preferences} holds no preferences; `art judge prefer` asks for them")
    with _opened(run) as store:
        groups = groups_with(store, wanted)
        table = Calibration(wanted, {it.rollout_id: it.reward for it in store.rollouts()})
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
    """Open the run's store; no other process works in the run meanwhile."""
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
            typer.echo("stopped; what is judged is kept, and the same command goes on", err=True)
            raise typer.Exit(130) from None


def _groups(store: Store, split: str | None, step: int | None, least: int) -> list[list[str]]:
    """Return the groups that are meant; BadParameter where there are none."""
    from art_ruler.stored import groups_of

    groups = groups_of(store, split=split, step=step, least=least)
    if groups:
        return groups
    alone = len(groups_of(store, split=split, step=step, least=1))
    splits = ", ".join(sorted({str(it.split) for it in store.rollouts() if it.finished})) or "none"
    why = f"{alone} runs stand alone in their groups: --single" if alone else f"splits with finished runs: {splits}"
    raise typer.BadParameter(f"{store.path.parent} has no groups of finished runs that fit ({why})", param_hint="RUN")


def _ruler(judge: str | None, run: Path, *, rubric: str | None, **settings: Any) -> Ruler:
    from art_ruler.ruler import Ruler

    if rubric is not None and rubric.endswith((".txt", ".md")):
        if not Path(rubric).is_file():
            raise typer.BadParameter(f"there is no file {rubric}", param_hint="--rubric")
        rubric = Path(rubric).read_text(encoding="utf-8")
    if not judge and not os.environ.get("ART_JUDGE"):
        raise typer.BadParameter("say who judges, or set ART_JUDGE", param_hint="--judge")
    return Ruler(_judge(judge), rubric=rubric, cache=run / "judge.sqlite", **settings)


def _judge(name: str | None) -> object:
    """Return the judge that a name means: MODULE:NAME and FILE.py:NAME are objects, other names are LiteLLM's."""
    from art_cli.arguments import load_object

    return load_object(name) if name and OBJECT.fullmatch(name) else name


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
