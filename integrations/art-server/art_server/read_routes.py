"""The read-only routes: run folders over HTTP. Nothing here changes a run."""

# No "from __future__ import annotations": FastAPI evaluates annotations, and some use names that exist only inside a function.
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path as Folder
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from art_core.errors import StoreError
from art_server import answers, conversations, decision, paired, reading, responses, two_runs
from art_server.plain import readable
from art_server.rounds import rounds_of
from art_server.search import Indexes
from art_server.store_view import Order, Outcome, RolloutFilter
from art_server.token_texts import TokenTexts

LARGEST = 2**31 - 1
Name = Annotated[str, Path(max_length=300)]
Step = Annotated[int | None, Query(ge=0, le=LARGEST, description="Step of the rollouts; default: all steps.")]
Split = Annotated[str | None, Query(max_length=100, description="`train`, `eval`, ...; default: all splits.")]
Text = Annotated[str | None, Query(max_length=300)]
Offset = Annotated[int, Query(ge=0, le=LARGEST)]
Limit = Annotated[int, Query(ge=1, le=500)]
REFUSED: dict[int | str, dict[str, Any]] = {
    404: {"model": responses.Problem, "description": "Not found."},
    409: {"model": responses.Problem, "description": "The run's store can't be read."},
}


class ReadRoute(APIRoute):
    """A route that returns 409 with a message if a store can't be read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except StoreError as error:
                return JSONResponse({"detail": readable(str(error))}, status_code=409)

        return handled


def read_routes(folders: Mapping[str, Folder]) -> APIRouter:
    """Return the GET routes for the runs in ``folders``, a mapping of run names to run folders."""
    router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=ReadRoute)

    def folder_of(run: Name) -> Folder:
        try:
            return folders[run]
        except KeyError:
            raise HTTPException(404, f"no run {readable(run)!r}; /api/runs lists the existing ones") from None

    @router.get("")
    def list_runs(limit: Limit = 100, offset: Offset = 0) -> responses.Runs:
        """List the runs, the most recently started first."""
        found = list(folders.items())
        items = [reading.run_summary(readable(name), folder) for name, folder in found[offset : offset + limit]]
        rounds = rounds_of(folders)
        return responses.Runs(total=len(found), limit=limit, offset=offset, items=items, rounds=rounds)

    @router.get("/{run}/compare/{other}", responses=REFUSED)
    def compare_runs(run: Name, other: Name, folder: Annotated[Folder, Depends(folder_of)]) -> answers.RunsComparison:
        """Compare another run with this one, on the held-out tasks that both were last evaluated on."""
        return two_runs.between(folder, folder_of(other))

    @router.get("/{run}/compare/{other}/measures", responses=REFUSED)
    def measure_runs(run: Name, other: Name, folder: Annotated[Folder, Depends(folder_of)]) -> list[answers.Measured]:
        """Show what these tasks took both runs, at the first temperature: cost, seconds, calls and tokens."""
        return two_runs.measures(folder, folder_of(other))

    @router.get("/{run}", responses=REFUSED)
    def show_run(run: Name, folder: Annotated[Folder, Depends(folder_of)]) -> responses.Run:
        """Show a run's settings, evaluations and progress."""
        return reading.run(readable(run), folder)

    @router.get("/{run}/decision", responses=REFUSED)
    def show_decision(run: Name, folder: Annotated[Folder, Depends(folder_of)]) -> answers.Decision:
        """Show whether held-out tasks are solved better, what fails, what it cost, and what to do next."""
        return decision.decision(readable(run), folder)

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
    ) -> responses.Steps:
        """List the metrics of the steps, in order; for a repeated step, those of its last time."""
        return reading.steps(folder, after=after, limit=limit)

    @router.get("/{run}/groups", responses=REFUSED)
    def list_groups(
        folder: Run,
        step: Step = None,
        split: Split = None,
        task_id: Text = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        offset: Offset = 0,
    ) -> responses.Page[responses.RolloutGroup]:
        """List groups, newest first. Lost attempts that were repeated are members, but don't count."""
        return reading.groups(folder, RolloutFilter(split, step, task_id), limit=limit, offset=offset)

    @router.get("/{run}/tasks", responses=REFUSED)
    def list_tasks(
        folder: Run, split: Split = None, limit: Limit = 50, offset: Offset = 0
    ) -> responses.Page[responses.TaskView]:
        """List tasks, those with rollouts in the most steps first."""
        return reading.tasks(folder, split=split, limit=limit, offset=offset)

    @router.get("/{run}/changed-tasks", responses=REFUSED)
    def list_changed_tasks(folder: Run, limit: Limit = 200, offset: Offset = 0) -> responses.Page[answers.ChangedTask]:
        """List the held-out tasks whose result changed, the greatest losses first."""
        return paired.changed_tasks(folder, limit=limit, offset=offset)


