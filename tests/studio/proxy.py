"""A proxy between the studio and a run service that a test lets answer nonsense, errors, or nothing at all."""

import contextlib
import socket
import threading
import urllib.parse

PAGE = b"<!doctype html><html><body><h1>Welcome to the router</h1></body></html>"
ANSWERS = {
    "text": ("200 OK", "application/json", b"}{ this is not JSON \xff\xfe"),
    "object": ("200 OK", "application/json", b'{"surprise": [1, null, {"deep": true}]}'),
    "list": ("200 OK", "application/json", b'[null, 7, {"run_id": 3}]'),
    "null": ("200 OK", "application/json", b"null"),
    "page": ("200 OK", "text/html", PAGE),
    "error": ("500 Internal Server Error", "text/html", PAGE),
    "nothing": ("200 OK", "application/json", b""),
}
"""Status, content type and body of each kind of wrong answer."""


class Proxy:
    """Forwards every connection, as long as the test has not chosen another answer for its path."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets, self._lock = [self._listener], threading.Lock()
        self._answer, self._paths, self._spared = "", (), ()
        self.asked = []
        """The paths of the requests that were not forwarded."""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def answer(self, kind, *paths, spared=()):
        """Answer requests whose paths begin so (default: all) with `kind` of `ANSWERS`, or `hang`; "" forwards again.

        Connections that are open are broken, so that streams are asked for again.
        """
        self.asked.clear()
        self._answer, self._paths, self._spared = kind, paths, spared
        with self._lock:
            opened, self._sockets = self._sockets[1:], self._sockets[:1]
        for one in opened:
            _shut(one)
            one.close()

    def close(self):
        _shut(self._listener)
        self._listener.close()
        self.answer("")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        self._keep(client)
        head = b""
        while b"\r\n\r\n" not in head:
            data = _receive(client)
            if not data:
                client.close()
                return
            head += data
        path = head.split(b" ", 2)[1].decode()
        is_meant = path.startswith(self._paths) if self._paths else True
        kind = self._answer if is_meant and not path.startswith(self._spared or "\n") else ""
        if kind:
            self.asked.append(path)
        if kind == "hang":
            return
        if kind:
            status, content, body = ANSWERS[kind]
            text = f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {len(body)}\r\n\r\n"
            with contextlib.suppress(OSError):
                client.sendall(text.encode() + body)
            client.close()
            return
        self._forward(client, head)

    def _forward(self, client, head):
        try:
            server = socket.create_connection(self._target)
            server.sendall(head)
        except OSError:
            client.close()
            return
        self._keep(server)
        threading.Thread(target=_copy, args=(client, server), daemon=True).start()
        _copy(server, client)
        client.close()
        server.close()

    def _keep(self, one):
        with self._lock:
            self._sockets = [*(old for old in self._sockets if old.fileno() >= 0), one]


def _copy(source, target):
    while data := _receive(source):
        try:
            target.sendall(data)
        except OSError:
            break
    _shut(target)


def _receive(source):
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _shut(one):
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
