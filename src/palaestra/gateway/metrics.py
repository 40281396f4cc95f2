"""The gateway's numbers, and how Prometheus wants them written.

Counts only grow; what can be looked up (sessions by state, processes) is asked for at the moment of writing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_HELP = {
    "created": "Sessions that were opened.",
    "failed": "Sessions that could not be opened.",
    "closed": "Sessions that their client closed.",
    "reaped": "Sessions removed because their lease ran out.",
    "lost": "Sessions lost with the process or pod that carried them.",
    "refused": "Openings refused because every place was taken.",
}


class Metrics:
    """What has happened since the gateway started."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def proxied(self, status: int, seconds: float) -> None:
        """One proxied request, from its head to the last byte of its answer."""
        self._statuses[status] += 1
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def text(self, states: Mapping[str, int], *, limit: int, servers: Mapping[str, int]) -> str:
        """Everything in Prometheus' text format."""
        lines = _family("sessions", "gauge", "Sessions by state.")
        lines += [f'palaestra_gateway_sessions{{state="{state}"}} {count}' for state, count in states.items()]
        lines += _family("sessions_limit", "gauge", "Sessions that may be open at once.")
        lines += [f"palaestra_gateway_sessions_limit {limit}"]
        lines += _family("servers", "gauge", "What carries the sessions, by state.")
        lines += [f'palaestra_gateway_servers{{state="{state}"}} {count}' for state, count in servers.items()]
        for name, explanation in _HELP.items():
            lines += _family(f"sessions_{name}_total", "counter", explanation)
            lines += [f"palaestra_gateway_sessions_{name}_total {self.totals[name]}"]
        lines += _family("proxy_requests_total", "counter", "Proxied requests by the status they were answered with.")
        lines += [
            f'palaestra_gateway_proxy_requests_total{{status="{status}"}} {count}'
            for status, count in sorted(self._statuses.items())
        ]
        return "\n".join([*lines, *self._histogram(), ""])

    def _histogram(self) -> list[str]:
        name = "palaestra_gateway_proxy_seconds"
        lines = _family("proxy_seconds", "histogram", "How long proxied requests took.")
        total = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]


def _family(name: str, kind: str, explanation: str) -> list[str]:
    return [f"# HELP palaestra_gateway_{name} {explanation}", f"# TYPE palaestra_gateway_{name} {kind}"]
