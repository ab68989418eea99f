"""The server as an ASGI application: the routes that change a run, the workers' WebSocket, and the proxy for model calls.

The read-only routes are in ``read_routes``, the dashboard is in ``pages``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, HTTPException, Path, Query, Request, Response, WebSocket
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse

from art_core import Run, open_run
from art_core.store.values import to_json
from art_server import reading
from art_server.bodies import StrictJson, explain_refusals
from art_server.executor import Workers
from art_server.folders import OneFolder
from art_server.guard import App, Guard, Receive, Scope, Send
from art_server.jobs import Conflict, Jobs
from art_server.messages import NAME, ModelState, Shutdown
from art_server.pages import pages
from art_server.proxy import Proxy
from art_server.read_routes import read_routes
from art_server.requests import JobRequest, JobState, Status, Worker
from art_server.roster import LEASE, TrainingServer
from art_server.wire import group_to_wire

log = logging.getLogger("art_server")

Key = Annotated[
    str, Path(pattern=NAME, description="Chosen by the client; repeating a request with the same key is safe.")
]


@dataclass
class Served:
    """The objects that routes use while the server runs."""

    roster: TrainingServer
    run: Run
    jobs: Jobs
    proxy: Proxy
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.run.run_dir.name


def make_app(
    run_dir: FilePath, settings: Mapping[str, Any], *, token: str | None = None, lease: float = LEASE
) -> FastAPI:
    """Return the application, behind a ``Guard``. When it starts, it opens the run in ``run_dir`` with ``open_run``'s settings.

    ``token`` None admits only this machine. ``lease``: seconds of silence after which a worker loses its episodes.
    """
    roster = TrainingServer(lease=lease)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.failed = None
        async with AsyncExitStack() as stack:
            try:
                run = await stack.enter_async_context(open_run(run_dir, executor=Workers(roster), **settings))
                run.store.set_meta("planned_steps", None)  # clients decide
                proxy = Proxy(run.serving.address)

                def publish() -> None:
                    url = f"/api/runs/{run.run_dir.name}/checkpoints" if run.step else None
                    roster.publish(ModelState(version=run.version, url=url))

                jobs = Jobs(run, publish)
                publish()
                app.state.served = Served(roster, run, jobs, proxy)
                for key in jobs.resume():
                    log.info("resuming job %s", key)
            except Exception as error:
                app.state.failed = error  # raised by serve_forever
                raise
            try:
                yield
            finally:
                await jobs.close()
                await roster.close()
                await proxy.close()

    app = _documented(title="art", lifespan=lifespan)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app.add_middleware(_RolloutCalls)
    app.add_middleware(Guard, token=token)  # added last, so that it runs first
    explain_refusals(app)
    app.include_router(router)
    app.include_router(read_routes(OneFolder(run_dir)))
    app.mount("/", pages())
    return app


def _documented(**settings: Any) -> FastAPI:
    """Return an application with its schema at /openapi.json, and documentation at /docs if fastapi-offline is installed.

    FastAPI's own documentation pages load scripts from other servers.
    """
    try:
        from fastapi_offline import FastAPIOffline
    except ImportError:
        return FastAPI(docs_url=None, redoc_url=None, **settings)
    return FastAPIOffline(redoc_url=None, **settings)


class _RolloutCalls:
    """Passes rollouts' model calls to the proxy, around all other middleware and routes."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/rollouts/"):
            return await scope["app"].state.served.proxy(scope, receive, send)
        await self._app(scope, receive, send)


router = APIRouter(route_class=StrictJson)
"""The routes that need a running server."""
_MISSING: dict[int | str, Any] = {404: {"description": "Not found."}}
_CONFLICT: dict[int | str, Any] = {409: {"description": "The key was used for another request."}}


@router.get("/status")
async def status(request: Request) -> Status:
    """Return the numbers of workers, waiting episodes and unfetched results."""
    served = _served(request)
    return Status(
        active_clients=len(served.roster.active_clients), episodes_queued=served.roster.queued, step=served.run.step,
        results_available=len(served.roster.results_queue) + served.jobs.unfetched, run=served.name,
    )  # fmt: skip


@router.get("/api/workers")
async def workers(request: Request) -> list[Worker]:
    """List the workers."""
    return [Worker(**worker) for worker in _served(request).roster.workers()]


@router.post("/api/workers/{client_id}/shutdown", status_code=202, responses=_MISSING)
async def shutdown(request: Request, client_id: Annotated[str, Path(pattern=NAME)]) -> None:
    """Shut down a worker; its episodes go to other workers."""
    roster = _served(request).roster
    if client_id not in roster.active_clients:
        raise HTTPException(404, f"no worker {client_id} is connected")
    await roster.send_to_client(client_id, Shutdown())


@router.put("/api/jobs/{key}", status_code=202, responses=_CONFLICT)
async def put_job(request: Request, key: Key, job: Annotated[JobRequest, Body()]) -> JobState:
    """Start a job: collect, score or learn. Repeated with the same key, return the job's state."""
    try:
        return await _served(request).jobs.put(key, job)
    except Conflict as error:
        raise HTTPException(409, str(error)) from error


@router.get("/api/jobs/{key}", responses=_MISSING)
async def job(request: Request, key: Key, wait: Annotated[float, Query(ge=0, le=60)] = 0) -> JobState:
    """Return a job's state, when it ends or after ``wait`` seconds."""
    state = await _served(request).jobs.wait(key, wait)
    if state is None:
        raise HTTPException(404, f"no job {key}")
    return state


@router.delete("/api/jobs/{key}", responses=_MISSING)
async def cancel_job(request: Request, key: Key) -> JobState:
    """Stop a running collection; its finished rollouts are kept, and the same key resumes it."""
    state = await _served(request).jobs.cancel(key)
    if state is None:
        raise HTTPException(404, f"no collection {key} is running")
    return state


@router.get("/api/jobs/{key}/groups/{index}", responses=_MISSING)
def group(request: Request, key: Key, index: Annotated[int, Path(ge=0, lt=2**31)]) -> dict[str, Any]:
    """Return a collected group with the ids and logprobs of its calls; ``index`` is the index of its task."""
    collected = _served(request).jobs.group(key, index)
    if collected is None:
        raise HTTPException(404, f"job {key} has no group {index}, or isn't finished")
    return Response(to_json(group_to_wire(collected)), media_type="application/json")  # type: ignore[return-value]


@router.get(
    "/api/runs/{run}/checkpoints/{checkpoint}/files/{file:path}", responses=_MISSING, response_class=FileResponse
)
def checkpoint_file(request: Request, run: str, checkpoint: str, file: str) -> FileResponse:
    """Return a file of a checkpoint, by its name in the checkpoint's list of files."""
    served = _served(request)
    listed = reading.checkpoint(served.run.run_dir, checkpoint) if run == served.name else None
    if listed is None or file not in {entry.name for entry in listed.files}:
        raise HTTPException(404, "no such file; /api/runs/{run}/checkpoints lists the existing ones")
    return FileResponse(served.run.run_dir / "checkpoints" / checkpoint / file, media_type="application/octet-stream")


@router.websocket("/ws/{client_id}")
async def worker_socket(websocket: WebSocket, client_id: Annotated[str, Path(pattern=NAME)]) -> None:
    await _served(websocket).roster.serve_client(client_id, websocket)


def _served(connection: Request | WebSocket) -> Served:
    return connection.app.state.served
