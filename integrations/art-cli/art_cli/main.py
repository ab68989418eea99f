"""The ``art`` command. Knows the public functions only; plugins add commands of their own."""

from __future__ import annotations

import errno
import functools
import importlib.util
import io
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from art_cli.arguments import load_agent, load_example, load_reward, load_tasks, parse_settings, stand_in_key
from art_cli.new_plugin import Kind, write_plugin
from art_cli.variables import load_env_file, say_refused
from art_core.errors import ArtError, ConfigError, Terminated
from art_core.plugins import Plugins
from art_core.redaction import LEFT_OUT, left_out, printable, without_keys
from art_core.runtime.memory import no_garbage_collection
from art_core.serving import start_early
from art_core.store import Store
from art_core.store.run_folder import new_run_dir, store_file

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train the agent you already have: capture its model calls, score its runs, improve the model with GRPO.",
)
RunDir = Annotated[Path | None, typer.Option(help="Folder of the run; an interrupted run there goes on.")]
AGENT = typer.Argument(
    help="MODULE:NAME or FILE.py:NAME of the agent, or of a function without arguments that makes it."
)
TASKS = typer.Argument(help="A .jsonl file, one task a line, or MODULE:NAME of a list or of a function that makes it.")
Reward = Annotated[str, typer.Option(help="MODULE:NAME of a reward function, or a registered name such as ruler.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of what docs/settings.md lists for it, such as max_tokens=64; repeatable."),
]
TO_DO = "what to do (pip install -e: in the checkout of art)"
ENDED_EARLY, MAY_PASS = 3, 75
"""Exit codes of a training that ended before its last step; 75 is EX_TEMPFAIL of sysexits.h."""
Model = Annotated[str, typer.Option(help="tiny, a model folder, a Hugging Face name; for eval also a run folder.")]


@app.command(epilog="Example: `art demo --steps 25 --seed 1`")
def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: the example's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of tasks and sampling.")] = 0,
    judge: Annotated[
        str | None, typer.Option(help="A LiteLLM model string: train on RULER's scores by this judge.")
    ] = None,
    run_dir: RunDir = None,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 200,
) -> None:
    """Train the email-search agent, a LangGraph agent, on this machine and show what changed."""
    with _starting_engine():
        example = load_example()
    settings: dict[str, Any] = {"steps": steps} if steps else {}
    run_dir = run_dir or new_run_dir("demo")
    with kept(run_dir, f"the same command with --run-dir {run_dir}"):
        result = example.run(seed=seed, judge=judge, run_dir=run_dir, eval_tasks=eval_tasks, **settings)
    show(result)


@app.command(
    epilog="Example: `art train agent.py:build_agent tasks.jsonl --reward agent.py:reward --model tiny --steps 20`; "
    "`art train --resume runs/my-run`"
)
def train(
    context: typer.Context,
    agent: Annotated[str | None, AGENT] = None,
    tasks: Annotated[str | None, TASKS] = None,
    reward: Reward = "ruler",
    model: Model = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    run_dir: RunDir = None,
    eval_tasks: Annotated[str | None, typer.Option(help="Held-out tasks, given like TASKS.")] = None,
    seed: Annotated[int, typer.Option(help="Of tasks and sampling.")] = 0,
    tracker: Annotated[
        list[str] | None, typer.Option(help="Who is told how it goes, such as wandb or langfuse; repeatable.")
    ] = None,
    set_: Settings = None,
    dry_run: Annotated[
        bool, typer.Option(help="Roll out and score one group, say what would be trained, and stop.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A run folder: go on with it as it was started last, in the folder where that was, but for what else is given."
        ),
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Continue a run with another agent, tasks, reward or settings; recorded."),
    ] = False,
) -> None:
    """Train the model inside an agent by GRPO.

    Exit code 0: all steps are done; 1: an error; 3: training ended early, for a reason to look at; 75: it ended early because
    nothing could be scored, which may pass; 130, 143: Ctrl-C, SIGTERM. docs/howto/long-runs.md says what to do after each.
    """
    once = ("dry_run", "resume", "run_dir", "allow_changes")
    given = {name: value for name, value in context.params.items() if name not in once}
    given["set_"] = parse_settings(set_ or [], OF_TRAIN)
    if resume and run_dir:
        raise typer.BadParameter("--resume names the run folder; leave --run-dir out")
    if resume:
        run_dir = resume.absolute()
        given = _as_begun(run_dir, given, {name for name in given if _is_given(context, name)})
    if given["agent"] is None or given["tasks"] is None:
        raise typer.BadParameter("give AGENT and TASKS, or the run folder of `art train --resume`")
    run_dir = run_dir or new_run_dir(given["model"])
    with kept(run_dir, f"art train --resume {run_dir}"):
        result = _train(given, run_dir, dry_run, allow_changes)
    if not dry_run:
        show(result)
        if stopped := result.report["stopped"]:
            raise typer.Exit(MAY_PASS if stopped.get("may_pass") else ENDED_EARLY)


