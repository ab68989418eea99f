"""The ``art`` command. It calls public functions only; plugins add their own commands."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from art_cli.arguments import (
    Commands,
    load_agent,
    load_example,
    load_object,
    load_reward,
    load_tasks,
    parse_settings,
    stand_in_key,
    with_prompts,
)  # fmt: skip
from art_cli.catalogue import TO_DO
from art_cli.init import init
from art_cli.new_plugin import Kind, write_plugin
from art_cli.resuming import quoted, resume_hint, resumed, same_command
from art_cli.variables import load_env_file, warn_refused
from art_core.errors import ArtError
from art_core.plugin_api import Plugins, left_out, memory, plural, printable, start_early, without_keys
from art_core.store.run_folder import new_run_dir

_debug = False
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error, too.")] = False,
) -> None:
    """Train the agent you already have: capture its model calls, score its rollouts, improve the model with GRPO."""
    global _debug
    _debug = debug


RunDir = Annotated[Path | None, typer.Option(help="Run folder. An interrupted run in it is resumed.")]
AGENT = typer.Argument(
    help="MODULE:NAME or FILE.py:NAME of the agent, or of a function without parameters that makes one for every rollout."
)
TASKS = typer.Argument(
    help="A .jsonl file with one task per line, or MODULE:NAME of a list or of a function that returns one."
)
Reward = Annotated[str, typer.Option(help="A reward function as MODULE:NAME, or a registered name such as ruler.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of docs/settings.md as NAME=VALUE, such as max_tokens=64; repeatable."),
]
Prompts = Annotated[str | None, typer.Option(help="The file of `art optimize`: its texts replace the agent's own.")]
ToOutput = Annotated[
    str | None, typer.Option(help="MODULE:NAME of a function of the agent's output; the reward sees its result.")
]
ENDED_EARLY, MAY_PASS = 3, 75
"""Exit codes if training ends before its last step; 75 is EX_TEMPFAIL in sysexits.h."""
Model = Annotated[str, typer.Option(help="tiny, a model folder or a Hugging Face name.")]


@app.command(epilog="Example: `art demo --steps 25 --seed 1`")
def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: the example's own number.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of sampling.")] = 0,
    judge: Annotated[
        str | None, typer.Option(help="A LiteLLM model string: train on this judge's RULER scores.")
    ] = None,
    run_dir: RunDir = None,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks to evaluate before and after training.")] = 200,
) -> None:
    """Train the email-search agent (LangGraph) on this machine and show what changed."""
    from art_cli.summary import show

    with _starting_engine():
        example = load_example()
    settings: dict[str, Any] = {"steps": steps} if steps else {}
    run_dir = run_dir or new_run_dir("demo")
    with resume_hint(run_dir, same_command(run_dir)):
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
    eval_tasks: Annotated[str | None, typer.Option(help="Held-out tasks, in the same form as TASKS.")] = None,
    to_output: ToOutput = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of sampling.")] = 0,
    tracker: Annotated[
        list[str] | None, typer.Option(help="Where to log metrics, such as wandb or langfuse; repeatable.")
    ] = None,
    prompts: Prompts = None,
    set_: Settings = None,
    dry_run: Annotated[
        bool, typer.Option(help="Roll out and score one group, print what would be trained, and stop.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume this run folder with the arguments and working directory of its last start; options passed here "
            "override them."
        ),
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Continue a run with a changed agent, tasks, reward or settings; recorded in the run.",
        ),
    ] = False,
) -> None:
    """Train the model inside an agent with GRPO.

    Exit codes: 0: all steps are done; 1: error; 3: training ended early for a reason to look into; 75: it ended early because
    nothing could be scored, which may be temporary; 130: Ctrl-C; 143: SIGTERM. See docs/howto/long-runs.md.
    """
    once = ("dry_run", "resume", "run_dir", "allow_changes")
    arguments = {name: value for name, value in context.params.items() if name not in once}
    arguments["set_"] = parse_settings(set_ or [], (*NOT_SETTABLE, "to_output"))
    if resume and run_dir:
        raise typer.BadParameter("--resume already names the run folder; drop --run-dir")
    if resume:
        run_dir = resume.absolute()
        arguments = resumed(run_dir, arguments, {name for name in arguments if _on_command_line(context, name)})
    if arguments["agent"] is None or arguments["tasks"] is None:
        raise typer.BadParameter("pass AGENT and TASKS, or resume a run with `art train --resume RUN_DIR`")
    run_dir = run_dir or new_run_dir(arguments["model"])
    # A dry run stores no command that --resume could start again.
    again = ("the same command", "repeats the dry run") if dry_run else (f"art train --resume {quoted(run_dir)}",)
    with resume_hint(run_dir, *again):
        result = _train(arguments, run_dir, dry_run, allow_changes)
    if dry_run:
        from art_cli.dry_run import show as show_dry_run

        show_dry_run(result, arguments["steps"])
    else:
        from art_cli.summary import show

        show(result)
        if stopped := result.report["stopped"]:
            raise typer.Exit(MAY_PASS if stopped.get("may_pass") else ENDED_EARLY)


@contextmanager
def _starting_engine(engine: str | None = None) -> Iterator[None]:
    """Start the embedded engine's process in the background while the block loads the agent."""
    stand_in_key()
    warn_refused()
    if engine in (None, "embedded"):
        start_early("art_embedded.engine")
    with memory.no_garbage_collection():
        yield


