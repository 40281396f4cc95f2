"""A stand-in for an existing image: it speaks the query-string dialect as ui-verifiers' data-entry server does.

One server is one session, in a thread. There is no POST, no reset and no step number; parameters it does not know are
ignored. A click on the left half of the screen submits the next row, one on the right half a wrong entry.
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from palaestra.sessions.fake import encode_png
from palaestra.sessions.screen import Size

SCREEN = Size(160, 120)
WORDS = {
    "screenshot",
    "mouse_move",
    "left_click",
    "right_click",
    "double_click",
    "triple_click",
    "type",
    "keys",
    "scroll",
}


class QueryServer:
    """What the server keeps, and where it is."""

    def __init__(self):
        self.submitted, self.wrong, self.acts, self.requests = [], 0, [], []
        self._lock = threading.Lock()
        handler = type("Handler", (_Answers,), {"session": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def act(self, query):
        with self._lock:
            word = query["action_type"]
            if word != "screenshot":
                self.acts.append(query)
            if word == "left_click":
                if int(query["x"]) < SCREEN.width // 2:
                    self.submitted.append(len(self.submitted) % 100)
                else:
                    self.wrong += 1
            white, black = b"\xff\xff\xff", b"\0\0\0"
            line = black * min(len(self.acts), SCREEN.width)
            rows = [line + white * (SCREEN.width - len(line) // 3), *[white * SCREEN.width] * (SCREEN.height - 1)]
            return encode_png(SCREEN, rows)


class _Answers(BaseHTTPRequestHandler):
    session = None
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlsplit(self.path)
        self.session.requests.append(("GET", parts.path))
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/":
            self._send(200, "text/plain", b"simple_data_entry, running")
        elif parts.path == "/progress":
            report = {"submitted_row_indices": self.session.submitted, "num_incorrect_submissions": self.session.wrong}
            self._send(200, "application/json", json.dumps(report).encode())
        elif parts.path == "/act" and query.get("action_type") in WORDS:
            self._send(200, "image/png", self.session.act(query))
        else:
            self._send(422 if parts.path == "/act" else 404, "application/json", b'{"detail": "no"}')

    def do_POST(self):
        self.session.requests.append(("POST", self.path))
        self.close_connection = True
        self._send(405, "application/json", b'{"detail": "Method Not Allowed"}')

    def _send(self, status, media, body):
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def query_server():
    server = QueryServer()
    try:
        yield server
    finally:
        server.close()
