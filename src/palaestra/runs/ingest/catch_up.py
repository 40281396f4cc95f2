"""Series that are missing or behind their journal, brought up to it by whoever asks for numbers.

So a run that no service watches has numbers, and series that somebody removed come back. Whoever holds the lock of the
series does it; everybody else reads what is there. What only a service does (translating output and event files into
a journal) is left to it.
"""

from __future__ import annotations

import time

from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import boot_id
from palaestra.runs.ingest.feed import Feed
from palaestra.runs.runner import JournalFile
from palaestra.runs.series.commits import SeriesBusy, read_last_commit
from palaestra.runs.state.attempt_plan import AttemptPlan

__all__ = ["catch_up"]

_AT_ONCE = 10_000
_LOOK_EVERY_S = 0.02


def catch_up(attempt: Attempt, *, wait_s: float = 0.0) -> None:
    """Have the series say what the journal says. While somebody else is at it, wait for that, but not for longer."""
    end = time.monotonic() + wait_s
    while _behind(attempt):
        plan = AttemptPlan.read(attempt)
        try:
            feed = Feed(attempt, plan.sources if plan is not None else (JournalFile(),), translate=False)
        except SeriesBusy:
            if time.monotonic() >= end:
                return
            time.sleep(_LOOK_EVERY_S)
            continue
        except OSError:
            return  # a directory of somebody else's, or a full disk: what there is can be read all the same
        try:
            feed.catch_up(_AT_ONCE)
        except OSError:
            pass
        finally:
            feed.close()
        return


def _behind(attempt: Attempt) -> bool:
    try:
        size = attempt.journal.stat().st_size
    except OSError:
        return False
    commit = read_last_commit(attempt.series / "commits.log")
    if commit is None or not (commit.whole or commit.boot_id == boot_id()):
        return size > 0
    # A journal that is shorter than what was taken from it has been damaged; then the series are what is left of it.
    return size > commit.cursor.offset