@contextmanager
def _starting_engine(engine: str | None = None) -> Iterator[None]:
    """Load the agent inside: the process of the embedded engine starts meanwhile."""
    stand_in_key()
    say_refused()
    if engine in (None, "embedded"):
        start_early("art_embedded.engine")
    with no_garbage_collection():
        yield


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _command_of(run_dir: Path) -> dict[str, Any]:
    """Return what ``art train`` was ``given`` when it last started a run, and in which ``folder``; ConfigError if it did not."""
    with Store(store_file(run_dir)) as store:
        command = store.meta("command")
    if not command:
        raise ConfigError(
            f"{run_dir} was not started by `art train`, so its agent is unknown; repeat the call that began it, with "
            f"run_dir={str(run_dir)!r}, and it continues"
        )
    if not Path(command["folder"]).is_dir():
        raise ConfigError(
            f"{run_dir} was begun in {command['folder']}, which is gone; pass AGENT and TASKS to `art train`, with "
            f"--run-dir {run_dir}"
        )
    return command


def _as_begun(run_dir: Path, given: Mapping[str, Any], said: Collection[str]) -> dict[str, Any]:
    """Go to where a run was started last; return what it was ``given`` there, but for what is ``said`` now."""
    begun = _command_of(run_dir)
    os.chdir(begun["folder"])
    load_env_file()
    settings = {**begun["given"]["set_"], **given["set_"]}
    if gone := [name for name, value in settings.items() if value == LEFT_OUT]:
        raise ConfigError(
            f"{run_dir} was started with values that give access, which no run folder keeps; give them again: "
            f"art train --resume {run_dir} {' '.join(f'--set {name}=VALUE' for name in gone)}"
        )
    return {**given, **begun["given"], **{name: given[name] for name in said}, "set_": settings}


OF_TRAIN = (
    "reward", "model", "steps", "seed", "run_dir", "dry_run", "eval_tasks", "trackers", "command", "allow_changes",
)  # fmt: skip
"""What ``art train`` hands on that ``--set`` does not take."""


def _train(given: Mapping[str, Any], run_dir: Path, dry_run: bool, allow_changes: bool) -> Any:
    import art_core as art

    to_keep = {**given, "set_": {name: left_out(name, value) for name, value in given["set_"].items()}}
    with _starting_engine(given["set_"].get("engine")):
        agent, tasks, reward = load_agent(given["agent"]), load_tasks(given["tasks"]), load_reward(given["reward"])
    return art.train_sync(
        agent,
        tasks,
        reward=reward,
        model=given["model"],
        steps=given["steps"],
        seed=given["seed"],
        run_dir=run_dir,
        dry_run=dry_run,
        allow_changes=allow_changes,
        eval_tasks=load_tasks(given["eval_tasks"]) if given["eval_tasks"] else None,
        trackers=given["tracker"] or (),
        command={} if dry_run else {"folder": str(Path.cwd()), "given": to_keep},
        **given["set_"],
    )


@app.command(
    "eval",
    epilog="Example: `art eval agent.py:build_agent held_out.jsonl --reward agent.py:reward --model runs/my-run`",
)
def evaluate(
    agent: Annotated[str, AGENT],
    tasks: Annotated[str, TASKS],
    reward: Reward = "ruler",
    model: Model = "tiny",
    temperature: Annotated[float | None, typer.Option(help="Imposed on the agent; default: the agent's own.")] = None,
    run_dir: RunDir = None,
    set_: Settings = None,
) -> None:
    """Run an agent once on every task and report success and mean reward."""
    import art_core as art

    run_dir = run_dir or new_run_dir(f"eval-{Path(model).name}")
    settings: dict[str, Any] = {"model": model, "temperature": temperature, "run_dir": run_dir}
    settings |= parse_settings(set_ or [], {"reward", *settings})
    with _starting_engine(settings.get("engine")):
        loaded = load_agent(agent), load_tasks(tasks)
    with kept(run_dir, f"the same command with --run-dir {run_dir}", "continues"):
        report = art.evaluate_sync(*loaded, reward=load_reward(reward), **settings)
    print(json.dumps({**report.as_json(), "run_dir": str(report.run_dir)}))  # noqa: T201 - the command's result