def _add_trajectories(router: APIRouter, folder_of: Callable[..., Folder]) -> None:
    Run = Annotated[Folder, Depends(folder_of)]
    texts, indexes = TokenTexts(), Indexes()

    @router.get("/{run}/trajectories", responses=REFUSED)
    def list_trajectories(
        folder: Run,
        group: Text = None,
        task_id: Text = None,
        step: Step = None,
        split: Split = None,
        outcome: Annotated[Outcome | None, Query(description="How it ended; default: all.")] = None,
        at_least: Annotated[float | None, Query(description="Lowest reward.")] = None,
        at_most: Annotated[float | None, Query(description="Highest reward.")] = None,
        agent: Annotated[str | None, Query(max_length=300, description="An agent that made one of its calls.")] = None,
        search: Annotated[str | None, Query(max_length=300, description="Words that its texts have.")] = None,
        order: Annotated[
            Order,
            Query(description="Which come first; `lowest` and `highest` reward; `changed` most since before training."),
        ] = "newest",
        limit: Limit = 50,
        offset: Offset = 0,
    ) -> responses.Page[responses.TrajectorySummary]:
        """List rollouts."""
        rollouts = RolloutFilter(split, step, task_id, group, outcome, at_least, at_most, agent)
        return reading.trajectories(
            folder, rollouts, limit=limit, offset=offset, order=order, search=search, indexes=indexes,
            changes=paired.changes(folder) if order == "changed" else None,
        )  # fmt: skip

    @router.get("/{run}/trajectories/{rollout_id}", responses=REFUSED)
    def show_trajectory(folder: Run, rollout_id: Name) -> responses.Trajectory:
        """Show a rollout: its messages (each once), its calls, and the reasons for its reward."""
        return _or_404(conversations.trajectory(folder, rollout_id), f"rollout {readable(rollout_id)!r}")

    @router.get("/{run}/trajectories/{rollout_id}/calls/{index}/tokens", responses=REFUSED)
    def show_tokens(
        folder: Run,
        rollout_id: Name,
        index: Annotated[int, Path(ge=0, le=LARGEST)],
        prompt: Annotated[int, Query(ge=0, le=4096, description="Number of the prompt's last tokens to show.")] = 0,
        limit: Annotated[int, Query(ge=1, le=8192)] = 4096,
        offset: Offset = 0,
    ) -> responses.Tokens:
        """Show the tokens that a call sampled, with their logprobs."""
        tokens = conversations.tokens(folder, rollout_id, index, texts=texts, prompt=prompt, limit=limit, offset=offset)
        return _or_404(tokens, f"call {index} of rollout {readable(rollout_id)!r}")


def _add_checkpoints(router: APIRouter, folder_of: Callable[..., Folder]) -> None:
    Run = Annotated[Folder, Depends(folder_of)]

    @router.get("/{run}/checkpoints", responses=REFUSED)
    def list_checkpoints(folder: Run, limit: Limit = 50, offset: Offset = 0) -> responses.Page[responses.Checkpoint]:
        """List the existing checkpoints, newest first."""
        checkpoints = reading.all_checkpoints(folder)
        page = checkpoints[offset : offset + limit]
        return responses.Page(total=len(checkpoints), limit=limit, offset=offset, items=page)

    @router.get("/{run}/checkpoints/{checkpoint}", responses=REFUSED)
    def show_checkpoint(folder: Run, checkpoint: Name) -> responses.Checkpoint:
        """Show a checkpoint's files with their sizes and SHA-256."""
        return _or_404(reading.checkpoint(folder, checkpoint), f"checkpoint {readable(checkpoint)!r}")


def _or_404(answer: Any, what: str) -> Any:
    if answer is None:
        raise HTTPException(404, f"this run has no {what}")
    return answer
