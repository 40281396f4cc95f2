"""Routes that list and return the recorded screen episodes of a run."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
from typing import Annotated

from fastapi import FastAPI, Path, Query
from fastapi.responses import Response

from palaestra.experience.trajectory import Outcome
from palaestra.runs.play.episode import picture_type
from palaestra.runs.reader import RunReader
from palaestra.runs.service.play_routes import describe_picture
from palaestra.runs.service.schemas import NOT_FOUND, AttemptNumber, FilterText, RunId, new_router
from palaestra.runs.trajectories import (
    EpisodeKind,
    TrajectoryDocument,
    TrajectorySummary,
    list_trajectories,
    read_picture,
    read_trajectory,
)
from palaestra.runs.wire import JsonObject, to_json

_File = Annotated[str, Path(max_length=500, description="`file` of a summary.")]


def add_trajectory_routes(app: FastAPI, reader: RunReader) -> None:
    """Add the routes to the application."""
    router = new_router("trajectories")

    @router.get("/runs/{run_id}/trajectories", responses=NOT_FOUND, response_model=list[TrajectorySummary])
    def trajectories(
        run_id: RunId,
        kind: EpisodeKind | None = None,
        evaluation: FilterText = None,
        attempt: AttemptNumber = None,
        task: FilterText = None,
        outcome: Outcome | None = None,
        before: Annotated[str | None, Query(max_length=500)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 200,
    ) -> list[JsonObject]:
        """Recorded screen episodes that match all filters, newest first, from training and from `palaestra eval`.

        For the next page, `before` is the `file` of the last one. A resumed run repeats the episodes after its
        checkpoint; unless `attempt` is given, only the last ones count.
        """
        summaries = list_trajectories(
            reader.paths(run_id),
            kind=kind,
            evaluation=evaluation,
            attempt=attempt,
            task=task,
            outcome=outcome,
            before=before,
            limit=limit,
        )
        return [to_json(summary) for summary in summaries]

    # Before the route of one trajectory, whose path would include the picture.
    @router.get(
        "/runs/{run_id}/trajectories/{file:path}/pictures/{sha256}",
        response_class=Response,
        responses=describe_picture(),
    )
    def trajectory_picture(
        run_id: RunId, file: _File, sha256: Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
    ) -> Response:
        """A screen of an episode, as it was taken."""
        data = read_picture(reader.paths(run_id), file, sha256)
        return Response(data, media_type=picture_type(data))

    @router.get("/runs/{run_id}/trajectories/{file:path}", responses=NOT_FOUND, response_model=TrajectoryDocument)
    def trajectory(run_id: RunId, file: _File) -> JsonObject:
        """One episode with its turns: screens, tokens, log-probabilities, replies, actions and rewards."""
        return to_json(read_trajectory(reader.paths(run_id), file))

    app.include_router(router)