def _on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


NOT_SETTABLE = (
    "reward", "model", "steps", "seed", "run_dir", "dry_run", "eval_tasks", "trackers", "command", "allow_changes", "plugins",
)  # fmt: skip
"""Keywords of ``train`` that ``--set`` refuses, because ``art train`` passes them itself."""


def _train(arguments: Mapping[str, Any], run_dir: Path, dry_run: bool, allow_changes: bool) -> Any:
    import art_core as art

    settings = arguments["set_"]
    stored = {**arguments, "set_": {name: left_out(name, value) for name, value in settings.items()}}
    with _starting_engine(settings.get("engine")):
        loaded = load_agent(arguments["agent"]), load_tasks(arguments["tasks"])
        reward = load_reward(arguments["reward"])
    return art.train_sync(
        *loaded,
        reward=reward,
        model=arguments["model"],
        steps=arguments["steps"],
        seed=arguments["seed"],
        run_dir=run_dir,
        dry_run=dry_run,
        allow_changes=allow_changes,
        eval_tasks=load_tasks(arguments["eval_tasks"]) if arguments["eval_tasks"] else None,
        to_output=load_object(arguments["to_output"]) if arguments["to_output"] else None,
        trackers=arguments["tracker"] or (),
        plugins=with_prompts(arguments["prompts"]),
        command={} if dry_run else {"folder": str(Path.cwd()), "given": stored},
        **settings,
    )


@app.command(
    "eval",
    epilog="Examples: `art eval agent.py:build_agent held_out.jsonl --reward agent.py:reward --model runs/my-run`; "
    "`art eval agent.py:build_agent held_out.jsonl --reward agent.py:reward --live --run-dir runs/live`",
)
def evaluate(
    agent: Annotated[str, AGENT],
    tasks: Annotated[str, TASKS],
    reward: Reward = "ruler",
    model: Annotated[str, typer.Option(help="tiny, a model folder, a run folder or a Hugging Face name.")] = "tiny",
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Run the agent as it is, with its own provider and keys, and record its calls as text."
        ),
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Overrides the agent's temperature.")] = None,
    to_output: ToOutput = None,
    run_dir: RunDir = None,
    prompts: Prompts = None,
    set_: Settings = None,
) -> None:
    """Run an agent once on every task and report its success rate and mean reward."""
    import art_core as art

    if live and model != "tiny":
        raise typer.BadParameter("--live runs the agent with its own models; drop --model")
    model = "live" if live else model
    run_dir = run_dir or new_run_dir(f"eval-{Path(model).name}")
    settings: dict[str, Any] = {"model": model, "temperature": temperature, "run_dir": run_dir}
    settings |= parse_settings(set_ or [], {"reward", "plugins", "to_output", *settings})
    with nullcontext() if live else _starting_engine(settings.get("engine")):
        loaded = (load_object if live else load_agent)(agent), load_tasks(tasks)
    settings |= {"to_output": load_object(to_output)} if to_output else {}
    with resume_hint(run_dir, same_command(run_dir), "resumes it"):
        report = art.evaluate_sync(*loaded, reward=load_reward(reward), plugins=with_prompts(prompts), **settings)
    from art_cli.summary import failures

    failed, error = failures(report.trajectories)
    if not sys.stdout.isatty():  # the same is on stderr for people
        result = {**report.as_json(), "failed": failed, "error": error, "run_dir": str(report.run_dir)}
        print(json.dumps(result))  # noqa: T201 - the command's result
    after = f"{failed} of {plural(len(report.trajectories), 'rollout')} failed, most often: {error}\n" if failed else ""
    after += (
        f"next: art compare OTHER_RUN {quoted(report.run_dir)} compares it with another evaluation of these tasks, "
        f"art view {quoted(report.run_dir)} (with art-server) shows every rollout"
    )
    Console(stderr=True).print(after, markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: `art plugins`")
def plugins() -> None:
    """List the installed plugins with their hooks, and the plugins that installed frameworks still need."""
    from art_cli.doctor import frameworks

    plugin_table, framework_table = (
        Table("plugin", "distribution", "version", "hooks"),
        Table("framework", "plugin", TO_DO),
    )
    installed = Plugins().installed()
    for plugin in installed:
        plugin_table.add_row(plugin.name, plugin.distribution, plugin.version, ", ".join(plugin.hooks))
    for framework in frameworks({plugin.distribution for plugin in installed}):
        framework_table.add_row(framework.name, framework.state, framework.advice)
    console = Console(markup=False)
    console.print(plugin_table)
    if framework_table.row_count:
        console.print(framework_table)


@app.command("new-plugin", epilog="Example: `art new-plugin crewai --dir plugins`")
def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the plugin: crewai creates the distribution art-crewai.")],
    dir_: Annotated[Path, typer.Option("--dir", help="Folder in which to create the plugin's folder.")] = Path("."),
    kind: Annotated[Kind, typer.Option(help="What the plugin adds.")] = Kind.agent,
) -> None:
    """Write a starter plugin: a distribution that works and whose tests pass."""
    plugin = write_plugin(name, dir_, kind)
    Console(highlight=False, soft_wrap=True).print(plugin.next_steps(), markup=False)


