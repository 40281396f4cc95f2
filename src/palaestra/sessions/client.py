"""Sessions that run elsewhere, as if they ran here: `SessionClient` keeps the `Session` protocol over HTTP.

Errors arrive as the exceptions that were raised on the other side. An act is repeated when its answer was lost, because
the session answers a repeated step from memory; a reset is not, because the second could come after the first act.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction, Wait, encode
from palaestra.sessions.http_caller import Answer, HttpCaller, Patience
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec
from palaestra.sessions.wire import STEP_HEADER, written
from palaestra.strict_json import read_json

__all__ = ["SessionClient", "open_session"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}
_PICTURE = {"Content-Type": "application/json", "Accept": "image/png"}


class SessionClient:
    """The session at a URL: `http://server/sessions/NAME`, `http://gateway/proxy/ID`, or a pod that is one session."""

    def __init__(
        self, url: str, *, token: str | None = None, patience: Patience | None = None, rng: random.Random | None = None,
        caller: HttpCaller | None = None, give_up: Callable[[], Awaitable[object]] | None = None,
        headers: Mapping[str, str] | None = None, session_id: str = "",
    ) -> None:  # fmt: skip
        """`caller` shares connections with others and is then not closed here; `give_up` tells whoever opened it.

        `headers` go with every request, such as the token by which a gateway knows who opened the session.
        `session_id` is the name of the session where it was opened; a trajectory records it.
        """
        self._caller = caller or HttpCaller(url, token=token, patience=patience, rng=rng)
        self._own_caller = caller is None
        self._path = "" if caller is None else url.removeprefix(caller.url).rstrip("/")
        self._give_up = give_up
        self._closed = False
        self.url, self.session_id = url, session_id
        self.headers = dict(headers or {})

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        try:
            body = written({"task": request.task, "seed": request.seed, "params": dict(request.params)})
        except (TypeError, ValueError) as error:
            raise SessionRefused("bad_params", f"params: cannot be written as JSON ({error}).", status=422) from None
        answer = await self._call("POST", "/reset", body, headers=_JSON)
        return _read(answer, lambda: TaskSpec.from_facts(read_json(answer.body)))

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once, however often it has to be asked for."""
        body = written({"step": step, "action": encode(action)})
        extra = action.seconds if isinstance(action, Wait) else 0.0
        answer = await self._call("POST", "/act", body, headers=_PICTURE, repeatable=True, extra_s=extra)
        facts = _read(answer, lambda: read_json(answer.headers[STEP_HEADER]))
        if _read(answer, lambda: facts["progress"].get("detail_left_out", False)):
            # It was too long for a header. The same step again, in words, is answered from memory.
            full = await self._call("POST", "/act", body, headers=_JSON, repeatable=True, extra_s=extra)
            facts = _read(full, lambda: read_json(full.body))
        picture = Screenshot.of(answer.body)
        if picture.sha256 != _read(answer, lambda: facts["screenshot"]["sha256"]):
            raise SessionFailed("bad_answer", f"step {step}: the picture is not the one that was announced")
        return _read(answer, lambda: Step(int(facts["step"]), picture, Progress.from_facts(facts["progress"])))

    async def screenshot(self) -> Screenshot:
        """What is on the screen now."""
        answer = await self._call("GET", "/screenshot", headers={"Accept": "image/png"}, repeatable=True)
        return Screenshot.of(answer.body)

    async def progress(self) -> Progress:
        """How far the task has come."""
        answer = await self._call("GET", "/progress", repeatable=True)
        return _read(answer, lambda: Progress.from_facts(read_json(answer.body)))

    async def close(self) -> None:
        """Give the session up."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._give_up is not None:
                await self._give_up()
        except (SessionRefused, SessionFailed) as error:
            # What cannot be given up is gone already, or its lease will run out.
            if not (isinstance(error, SessionRefused) and error.code == "no_session"):
                _log.warning("%s was not closed: %s", self.url, error)
        finally:
            if self._own_caller:
                await self._caller.close()

    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None, **how: Any
    ) -> Answer:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)
        sent = {**self.headers, **(headers or {})}
        return await self._caller.call(method, self._path + path, body, headers=sent, **how)


async def open_session(
    server: str, *, session_id: str | None = None, token: str | None = None, patience: Patience | None = None,
    rng: random.Random | None = None,
) -> SessionClient:  # fmt: skip
    """A session on a session server at `server`, which is deleted there when the client closes it."""
    caller = HttpCaller(server, token=token, patience=patience, rng=rng)
    try:
        asked = {} if session_id is None else {"session_id": session_id}
        answer = await caller.call("POST", "/sessions", written(asked), headers=_JSON)
        name = _read(answer, lambda: str(read_json(answer.body)["session_id"]))
    except BaseException:
        await caller.close()
        raise

    async def give_up() -> None:
        try:
            await caller.call("DELETE", f"/sessions/{name}", repeatable=True)
        finally:
            await caller.close()

    return SessionClient(
        f"{caller.url}/sessions/{name}", caller=caller, give_up=give_up, session_id=f"{caller.url}/sessions/{name}"
    )


def _read(answer: Answer, reading: Callable[[], T]) -> T:
    try:
        return reading()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = answer.body[:100]
        raise SessionFailed("bad_answer", f"status {answer.status}, not understood ({error!r}): {said!r}") from None
