"""The life of a run, as two pure tables: which phase follows which, and what an end was.

Nobody stores a status and believes it: phases are computed from facts (is the process that was started still there,
what did its warden write down, was a stop asked for, what did the trainer say last). The supervisor and the reader of
run directories drive it; it touches neither processes nor files.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from palaestra.errors import IllegalTransition

__all__ = ["EndFacts", "Ending", "Happening", "Phase", "advance", "ending_of", "signal_name"]


class Phase(StrEnum):
    """Where a run is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"
    STALLED = "stalled"
    LOST = "lost"
    REFUSED = "refused"

    @property
    def ended(self) -> bool:
        """Whether nothing more happens unless somebody resumes the run."""
        return self not in _LIVE

    @property
    def has_process(self) -> bool:
        """Whether a process belongs to it, and a slot is taken."""
        return self in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


_LIVE = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.STOPPING})


class Happening(StrEnum):
    """What can happen to a run."""

    LAUNCHED = "launched"
    FIRST_SIGN = "first_sign"
    """The first event, or the first byte of output."""
    STOP_ASKED = "stop_asked"
    RESUMED = "resumed"
    RESUME_CANCELLED = "resume_cancelled"
    """A resume that never began: the run is again what it was before."""
    LAUNCH_REFUSED = "launch_refused"
    """Preflight said no at the moment of launch, or the program could not be executed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"
    STALLED = "stalled"
    LOST = "lost"


_ENDS = {
    Happening.SUCCEEDED: Phase.SUCCEEDED,
    Happening.FAILED: Phase.FAILED,
    Happening.STOPPED: Phase.STOPPED,
    Happening.KILLED: Phase.KILLED,
    Happening.STALLED: Phase.STALLED,
    Happening.LOST: Phase.LOST,
}

_NEXT: dict[tuple[Phase, Happening], Phase] = {
    (Phase.QUEUED, Happening.LAUNCHED): Phase.STARTING,
    (Phase.QUEUED, Happening.LAUNCH_REFUSED): Phase.REFUSED,
    (Phase.QUEUED, Happening.STOP_ASKED): Phase.STOPPED,
    (Phase.STARTING, Happening.LAUNCH_REFUSED): Phase.REFUSED,
    (Phase.STARTING, Happening.FIRST_SIGN): Phase.RUNNING,
    (Phase.STARTING, Happening.STOP_ASKED): Phase.STOPPING,
    (Phase.RUNNING, Happening.STOP_ASKED): Phase.STOPPING,
    # Asked twice is asked once: a second request may only shorten the grace.
    (Phase.STOPPING, Happening.STOP_ASKED): Phase.STOPPING,
    (Phase.STOPPING, Happening.FIRST_SIGN): Phase.STOPPING,
    **{
        (phase, end): after for phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING) for end, after in _ENDS.items()
    },
    **{(phase, Happening.RESUMED): Phase.QUEUED for phase in Phase if phase.ended},
}


def advance(phase: Phase, happening: Happening) -> Phase:
    """The phase that follows; `IllegalTransition` when this cannot happen to such a run."""
    try:
        return _NEXT[phase, happening]
    except KeyError:
        raise IllegalTransition(f"a run that is {phase} cannot be {happening.replace('_', ' ')}") from None


@dataclass(frozen=True, slots=True)
class EndFacts:
    """What is known when no process of an attempt is left."""

    returncode: int | None = None
    """As `os.waitstatus_to_exitcode` gives it, negative for a signal; None when nobody was there to see."""
    launch_error: str = ""
    """Why the program could not be executed at all."""
    out_of_memory: bool = False
    """The kernel counted an out-of-memory kill where the trainer lived, while it lived."""
    stop_reason: str = ""
    """What the stop request on disk says: `operator`, `stalled`, `shutdown`; empty when there was none."""
    last_said: str = ""
    """The phase of the trainer's last `PhaseChanged`, when it writes a journal."""
    same_boot: bool = True
    """Whether the machine is still up since the attempt started."""
    last_lines: str = ""
    """The end of its output, already redacted."""
    exception: str = ""
    """The exception of the last Python traceback in its output, already redacted."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: for the table, for people, and for programs."""

    happening: Happening
    reason: str
    code: str
    """A word to sort by: `exit`, `signal`, `out_of_memory`, `operator`, `no_witness`, `reboot`, …"""


def ending_of(facts: EndFacts) -> Ending:
    """Which of the endings it was."""
    if facts.launch_error:
        return Ending(Happening.LAUNCH_REFUSED, facts.launch_error, "exec_failed")
    if facts.returncode is None:
        return _unseen(facts)
    if facts.returncode == 0:
        # A stop that came too late changed nothing: the work was done.
        if facts.stop_reason and facts.last_said != "succeeded":
            return _asked(facts)
        return Ending(Happening.SUCCEEDED, "done", "exit")
    if facts.stop_reason:
        # Told to stop, a trainer may exit with anything; somebody asked, so it is no failure.
        return _asked(facts)
    if facts.returncode < 0:
        if facts.out_of_memory:
            return Ending(Happening.KILLED, "out of memory: the kernel killed it", "out_of_memory")
        return Ending(Happening.KILLED, f"killed ({signal_name(-facts.returncode)})", "signal")
    # An uncaught exception makes Python exit with 1, and others may print behind it.
    output = facts.exception if facts.returncode == 1 and facts.exception else facts.last_lines
    return Ending(Happening.FAILED, f"exit code {facts.returncode}{_last_line(output)}", "exit")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _asked(facts: EndFacts) -> Ending:
    if facts.stop_reason == "stalled":
        return Ending(Happening.STALLED, "stopped because nothing moved any more", "stalled")
    by = "stopped by the operator" if facts.stop_reason == "operator" else f"stopped ({facts.stop_reason})"
    return Ending(Happening.STOPPED, by, facts.stop_reason)


def _unseen(facts: EndFacts) -> Ending:
    if facts.last_said in ("succeeded", "failed"):
        # Its own last word is a fact, too: the trainer wrote it after its last checkpoint.
        end = Happening.SUCCEEDED if facts.last_said == "succeeded" else Happening.FAILED
        return Ending(end, "as its journal says; nobody saw it exit", "journal")
    if not facts.same_boot:
        return Ending(Happening.LOST, "the machine was restarted while it ran", "reboot")
    if facts.stop_reason:
        return _asked(facts)
    return Ending(Happening.LOST, "it is gone and nobody saw it exit", "no_witness")


def _last_line(lines: str) -> str:
    last = next((line.strip() for line in reversed(lines.splitlines()) if line.strip()), "")
    return f": {last[:300]}" if last else ""