@app.command(epilog="Example: `art plugins`")
def plugins() -> None:
    """List the installed plugins with their hooks, and what the frameworks that are installed here still need."""
    from art_cli.doctor import frameworks

    installed, known = Table("plugin", "distribution", "version", "hooks"), Table("framework", "plugin", TO_DO)
    found = Plugins().installed()
    for it in found:
        installed.add_row(it.name, it.distribution, it.version, ", ".join(it.hooks))
    for framework in frameworks(found):
        known.add_row(framework.name, framework.state, framework.advice)
    console = Console(markup=False)
    console.print(installed)
    if known.row_count:
        console.print(known)


@app.command("new-plugin", epilog="Example: `art new-plugin crewai --dir plugins`")
def new_plugin(
    name: Annotated[str, typer.Argument(help="What it is for, such as crewai: the distribution becomes art-crewai.")],
    dir_: Annotated[Path, typer.Option("--dir", help="Where its folder is made.")] = Path("."),
    kind: Annotated[Kind, typer.Option(help="What it adds.")] = Kind.agent,
) -> None:
    """Write a plugin to begin with: a distribution that works and whose tests pass."""
    plugin = write_plugin(name, dir_, kind)
    Console(highlight=False, soft_wrap=True).print(plugin.next_steps(), markup=False)


@app.command(epilog="Example: `art doctor`; `art doctor --install vllm`")
def doctor(
    install: Annotated[
        str | None, typer.Option(help="An engine, such as vllm: install what it needs, in an environment of its own.")
    ] = None,
) -> None:
    """Tell what is installed, what is missing for which plugin, and whether a GPU is usable."""
    from art_cli import doctor as examination

    if install is not None:
        say = Console(highlight=False, soft_wrap=True).print
        return examination.install(install, lambda text: say(text, markup=False))
    table = Table("part", Column("state", overflow="fold"), Column(TO_DO, overflow="fold"))
    findings = examination.examine()
    for it in findings:
        table.add_row(it.part, it.state, it.advice)
    variables = Table("variable", "state", Column("what it does", overflow="fold"))
    for it in examination.variables():
        variables.add_row(it.part, it.state, it.advice)
    console = Console(markup=False)  # it would take .[train] for a style
    console.print(table)
    console.print(variables)
    if any(it.broken for it in findings):
        raise typer.Exit(1)


def show(result: Any) -> None:
    """Print what changed, and draw the chart where matplotlib is there."""
    from art_cli.chart import draw
    from art_cli.summary import print_result

    console = Console()
    print_result(result, console)
    there = importlib.util.find_spec("matplotlib") is not None
    text = f"chart: {draw(result.run_dir)}" if there else "no chart: pip install matplotlib"
    run = result.run_dir
    text += f"\nnext: art view {run} (with art-server) shows it in the browser, art audit {run} checks it"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def kept(run_dir: Path, command: str, what: str = "goes on after the last finished step") -> Iterator[None]:
    """Answer Ctrl-C and SIGTERM by saying with which command the run goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        go_on = f"{command} {what}"
        text = go_on if run_dir.exists() else "stopped before anything was recorded"
        Console(stderr=True, soft_wrap=True, highlight=False).print(text)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None


@functools.cache
def command() -> typer.Typer:
    """Return the ``art`` command with the commands of the installed plugins."""
    Plugins().call("register_commands", app=app)
    return app


def main() -> None:
    """Run the command; errors of ours are one message without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # models say halves of surrogate pairs too; stderr does so already
    try:
        load_env_file()  # first: it may say which plugins are left out
        command()()
    except ArtError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] ", end="")
        told = printable(without_keys(str(error)))
        Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(told)
        raise SystemExit(1) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Ours name the file: this is what the output goes to. Python would try to write the rest of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        Console(stderr=True).print("the disk that the output goes to is full; what was done is in the run folder")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
