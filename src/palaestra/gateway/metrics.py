"""The gateway's metrics in Prometheus' text format.

Counters are kept here; gauges (sessions by state, servers) are passed in when the metrics are rendered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_HELP = {
    "created": "Sessions opened.",
    "failed": "Sessions that could not be opened.",
    "closed": "Sessions closed by their client.",
    "reaped": "Sessions removed because their lease expired.",
    "lost": "Sessions lost with the process or pod they ran in.",
    "refused": "Openings refused because the limit was reached.",
    "adopted": "Sessions taken over from the gateway of this name that ran before.",
}


class PeerCounts(NamedTuple):
    """What was asked of a peer."""

    name: str
    reachable: bool
    forwarded: int
    opened: int


class Metrics:
    """Counters since the gateway started."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def record_request(self, status: int, seconds: float) -> None:
        """Count a proxied request; `seconds` is from its head to the last byte of its response."""
        self._statuses[status] += 1
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def render(
        self,
        states: Mapping[str, int],
        *,
        limit: int,
        servers: Mapping[str, int],
        peers: Sequence[PeerCounts] = (),
        gateway: str = "",
    ) -> str:
        """All metrics in Prometheus' text format; with the name of the gateway as a label, if it has one."""
        page = _MetricsPage({"gateway": gateway} if gateway else {})
        page.add("sessions", "gauge", "Sessions by state.", (({"state": s}, n) for s, n in states.items()))
        page.add("sessions_limit", "gauge", "Sessions that may be open at once.", [({}, limit)])
        page.add(
            "servers", "gauge", "Session servers or pods, by state.", (({"state": s}, n) for s, n in servers.items())
        )
        for name, help_text in _HELP.items():
            page.add(f"sessions_{name}_total", "counter", help_text, [({}, self.totals[name])])
        statuses = (({"status": str(status)}, count) for status, count in sorted(self._statuses.items()))
        page.add("proxy_requests_total", "counter", "Proxied requests by response status.", statuses)
        if peers:
            reachable = (({"peer": one.name}, int(one.reachable)) for one in peers)
            page.add("peer_reachable", "gauge", "Whether a peer could be reached when last needed.", reachable)
            forwarded = (({"peer": one.name}, one.forwarded) for one in peers)
            page.add(
                "peer_requests_total", "counter", "Requests forwarded to the peer that has the session.", forwarded
            )
            opened = (({"peer": one.name}, one.opened) for one in peers)
            page.add("peer_sessions_opened_total", "counter", "Sessions opened on a peer for lack of room.", opened)
        self._add_histogram(page)
        return page.text()

    def _add_histogram(self, page: _MetricsPage) -> None:
        name, total = "proxy_seconds", 0
        page.add(name, "histogram", "Duration of proxied requests.", ())
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            page.add_sample(f"{name}_bucket", {"le": bound}, total)
        page.add_sample(f"{name}_sum", {}, f"{self._seconds:.6f}")
        page.add_sample(f"{name}_count", {}, total)


class _MetricsPage:
    """The lines of Prometheus' text format; every sample has the same first labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def add(self, name: str, kind: str, help_text: str, samples: Iterable[tuple[Mapping[str, str], int]]) -> None:
        self._lines += [f"# HELP palaestra_gateway_{name} {help_text}", f"# TYPE palaestra_gateway_{name} {kind}"]
        for labels, value in samples:
            self.add_sample(name, labels, value)

    def add_sample(self, name: str, labels: Mapping[str, str], value: int | str) -> None:
        pairs = ",".join(f'{key}="{text}"' for key, text in {**self._labels, **labels}.items())
        self._lines.append(
            f"palaestra_gateway_{name}{{{pairs}}} {value}" if pairs else f"palaestra_gateway_{name} {value}"
        )

    def text(self) -> str:
        return "\n".join([*self._lines, ""])
