"""The server as an ASGI application: the routes that change a run, the workers' socket, and the door behind them.

Knows nothing about command lines. Reading routes and pages are of ``reading`` and ``pages``.
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

from art_core import open_run
from art_core.errors import ArtError
from art_core.loop.run import Run
from art_core.store.values import to_json
from art_server import reading
from art_server.bodies import StrictJson, say_refusals
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

Key = Annotated[str, Path(pattern=NAME, description="Of the asker's own; the same request may be sent again under it.")]


@dataclass
class Served:
    """What the routes work on, while the server runs."""

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
    """Return the application. The run in ``run_dir``, with the ``settings`` of ``open_run``, is opened when it starts.

    The result has the ``Guard`` around it; ``token`` None lets this machine in alone.
    """
    roster = TrainingServer(lease=lease)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.failed = None
        async with AsyncExitStack() as stack:
            try:
                run = await stack.enter_async_context(open_run(run_dir, executor=Workers(roster), **settings))
            except ArtError as error:
                app.state.failed = error  # for whoever serves it to say
                raise
            run.store.set_meta("planned_steps", None)  # whoever connects decides
            proxy = Proxy(run.serving.address)

            def learnt() -> None:
                url = f"/api/runs/{run.run_dir.name}/checkpoints" if run.step else None
                roster.publish(ModelState(version=run.version, url=url))

            jobs = Jobs(run, learnt)
            learnt()
            app.state.served = Served(roster, run, jobs, proxy)
            for key in jobs.resume():
                log.info("job %s goes on", key)
            try:
                yield
            finally:
                await jobs.close()
                await roster.close()
                await proxy.close()

    app = _documented(title="art", lifespan=lifespan)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app.add_middleware(_Doorway)
    app.add_middleware(Guard, token=token)  # added last, so that it is asked first
    say_refusals(app)
    app.include_router(router)
    app.include_router(read_routes(OneFolder(run_dir)))
    app.mount("/", pages())
    return app


def _documented(**settings: Any) -> FastAPI:
    """Return an application whose schema is at /openapi.json, and at /docs as pages where fastapi-offline is installed.

    FastAPI's own pages load their scripts from elsewhere.
    """
    try:
        from fastapi_offline import FastAPIOffline
    except ImportError:
        return FastAPI(docs_url=None, redoc_url=None, **settings)
    return FastAPIOffline(redoc_url=None, **settings)


class _Doorway:
    """Sends rollouts' calls to the door before anything else looks at them."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/rollouts/"):
            return await scope["app"].state.served.proxy(scope, receive, send)
        await self._app(scope, receive, send)


router = APIRouter(route_class=StrictJson)
"""The routes that need a running server."""
_MISSING: dict[int | str, Any] = {404: {"description": "There is none of this name."}}
_CONFLICT: dict[int | str, Any] = {409: {"description": "The key was used for another request."}}


@router.get("/status")
async def status(request: Request) -> Status:
    """Say how many workers, waiting episodes and unfetched results there are."""
    it = _served(request)
    return Status(
        active_clients=len(it.roster.active_clients), episodes_queued=it.roster.queued, step=it.run.step,
        results_available=len(it.roster.results_queue) + it.jobs.unfetched, run=it.name,
    )  # fmt: skip


@router.get("/api/workers")
async def workers(request: Request) -> list[Worker]:
    """List the workers."""
    return [Worker(**worker) for worker in _served(request).roster.workers()]


@router.post("/api/workers/{client_id}/shutdown", status_code=202, responses=_MISSING)
async def shutdown(request: Request, client_id: Annotated[str, Path(pattern=NAME)]) -> None:
    """Tell a worker to end; what it runs is given to others."""
    roster = _served(request).roster
    if client_id not in roster.active_clients:
        raise HTTPException(404, f"no worker {client_id} is connected")
    await roster.send_to_client(client_id, Shutdown())


@router.put("/api/jobs/{key}", status_code=202, responses=_CONFLICT)
async def put_job(request: Request, key: Key, job: Annotated[JobRequest, Body()]) -> JobState:
    """Collect, score or learn. Sent again under the same key, it says how far the job is."""
    try:
        return await _served(request).jobs.put(key, job)
    except Conflict as error:
        raise HTTPException(409, str(error)) from error


@router.get("/api/jobs/{key}", responses=_MISSING)
async def job(request: Request, key: Key, wait: Annotated[float, Query(ge=0, le=60)] = 0) -> JobState:
    """Say how far a job is, at its end or after ``wait`` seconds."""
    found = await _served(request).jobs.wait(key, wait)
    if found is None:
        raise HTTPException(404, f"there is no job {key}")
    return found


@router.delete("/api/jobs/{key}", responses=_MISSING)
async def give_up_job(request: Request, key: Key) -> JobState:
    """End a collection that is under way; its runs so far stay, and the same key goes on with them."""
    found = await _served(request).jobs.give_up(key)
    if found is None:
        raise HTTPException(404, f"no collection {key} is under way")
    return found


@router.get("/api/jobs/{key}/groups/{place}", responses=_MISSING)
def group(request: Request, key: Key, place: Annotated[int, Path(ge=0, lt=2**31)]) -> dict[str, Any]:
    """Return a collected group with the ids and logprobs of its calls; ``place`` is that of its task."""
    found = _served(request).jobs.group(key, place)
    if found is None:
        raise HTTPException(404, f"job {key} has no group {place}, or has not ended")
    return Response(to_json(group_to_wire(found)), media_type="application/json")  # type: ignore[return-value]


@router.get(
    "/api/runs/{run}/checkpoints/{checkpoint}/files/{file:path}", responses=_MISSING, response_class=FileResponse
)
def checkpoint_file(request: Request, run: str, checkpoint: str, file: str) -> FileResponse:
    """Return a file of a checkpoint, by a name that the checkpoint's list has."""
    it = _served(request)
    found = reading.checkpoint(it.run.run_dir, checkpoint) if run == it.name else None
    if found is None or file not in {entry.name for entry in found.files}:
        raise HTTPException(404, "there is no such file; /api/runs/{run}/checkpoints lists what is kept")
    return FileResponse(it.run.run_dir / "checkpoints" / checkpoint / file, media_type="application/octet-stream")


@router.websocket("/ws/{client_id}")
async def worker_socket(websocket: WebSocket, client_id: Annotated[str, Path(pattern=NAME)]) -> None:
    await _served(websocket).roster.serve_client(client_id, websocket)


def _served(connection: Request | WebSocket) -> Served:
    return connection.app.state.served
