"""A FastAPI route that parses JSON bodies strictly: duplicate keys and non-finite numbers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from palaestra.strict_json import read_json


class _StrictRequest(Request):
    """A request that parses its JSON with `strict_json`; FastAPI's parser keeps the last of two equal keys."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return read_json(body)
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            # The only error that FastAPI turns into a 422 response.
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictJsonRoute(APIRoute):
    """A route that refuses ambiguous JSON. Set it as `app.router.route_class` before routes are added."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, called with a request that parses strictly."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