app.command(epilog="Examples: `art init`; `art init app.py:agent`")(init)


@app.command(epilog="Example: `art doctor`; `art doctor --install smollm2`; `art doctor --agent app.py:agent`")
def doctor(
    install: Annotated[
        str | None, typer.Option(help="The engine vllm, the model smollm2 or the tasks bfcl; needs the network.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Run this agent once with made-up answers that call no tool, and show where its model calls go."
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(help="The task for --agent: parsed as JSON if possible, else text.")
    ] = "Say hello.",
    tools: Annotated[
        bool,
        typer.Option(
            "--tools",
            help="Call each tool that the agent offers once. Tools then really run, with made-up arguments: one that deletes "
            "or sends something does so.",
        ),
    ] = False,
) -> None:
    """Show what is installed, what is missing and for which plugin, and whether a GPU is usable."""
    from art_cli import doctor as examination

    if agent is not None:
        from art_cli.agent_calls import show_calls

        return show_calls(agent, task, tools)
    if install is not None:
        say = Console(highlight=False, soft_wrap=True).print
        return examination.install(install, lambda text: say(text, markup=False))
    if not examination.report(examination.examine(), examination.variables(), Console(markup=False)):
        raise typer.Exit(1)


@functools.cache
def command() -> typer.Typer:
    """Return the ``art`` command with the commands of the installed plugins."""
    Plugins().call("register_commands", app=app)
    return app


def main() -> None:
    """Run the command; an ArtError, or an OSError about a file, prints one message without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Models emit lone surrogates too; stderr escapes them by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        load_env_file()  # before the plugins are loaded: it may disable some
        command()()
    except ArtError as error:
        _exit_with(error, str(error))
    except OSError as error:
        if error.filename is not None:
            advice = "check that path and its permissions; the option --debug prints the traceback"
            _exit_with(error, f"{error.filename}: {error.strerror}; {advice}")
        if error.errno != errno.ENOSPC:
            raise
        # A full disk under the run folder raises an ArtError, so this is stdout's. At exit Python would flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        Console(stderr=True).print(
            "the disk that stdout is written to is full; the run folder has everything done so far"
        )
        raise SystemExit(1) from error


def _exit_with(error: Exception, message: str) -> NoReturn:
    if _debug:
        sys.stderr.write(without_keys("".join(traceback.format_exception(error))))
    Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] ", end="")
    text = printable(without_keys(message))
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text)
    raise SystemExit(1) from error


if __name__ == "__main__":
    main()
