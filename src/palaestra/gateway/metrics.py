"""The gateway's metrics in Prometheus' text format.

Counters are kept here; gauges (sessions by state, servers) are passed in when the metrics are rendered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_HELP = {
    "created": "Sessions opened.",
    "failed": "Sessions that could not be opened.",
    "closed": "Sessions closed by their client.",
    "reaped": "Sessions removed because their lease expired.",
    "lost": "Sessions lost with the process or pod they ran in.",
    "refused": "Openings refused because the limit was reached.",
}


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

    def render(self, states: Mapping[str, int], *, limit: int, servers: Mapping[str, int]) -> str:
        """All metrics in Prometheus' text format."""
        lines = _family("sessions", "gauge", "Sessions by state.")
        lines += [f'palaestra_gateway_sessions{{state="{state}"}} {count}' for state, count in states.items()]
        lines += _family("sessions_limit", "gauge", "Sessions that may be open at once.")
        lines += [f"palaestra_gateway_sessions_limit {limit}"]
        lines += _family("servers", "gauge", "Session servers or pods, by state.")
        lines += [f'palaestra_gateway_servers{{state="{state}"}} {count}' for state, count in servers.items()]
        for name, help_text in _HELP.items():
            lines += _family(f"sessions_{name}_total", "counter", help_text)
            lines += [f"palaestra_gateway_sessions_{name}_total {self.totals[name]}"]
        lines += _family("proxy_requests_total", "counter", "Proxied requests by response status.")
        lines += [
            f'palaestra_gateway_proxy_requests_total{{status="{status}"}} {count}'
            for status, count in sorted(self._statuses.items())
        ]
        return "\n".join([*lines, *self._histogram(), ""])

    def _histogram(self) -> list[str]:
        name = "palaestra_gateway_proxy_seconds"
        lines = _family("proxy_seconds", "histogram", "Duration of proxied requests.")
        total = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]


def _family(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP palaestra_gateway_{name} {help_text}", f"# TYPE palaestra_gateway_{name} {kind}"]
