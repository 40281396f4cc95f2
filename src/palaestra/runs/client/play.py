"""A connection to a play: send controls, receive steps with their pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

from palaestra.errors import ServiceUnreachable, UnknownRun
from palaestra.runs.client.connect import Endpoint
from palaestra.runs.play.protocol import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    NO_SUCH_PLAY,
    Control,
    encode_control,
    unpack,
)
from palaestra.runs.play.state import Report, read_report

_OPEN_TIMEOUT_S = 10.0


class PlayMessage(NamedTuple):
    """A report, and the picture of a step."""

    report: Report
    picture: bytes


class PlayConnection:
    """One client of a play. One thread iterates over the messages; any thread may send controls or close it."""

    def __init__(self, endpoint: Endpoint, play_id: str) -> None:
        url = endpoint.url.replace("http", "ws", 1) + f"/play/{play_id}"
        self._play_id, self._stack = play_id, ExitStack()
        try:
            self._connection = self._stack.enter_context(
                connect(
                    url,
                    additional_headers={"Authorization": f"Bearer {endpoint.token}"},
                    compression=None,
                    open_timeout=_OPEN_TIMEOUT_S,
                    max_size=MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES,
                    # A proxy of the environment must not see the token.
                    proxy=None,
                )
            )
        except InvalidStatus as error:
            text = f"{endpoint.url} answers {error.response.status_code}: it does not accept the token"
            raise ServiceUnreachable(text) from None
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ServiceUnreachable(f"{endpoint.url} does not answer ({error})") from None

    def send(self, control: Control) -> None:
        """Send a control."""
        try:
            self._connection.send(encode_control(control))
        except (ConnectionClosed, OSError) as error:
            raise ServiceUnreachable(f"the connection to the play is closed ({error})") from None

    def __iter__(self) -> Iterator[PlayMessage]:
        """The messages until the play ends or the connection is closed; `ServiceUnreachable` if it breaks."""
        while True:
            try:
                data = self._connection.recv()
            except ConnectionClosed as error:
                if error.rcvd is not None and error.rcvd.code == NO_SUCH_PLAY:
                    raise UnknownRun("play", self._play_id, "no such play", "GET /play lists them") from None
                if (error.rcvd is not None and error.rcvd.code == 1000) or (error.sent is not None and not error.rcvd):
                    return
                raise ServiceUnreachable(f"the connection to the play broke ({error})") from None
            except OSError as error:
                raise ServiceUnreachable(f"the connection to the play broke ({error})") from None
            if isinstance(data, bytes):
                message = unpack(data)
                report = read_report(message)
                if report is not None:
                    yield PlayMessage(report, message.payload)

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()

    def __enter__(self) -> PlayConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()
