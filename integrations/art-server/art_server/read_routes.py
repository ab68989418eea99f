"""The read-only part of the REST API: run folders over HTTP. Nothing here changes a run. Knows nothing about training."""

# Annotations are read when a route is made, and some name what only exists inside a function: they cannot be text.
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path as Folder
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from art_core.errors import StoreError
from art_server import answers, conversations, reading
from art_server.plain import readable
from art_server.store_view import Wanted
from art_server.token_texts import TokenTexts

LARGEST = 2**31 - 1
Name = Annotated[str, Path(max_length=300)]
Step = Annotated[int | None, Query(ge=0, le=LARGEST, description="Of the rollouts; without it, of all steps.")]
Split = Annotated[str | None, Query(max_length=100, description="`train`, `eval`, ...; without it, all.")]
Text = Annotated[str | None, Query(max_length=300)]
Offset = Annotated[int, Query(ge=0, le=LARGEST)]
Limit = Annotated[int, Query(ge=1, le=500)]
REFUSED: dict[int | str, dict[str, Any]] = {
    404: {"model": answers.Problem, "description": "There is no such thing."},
    409: {"model": answers.Problem, "description": "The run's store cannot be read."},
}


class Reading(APIRoute):
    """Tells in words why a store cannot be read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except StoreError as error:
                return JSONResponse({"detail": readable(str(error))}, status_code=409)

        return handled


def read_routes(folders: Mapping[str, Folder]) -> APIRouter:
    """Return the GET routes over the runs of ``folders``, which maps their names to their folders."""
    router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=Reading)

    def folder_of(run: Name) -> Folder:
        try:
            return folders[run]
        except KeyError:
            text = f"there is no run {readable(run)!r}; /api/runs lists those that there are"
            raise HTTPException(404, text) from None

    @router.get("")
    def list_runs(limit: Limit = 100, offset: Offset = 0) -> answers.Page[answers.RunSummary]:
        """List the runs, those that were started last first."""
        names = list(folders)
        found = {name: folders.get(name) for name in names[offset : offset + limit]}
        items = [reading.run_summary(readable(name), folder) for name, folder in found.items() if folder is not None]
        return answers.Page(total=len(names), limit=limit, offset=offset, items=items)

    @router.get("/{run}", responses=REFUSED)
    def show_run(run: Name, folder: Annotated[Folder, Depends(folder_of)]) -> answers.Run:
        """Show a run's settings, its evaluations and how far it is."""
        return reading.run(readable(run), folder)

    _add_lists(router, folder_of)
    _add_trajectories(router, folder_of)
    _add_checkpoints(router, folder_of)
    return router


def _add_lists(router: APIRouter, folder_of: Callable[..., Folder]) -> None:
    Run = Annotated[Folder, Depends(folder_of)]

    @router.get("/{run}/metrics", responses=REFUSED)
    def list_steps(
        folder: Run,
        after: Annotated[int, Query(ge=-1, le=LARGEST, description="The last step that you have.")] = -1,
        limit: Annotated[int, Query(ge=1, le=2000)] = 1000,
    ) -> answers.Steps:
        """List what the steps measured, in order; a step that was done again as it was done last."""
        return reading.steps(folder, after=after, limit=limit)

    @router.get("/{run}/groups", responses=REFUSED)
    def list_groups(
        folder: Run,
        step: Step = None,
        split: Split = None,
        task_id: Text = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        offset: Offset = 0,
    ) -> answers.Page[answers.RolloutGroup]:
        """List groups, the newest first. Attempts that were lost and made again are members that do not count."""
        return reading.groups(folder, Wanted(split, step, task_id), limit=limit, offset=offset)

    @router.get("/{run}/tasks", responses=REFUSED)
    def list_tasks(
        folder: Run, split: Split = None, limit: Limit = 50, offset: Offset = 0
    ) -> answers.Page[answers.TaskView]:
        """List tasks, those that were run in most different steps first."""
        return reading.tasks(folder, split=split, limit=limit, offset=offset)


def _add_trajectories(router: APIRouter, folder_of: Callable[..., Folder]) -> None:
    Run = Annotated[Folder, Depends(folder_of)]
    texts = TokenTexts()

    @router.get("/{run}/trajectories", responses=REFUSED)
    def list_trajectories(
        folder: Run,
        group: Text = None,
        task_id: Text = None,
        step: Step = None,
        split: Split = None,
        order: Annotated[Literal["newest", "oldest"], Query(description="What comes first.")] = "newest",
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> answers.Page[answers.TrajectorySummary]:
        """List runs of the agent by when they began."""
        wanted = Wanted(split, step, task_id, group)
        return reading.trajectories(folder, wanted, limit=limit, offset=offset, newest_first=order == "newest")

    @router.get("/{run}/trajectories/{rollout_id}", responses=REFUSED)
    def show_trajectory(folder: Run, rollout_id: Name) -> answers.Trajectory:
        """Show a run of the agent: messages, calls, why it got its reward. Every message is there once."""
        return _found(conversations.trajectory(folder, rollout_id), f"rollout {readable(rollout_id)!r}")

    @router.get("/{run}/trajectories/{rollout_id}/calls/{index}/tokens", responses=REFUSED)
    def show_tokens(
        folder: Run,
        rollout_id: Name,
        index: Annotated[int, Path(ge=0, le=LARGEST)],
        prompt: Annotated[int, Query(ge=0, le=4096, description="How many of the prompt's last tokens to show.")] = 0,
        limit: Annotated[int, Query(ge=1, le=8192)] = 4096,
        offset: Offset = 0,
    ) -> answers.Tokens:
        """Show the tokens that a call sampled, with what the policy thought of each."""
        found = conversations.tokens(folder, rollout_id, index, texts=texts, prompt=prompt, limit=limit, offset=offset)
        return _found(found, f"call {index} of rollout {readable(rollout_id)!r}")


def _add_checkpoints(router: APIRouter, folder_of: Callable[..., Folder]) -> None:
    Run = Annotated[Folder, Depends(folder_of)]

    @router.get("/{run}/checkpoints", responses=REFUSED)
    def list_checkpoints(folder: Run, limit: Limit = 50, offset: Offset = 0) -> answers.Page[answers.Checkpoint]:
        """List the checkpoints that are kept, the newest first."""
        found = reading.all_checkpoints(folder)
        return answers.Page(total=len(found), limit=limit, offset=offset, items=found[offset : offset + limit])

    @router.get("/{run}/checkpoints/{checkpoint}", responses=REFUSED)
    def show_checkpoint(folder: Run, checkpoint: Name) -> answers.Checkpoint:
        """Show a checkpoint's files with their sizes and SHA-256."""
        return _found(reading.checkpoint(folder, checkpoint), f"checkpoint {readable(checkpoint)!r}")


def _found(thing: Any, what: str) -> Any:
    if thing is None:
        raise HTTPException(404, f"this run has no {what}")
    return thing
