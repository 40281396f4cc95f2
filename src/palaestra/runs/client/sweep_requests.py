"""Requests about sweeps, and comparisons of many runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from palaestra.runs.client.requests import ServiceRequests, quote
from palaestra.runs.spec import resolve_environment
from palaestra.runs.wire import from_json

if TYPE_CHECKING:
    from palaestra.runs.analysis.groups import GroupComparison
    from palaestra.runs.sweeps.report import SweepDetails, SweepRecord
    from palaestra.runs.sweeps.spec import SweepSpec

_POLL_S = 0.2


class SweepRequests(ServiceRequests):
    """What the client can do with sweeps."""

    def start_sweep(self, spec: SweepSpec, consent: str | None = None) -> SweepRecord:
        """Start a sweep. `consent` is the digest of the command of its first run."""
        from palaestra.runs.sweeps.report import SweepRecord

        base = resolve_environment(spec.base, os.environ)
        body = {"spec": spec.model_copy(update={"base": base}).model_dump(mode="json"), "consent": consent}
        return from_json(SweepRecord, self.request("POST", "/sweeps", body))

    def sweeps(self) -> list[SweepRecord]:
        """All sweeps, newest first."""
        from palaestra.runs.sweeps.report import SweepRecord

        return [from_json(SweepRecord, row) for row in self.request("GET", "/sweeps")]

    def sweep(self, sweep_id: str) -> SweepDetails:
        """A sweep with all its trials, best first."""
        from palaestra.runs.sweeps.report import SweepDetails

        return from_json(SweepDetails, self.request("GET", f"/sweeps/{quote(sweep_id)}"))

    def stop_sweep(self, sweep_id: str, *, keep_running: bool = False, grace_s: float | None = None) -> SweepRecord:
        """Stop a sweep and its runs, or with `keep_running` only those that wait."""
        from palaestra.runs.sweeps.report import SweepRecord

        body = {"keep_running": keep_running, "grace_s": grace_s}
        return from_json(SweepRecord, self.request("POST", f"/sweeps/{quote(sweep_id)}/stop", body))

    def resume_sweep(self, sweep_id: str, *, retry_failed: bool = False) -> SweepRecord:
        """Continue a stopped sweep, and with `retry_failed` also the trials that failed."""
        from palaestra.runs.sweeps.report import SweepRecord

        path = f"/sweeps/{quote(sweep_id)}/resume"
        return from_json(SweepRecord, self.request("POST", path, {"retry_failed": retry_failed}))

    def compare_groups(
        self,
        run_ids: Sequence[str] = (),
        *,
        where: str = "",
        sweep: str = "",
        metric: str | None = None,
        direction: Literal["maximize", "minimize"] | None = None,
        step: int | None = None,
        pool_envs: bool = False,
    ) -> GroupComparison:
        """Runs that differ only in their seed as groups, compared at equal steps, best first.

        The default metric and direction are those of the sweep, otherwise the return, to be maximized.
        """
        from palaestra.runs.analysis.groups import GroupComparison

        query = {"where": where, "sweep": sweep, "metric": metric, "direction": direction, "step": step}
        rows = self.request("GET", "/compare/groups", None, run=list(run_ids), pool_envs=pool_envs, **query)
        return from_json(GroupComparison, rows)

    def wait_for_sweep(self, sweep_id: str, *, timeout_s: float | None = None) -> SweepDetails:
        """Wait until a sweep has finished or was stopped; `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            details = self.sweep(sweep_id)
            if details.sweep.state != "running" and not details.sweep.runs:
                return details
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{sweep_id} is {details.sweep.state} after {timeout_s} s: {details.sweep.trials}")
            time.sleep(_POLL_S)
