"""The command lines of ``art serve`` and ``art worker``. Heavy modules are imported only when they run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

SERVE = (
    "Examples: `art serve --model tiny`; for other machines: `ART_SERVER_TOKEN=... art serve --host 0.0.0.0 --ssl-keyfile "
    "key.pem --ssl-certfile cert.pem`"
)
WORKER = "Example: `art worker ws://127.0.0.1:8000 --id client_1 --agent app.py:graph`"
Token = Annotated[
    str | None, typer.Option(help="Shared secret; set it in ART_SERVER_TOKEN or .env to hide it from process lists.")
]


def serve(
    model: Annotated[str, typer.Option(help="tiny, a model folder or a Hugging Face name.")] = "tiny",
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; an existing run is resumed.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: ART_SERVER_HOST, else 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to listen on; default: ART_SERVER_PORT, else 8000; 0 picks a free one."
        ),
    ] = None,
    token: Token = None,
    engine: Annotated[str, typer.Option(help="embedded, vllm, or a vLLM server's http://HOST:PORT/v1.")] = "embedded",
    learner: Annotated[str, typer.Option(help="auto, torch or unsloth.")] = "auto",
    loss: Annotated[str, typer.Option(help="grpo, dr_grpo, dapo, cispo or gspo.")] = "grpo",
    lease: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which a worker's rollouts go to other workers.")
    ] = 30,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a setting in docs/settings.md, such as group_size=4; repeatable."),
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="TLS key, in PEM.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate, in PEM.")] = None,
) -> None:
    """Serve a policy, its trainer and its run for agents on any machine.

    Workers (`art worker`) run the agents; `art_server.connect(url)` collects, scores and learns from any machine; the
    dashboard is at /. Ctrl-C stops the server; started again with the same --run-dir, it resumes, unfinished collections
    included.
    """
    from art_cli.arguments import parse_settings
    from art_core.store.run_folder import new_run_dir
    from art_server.serve import Plan, serve_forever
    from art_server.settings import load_settings

    env = load_settings()
    settings = parse_settings(set_ or [], {"model", "run_dir", "engine", "learner", "loss"})
    plan = Plan(
        run_dir=run_dir or new_run_dir(model), host=host or env.server_host,
        port=env.server_port if port is None else port,
        token=token or (env.server_token.get_secret_value() if env.server_token else None),
        settings={"model": model, "engine": engine, "learner": learner, "loss": loss, **settings}, lease=lease,
        ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after closing everything
        asyncio.run(serve_forever(plan))


def worker(
    server: Annotated[str, typer.Argument(help="ws://HOST:PORT of art serve; wss:// with TLS.")],
    id_: Annotated[str, typer.Option("--id", help="Name of this worker; must be unique.")],
    agent: Annotated[
        str | None,
        typer.Option(
            help="MODULE:NAME or FILE.py:NAME of the agent, or of a function without parameters that makes one for every rollout."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Concurrent rollouts; default: ART_CLIENT_WORKERS, else 4.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Pool that this worker serves, as in collect(pool=...).")] = "default",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Without --agent: a model that rollouts of an Agent in an Environment may use; repeatable; default: tiny."
        ),
    ] = None,
    token: Token = None,
) -> None:
    """Run an agent for a server, as often as the server requests; the server answers its model calls.

    Ctrl-C once: finish the current rollouts, accept no more. Twice: abort them, and other workers repeat them.
    """
    from art_cli.arguments import load_agent
    from art_server.client import TrainingClient
    from art_server.loops import background_loop
    from art_server.messages import check_name
    from art_server.settings import load_settings

    env = load_settings()
    check_name("--id", id_)
    check_name("--pool", pool)
    _show_log()
    with background_loop("art-agents") as agent_loop:
        client = TrainingClient(
            id_, server, agent=None if agent is None else load_agent(agent), workers=workers or env.client_workers, pool=pool,
            models=model or ("tiny",), token=token or (env.server_token.get_secret_value() if env.server_token else None),
            agent_loop=agent_loop,
        )  # fmt: skip
        stopped = asyncio.run(_work(client))
    if stopped:
        # A sync agent's thread can't be stopped, and would keep the process alive.
        sys.stderr.flush()
        os._exit(130)


async def _work(client: Any) -> bool:
    """Run the worker until it is done; return whether it was aborted."""
    work, leaving = asyncio.create_task(client.run()), []
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if leaving or not client.connected:
            work.cancel()
        else:
            leaving.append(asyncio.create_task(client.leave()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await work
        return False
    except asyncio.CancelledError:
        return True
    finally:
        for task in leaving:
            task.cancel()


def _show_log() -> None:
    import logging

    from rich.logging import RichHandler

    from art_core.plugin_api import Output

    handler = RichHandler(console=Output(stderr=True), show_path=False, markup=False)
    logging.getLogger("art_server").addHandler(handler)
    logging.getLogger("art_server").setLevel(logging.INFO)
