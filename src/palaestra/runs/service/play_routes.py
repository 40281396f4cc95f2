"""Routes of plays and of recorded episodes."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import asyncio
import logging
from typing import Annotated

from fastapi import FastAPI, Path, Query, WebSocket
from fastapi.responses import FileResponse, Response

from palaestra.errors import PalaestraError, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.play.episode import (
    delete_episode,
    export_video,
    list_episodes,
    open_episode,
    picture_type,
)
from palaestra.runs.play.plays import Play, Plays, Subscription
from palaestra.runs.play.protocol import NO_SUCH_PLAY, LoadPolicy, decode_control
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import EpisodeRecord, EpisodeStep, PlayNotice, PlayRecord, pack_report
from palaestra.runs.service.schemas import NOT_FOUND, FilterText, RequestBody, StoredText, describe_errors, new_router
from palaestra.runs.wire import JsonObject, to_json

_log = logging.getLogger(__name__)
_MAX_STEPS = 10_000
_UNSUPPORTED_DATA = 1003
"""Code with which a WebSocket is closed after a text message."""
_PlayId = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=90)]
_EpisodeId = Annotated[
    str, Path(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=90, description="An episode id, or a unique prefix of one.")
]
_PICTURE = {
    "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ("image/jpeg", "image/png")}
}
_VIDEO = {"content": {"video/webm": {"schema": {"type": "string", "format": "binary"}}}}


class StartPlayBody(RequestBody):
    """A play to start."""

    spec: PlaySpec


class ActivateBody(RequestBody):
    """A policy to load into a play."""

    checkpoint: Annotated[StoredText, Path(min_length=1, max_length=4096)]
    """Id of a checkpoint, a path on the service's machine, or `random`."""
    deterministic: bool = True
    consent: Annotated[str, Path(max_length=64)] = ""
    """The digest that agrees to a load that executes foreign code."""


def add_play_routes(app: FastAPI, plays: Plays, home: Home) -> None:
    """Add the routes to the application."""
    _add_play_routes(app, plays)
    _add_episode_routes(app, home)


def _add_play_routes(app: FastAPI, plays: Plays) -> None:
    router = new_router("play")

    @router.post("/play", status_code=201, response_model=PlayRecord)
    async def start_play(body: StartPlayBody) -> JsonObject:
        """Start a play: a process that owns one environment. Returns when the environment is ready.

        Connect to the WebSocket `/play/{play_id}` to watch and control it.
        """
        return to_json(await plays.start(body.spec))

    @router.get("/play", operation_id="plays", response_model=list[PlayRecord])
    async def list_plays() -> list[JsonObject]:
        """The plays of this service, newest first; those that ended some time ago are forgotten."""
        return [to_json(record) for record in plays.list()]

    @router.get("/play/{play_id}", responses=NOT_FOUND, response_model=PlayRecord)
    async def show_play(play_id: _PlayId) -> JsonObject:
        """One play."""
        return to_json(plays.get(play_id).record)

    @router.delete("/play/{play_id}", responses=NOT_FOUND, response_model=PlayRecord)
    async def stop_play(play_id: _PlayId) -> JsonObject:
        """End a play. Returns when its process has ended; its recorded episodes stay."""
        return to_json(await plays.stop(play_id))

    @router.post("/play/{play_id}/policy", responses=NOT_FOUND, response_model=PlayRecord)
    async def activate_checkpoint(play_id: _PlayId, body: ActivateBody) -> JsonObject:
        """Load a policy into a play, in the background. The state of the play reports when it acts, or why not.

        The policy that acts now goes on acting until the new one is ready, and stays if that fails.
        """
        play = plays.get(play_id)
        await plays.load_policy(play, LoadPolicy(body.checkpoint, body.deterministic, body.consent))
        return to_json(play.record)

    @router.websocket("/play/{play_id}")
    async def connect_play(socket: WebSocket, play_id: str) -> None:
        await socket.accept()
        try:
            play = plays.get(play_id)
        except UnknownRun:
            await socket.close(NO_SUCH_PLAY)
            return
        with play.subscribe() as messages:
            sending = asyncio.create_task(_send_messages(socket, messages))
            try:
                await _read_controls(socket, plays, play)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    app.include_router(router)


async def _send_messages(socket: WebSocket, messages: Subscription) -> None:
    while (data := await messages.next()) is not None:
        await socket.send_bytes(data)
    await socket.close(1000)


async def _read_controls(socket: WebSocket, plays: Plays, play: Play) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        data = message.get("bytes")
        if data is None:
            await socket.close(_UNSUPPORTED_DATA, "send binary messages")
            return
        try:
            await plays.handle(play, decode_control(data))
            continue
        except PalaestraError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001 - one bad control must not end the connection
            _log.exception("%s: a control failed", play.play_id)
            text = f"The control failed ({type(error).__name__}); service.log has the details."
        await socket.send_bytes(pack_report(PlayNotice(level="warning", text=text)))


def _add_episode_routes(app: FastAPI, home: Home) -> None:
    router = new_router("episodes")

    @router.get("/episodes", response_model=list[EpisodeRecord])
    def episodes(env: FilterText = None, play: FilterText = None) -> list[JsonObject]:
        """The recorded episodes of plays, newest first."""
        return [to_json(record) for record in list_episodes(home, env_id=env, play_id=play)]

    @router.get("/episodes/{episode_id}", responses=NOT_FOUND, response_model=EpisodeRecord)
    def show_episode(episode_id: _EpisodeId) -> JsonObject:
        """One recorded episode."""
        return to_json(open_episode(home, episode_id).record)

    @router.get("/episodes/{episode_id}/steps", responses=NOT_FOUND, response_model=list[EpisodeStep])
    def episode_steps(
        episode_id: _EpisodeId,
        first: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_STEPS)] = _MAX_STEPS,
    ) -> list[JsonObject]:
        """The steps of an episode; step 0 is its beginning."""
        steps = open_episode(home, episode_id).steps(first, count)
        return [to_json(EpisodeStep(step.report, step.picture is not None)) for step in steps]

    @router.get("/episodes/{episode_id}/pictures/{step}", response_class=Response, responses=describe_picture())
    def episode_picture(episode_id: _EpisodeId, step: Annotated[int, Path(ge=0, lt=2**31)]) -> Response:
        """The picture of a step, or the last one before it."""
        data = open_episode(home, episode_id).picture_at(step)
        return Response(data, media_type=picture_type(data))

    @router.get(
        "/episodes/{episode_id}/video",
        response_class=FileResponse,
        responses={200: {"description": "the video", **_VIDEO}, **NOT_FOUND},
    )
    def episode_video(episode_id: _EpisodeId) -> FileResponse:
        """The episode as a video, encoded at the first request."""
        return FileResponse(export_video(open_episode(home, episode_id)), media_type="video/webm")

    @router.delete("/episodes/{episode_id}", responses=NOT_FOUND, response_model=EpisodeRecord)
    def remove_episode(episode_id: _EpisodeId) -> JsonObject:
        """Delete a recorded episode."""
        return to_json(delete_episode(home, episode_id))

    app.include_router(router)


def describe_picture() -> dict[int | str, JsonObject]:
    """OpenAPI descriptions of a picture and of its error responses."""
    return {200: {"description": "the picture", **_PICTURE}, **describe_errors(404)}
