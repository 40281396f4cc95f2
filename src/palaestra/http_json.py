"""JSON bodies of HTTP requests, read strictly: a FastAPI route for services whose clients must not be misunderstood."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from palaestra.strict_json import read_json

__all__ = ["StrictJsonRoute"]


class _StrictRequest(Request):
    """A request whose JSON is read by our own reader; FastAPI's keeps the last of two equal keys."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return read_json(body)
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            # The one error that FastAPI turns into an answer of 422.
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictJsonRoute(APIRoute):
    """A route that refuses ambiguous JSON. Set it as `app.router.route_class` before routes are added."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that reads strictly."""
        answer = super().get_route_handler()

        async def answer_strictly(request: Request) -> Response:
            return await answer(_StrictRequest(request.scope, request.receive))

        return answer_strictly
