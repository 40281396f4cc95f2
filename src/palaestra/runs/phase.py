"""The state machine of a run: which phase follows which event, and how an attempt ended. Pure functions.

The phase is computed from facts (whether the trainer process is alive, what its watchdog recorded, whether a stop was
requested, what the trainer reported last), never trusted from a stored status.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from palaestra.errors import IllegalTransition


class Phase(StrEnum):
    """The phases of a run."""

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
    def has_ended(self) -> bool:
        """Whether the run is over unless it is resumed."""
        return self not in _LIVE

    @property
    def has_process(self) -> bool:
        """Whether the run has a process and occupies a slot."""
        return self in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


_LIVE = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.STOPPING})


class PhaseEvent(StrEnum):
    """Events that change the phase of a run."""

    LAUNCHED = "launched"
    FIRST_SIGN = "first_sign"
    """The first telemetry record, or the first byte of output."""
    STOP_ASKED = "stop_asked"
    RESUMED = "resumed"
    RESUME_CANCELLED = "resume_cancelled"
    """A resume that was not launched: the run returns to its previous outcome."""
    LAUNCH_REFUSED = "launch_refused"
    """The preflight refused the launch, or the program could not be executed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"
    STALLED = "stalled"
    LOST = "lost"


END_EVENTS = (
    PhaseEvent.SUCCEEDED,
    PhaseEvent.FAILED,
    PhaseEvent.STOPPED,
    PhaseEvent.KILLED,
    PhaseEvent.STALLED,
    PhaseEvent.LOST,
)
"""Events that end a run after its launch."""

_NEXT: dict[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.QUEUED, PhaseEvent.LAUNCHED): Phase.STARTING,
    (Phase.QUEUED, PhaseEvent.LAUNCH_REFUSED): Phase.REFUSED,
    (Phase.QUEUED, PhaseEvent.STOP_ASKED): Phase.STOPPED,
    (Phase.STARTING, PhaseEvent.LAUNCH_REFUSED): Phase.REFUSED,
    (Phase.STARTING, PhaseEvent.FIRST_SIGN): Phase.RUNNING,
    (Phase.STARTING, PhaseEvent.STOP_ASKED): Phase.STOPPING,
    (Phase.RUNNING, PhaseEvent.STOP_ASKED): Phase.STOPPING,
    # A repeated stop request can only shorten the grace period.
    (Phase.STOPPING, PhaseEvent.STOP_ASKED): Phase.STOPPING,
    (Phase.STOPPING, PhaseEvent.FIRST_SIGN): Phase.STOPPING,
    **{(phase, end): Phase(end) for phase in Phase if phase.has_process for end in END_EVENTS},
    **{(phase, PhaseEvent.RESUMED): Phase.QUEUED for phase in Phase if phase.has_ended},
}


def advance(phase: Phase, event: PhaseEvent) -> Phase:
    """The phase after an event; `IllegalTransition` if the event is impossible in this phase."""
    try:
        return _NEXT[phase, event]
    except KeyError:
        raise IllegalTransition(f"a run that is {phase} cannot be {event.replace('_', ' ')}") from None


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """What is known about an attempt when none of its processes is left."""

    returncode: int | None = None
    """As in `os.waitstatus_to_exitcode`, negative for a signal; None if the exit was not observed."""
    launch_error: str = ""
    """Why the program could not be executed."""
    out_of_memory: bool = False
    """Whether the kernel counted an out-of-memory kill in the cgroup of the trainer during its lifetime."""
    stop_reason: str = ""
    """Reason of the stop request: `operator`, `stalled`, `shutdown`; empty without a request."""
    reported_phase: str = ""
    """The phase of the last `PhaseChanged` in the journal."""
    same_boot: bool = True
    """Whether the machine has not been restarted since the attempt started."""
    last_lines: str = ""
    """The last lines of the output, redacted."""
    exception: str = ""
    """The exception of the last Python traceback in the output, redacted."""
    lost_reason: str = ""
    """Why nothing more can be learned about an attempt on another machine."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended."""

    event: PhaseEvent
    reason: str
    code: str
    """For programs: `exit`, `signal`, `out_of_memory`, `operator`, `no_witness`, `reboot`, …"""

    @property
    def phase(self) -> Phase:
        """The phase of a run that ended like this."""
        return Phase.REFUSED if self.event is PhaseEvent.LAUNCH_REFUSED else Phase(self.event)


def determine_outcome(facts: ExitFacts) -> AttemptOutcome:
    """Classify the end of an attempt."""
    if facts.launch_error:
        return AttemptOutcome(PhaseEvent.LAUNCH_REFUSED, facts.launch_error, "exec_failed")
    if facts.returncode is None:
        return _unobserved_outcome(facts)
    if facts.returncode == 0:
        # The trainer finished before the stop request reached it.
        if facts.stop_reason and facts.reported_phase != "succeeded":
            return _stop_outcome(facts)
        return AttemptOutcome(PhaseEvent.SUCCEEDED, "done", "exit")
    if facts.stop_reason:
        # After a stop request any exit code is a stop, not a failure.
        return _stop_outcome(facts)
    if facts.returncode < 0:
        if facts.out_of_memory:
            return AttemptOutcome(PhaseEvent.KILLED, "out of memory: the kernel killed it", "out_of_memory")
        return AttemptOutcome(PhaseEvent.KILLED, f"killed ({signal_name(-facts.returncode)})", "signal")
    # Python exits with 1 after an uncaught exception, and other output may follow the traceback.
    output = facts.exception if facts.returncode == 1 and facts.exception else facts.last_lines
    return AttemptOutcome(PhaseEvent.FAILED, f"exit code {facts.returncode}{_last_line(output)}", "exit")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stop_outcome(facts: ExitFacts) -> AttemptOutcome:
    if facts.stop_reason == "stalled":
        return AttemptOutcome(PhaseEvent.STALLED, "stopped because it was stalled", "stalled")
    by = "stopped by the operator" if facts.stop_reason == "operator" else f"stopped ({facts.stop_reason})"
    return AttemptOutcome(PhaseEvent.STOPPED, by, facts.stop_reason)


def _unobserved_outcome(facts: ExitFacts) -> AttemptOutcome:
    if facts.reported_phase in ("succeeded", "failed"):
        # The trainer reports its final phase after its last checkpoint.
        end = PhaseEvent.SUCCEEDED if facts.reported_phase == "succeeded" else PhaseEvent.FAILED
        return AttemptOutcome(end, "according to its journal; its exit was not observed", "journal")
    if facts.lost_reason:
        return AttemptOutcome(PhaseEvent.LOST, facts.lost_reason, "unreachable")
    if not facts.same_boot:
        return AttemptOutcome(PhaseEvent.LOST, "the machine was restarted while it ran", "reboot")
    if facts.stop_reason:
        return _stop_outcome(facts)
    return AttemptOutcome(PhaseEvent.LOST, "the process is gone and its exit was not observed", "no_witness")


def _last_line(lines: str) -> str:
    last = next((line.strip() for line in reversed(lines.splitlines()) if line.strip()), "")
    return f": {last[:300]}" if last else ""
