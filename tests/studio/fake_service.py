"""A service that a test controls: streams that it fills, ends and breaks, and a play."""

import queue
import threading

from palaestra.errors import ServiceUnreachable

_CLOSED = object()
_END = object()


class FakeStream:
    """Values from the test; closed from any thread, and continued when it is iterated again, as `ServerEvents` is."""

    def __init__(self):
        self._items = queue.SimpleQueue()
        self.is_closed = threading.Event()
        self.is_read = threading.Event()

    def push(self, *items):
        for item in items:
            self._items.put(item)

    def fail(self, error=None):
        self._items.put(error or ServiceUnreachable("the stream broke"))

    def end(self):
        self._items.put(_END)

    def __iter__(self):
        self.is_read.set()
        while not self.is_closed.is_set():
            item = self._items.get()
            if item is _CLOSED or item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self):
        self.is_closed.set()
        self._items.put(_CLOSED)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class FakePlay(FakeStream):
    """A connection to a play that remembers what was sent."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, control):
        if self.is_closed.is_set():
            raise ServiceUnreachable("the connection to the play is closed")
        self.sent.append(control)


class FakeService:
    """Every `watch` and `open` takes the next stream that the test has prepared for it, or makes an empty one."""

    description = "a service of the test"

    def __init__(self):
        self.health = queue.SimpleQueue()
        """Answers of the next health checks, one each: None, or an error; the last one stays."""
        self._health = None
        self._prepared = {}
        self.opened = {}
        """The subject and the stream of every call, by the name of the method."""

    def prepare(self, name, *streams):
        """Let the next calls of a method return these streams, or raise these errors."""
        self._prepared.setdefault(name, queue.SimpleQueue())
        for stream in streams:
            self._prepared[name].put(stream)
        return streams[0]

    def check_health(self, timeout_s):
        if not self.health.empty():
            self._health = self.health.get()
        if self._health is not None:
            raise self._health

    def abort(self):
        """Nothing waits here."""

    def watch_runs(self):
        return self._open("watch_runs", None)

    def watch_metrics(self, run_ids):
        return self._open("watch_metrics", tuple(run_ids))

    def watch_log(self, run_id, *, offset=0):
        return self._open("watch_log", (run_id, offset))

    def open_play(self, play_id):
        return self._open("open_play", play_id)

    def _open(self, name, subject):
        prepared = self._prepared.get(name)
        stream = prepared.get() if prepared is not None and not prepared.empty() else None
        if isinstance(stream, BaseException):
            raise stream
        if stream is None:
            stream = FakePlay() if name == "open_play" else FakeStream()
        self.opened.setdefault(name, []).append((subject, stream))
        return stream
