"""The phases of a run: every cell of the table, and every ending."""

import pytest

from palaestra.errors import IllegalTransition
from palaestra.runs.phase import ExitFacts, Phase, PhaseEvent, advance, determine_outcome, signal_name

P, H = Phase, PhaseEvent
LIVE = {P.QUEUED, P.STARTING, P.RUNNING, P.STOPPING}
ENDS = {"succeeded", "failed", "stopped", "killed", "stalled", "lost"}
TABLE = {
    (P.QUEUED, H.LAUNCHED): P.STARTING,
    (P.QUEUED, H.LAUNCH_REFUSED): P.REFUSED,
    (P.QUEUED, H.STOP_ASKED): P.STOPPED,
    (P.STARTING, H.LAUNCH_REFUSED): P.REFUSED,
    (P.STARTING, H.FIRST_SIGN): P.RUNNING,
    (P.STARTING, H.STOP_ASKED): P.STOPPING,
    (P.RUNNING, H.STOP_ASKED): P.STOPPING,
    (P.STOPPING, H.STOP_ASKED): P.STOPPING,
    (P.STOPPING, H.FIRST_SIGN): P.STOPPING,
    **{(phase, H(end)): P(end) for phase in (P.STARTING, P.RUNNING, P.STOPPING) for end in ENDS},
    **{(phase, H.RESUMED): P.QUEUED for phase in P if phase not in LIVE},
}


@pytest.mark.parametrize("event", PhaseEvent)
@pytest.mark.parametrize("phase", Phase)
def test_every_cell_of_the_table(phase, event):
    if (phase, event) in TABLE:
        assert advance(phase, event) is TABLE[phase, event]
    else:
        words = str(event).replace("_", " ")
        with pytest.raises(IllegalTransition, match=f"a run that is {phase} cannot be {words}"):
            advance(phase, event)


def test_four_phases_live_and_three_of_them_have_a_process():
    assert {phase for phase in Phase if not phase.has_ended} == LIVE
    assert {phase for phase in Phase if phase.has_process} == LIVE - {P.QUEUED}


ENDINGS = {
    "exit 0": (ExitFacts(0), H.SUCCEEDED, "done", "exit"),
    "exit 3": (ExitFacts(3, last_lines="a\nno data\n\n"), H.FAILED, "exit code 3: no data", "exit"),
    "silent exit 3": (ExitFacts(3), H.FAILED, "exit code 3", "exit"),
    "a very long last line": (ExitFacts(1, last_lines="x" * 999), H.FAILED, "exit code 1: " + "x" * 300, "exit"),
    "killed": (ExitFacts(-9), H.KILLED, "killed (SIGKILL)", "signal"),
    "segmentation fault": (ExitFacts(-11), H.KILLED, "killed (SIGSEGV)", "signal"),
    "out of memory": (
        ExitFacts(-9, out_of_memory=True),
        H.KILLED,
        "out of memory: the kernel killed it",
        "out_of_memory",
    ),
    "exec failed": (ExitFacts(launch_error="no such file"), H.LAUNCH_REFUSED, "no such file", "exec_failed"),
    "stopped, exit 0": (ExitFacts(0, stop_reason="operator"), H.STOPPED, "stopped by the operator", "operator"),
    "stopped, exit 1": (ExitFacts(1, stop_reason="operator"), H.STOPPED, "stopped by the operator", "operator"),
    "stopped, killed": (ExitFacts(-9, stop_reason="operator"), H.STOPPED, "stopped by the operator", "operator"),
    "machine shut down": (ExitFacts(-15, stop_reason="shutdown"), H.STOPPED, "stopped (shutdown)", "shutdown"),
    "stopped for stalling": (
        ExitFacts(-9, stop_reason="stalled"),
        H.STALLED,
        "stopped because it was stalled",
        "stalled",
    ),
    "done before the stop": (
        ExitFacts(0, stop_reason="operator", reported_phase="succeeded"),
        H.SUCCEEDED,
        "done",
        "exit",
    ),
    "unseen": (ExitFacts(), H.LOST, "the process is gone and its exit was not observed", "no_witness"),
    "unseen, said succeeded": (
        ExitFacts(reported_phase="succeeded"),
        H.SUCCEEDED,
        "according to its journal; its exit was not observed",
        "journal",
    ),
    "unseen, said failed": (
        ExitFacts(reported_phase="failed", same_boot=False),
        H.FAILED,
        "according to its journal; its exit was not observed",
        "journal",
    ),
    "unseen, was running": (
        ExitFacts(reported_phase="running"),
        H.LOST,
        "the process is gone and its exit was not observed",
        "no_witness",
    ),
    "reboot": (ExitFacts(same_boot=False), H.LOST, "the machine was restarted while it ran", "reboot"),
    "unseen after a stop": (ExitFacts(stop_reason="operator"), H.STOPPED, "stopped by the operator", "operator"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending(name):
    facts, event, reason, code = ENDINGS[name]
    end = determine_outcome(facts)
    assert (end.event, end.reason, end.code) == (event, reason, code)


def test_every_ending_leads_somewhere_from_every_phase_with_a_process():
    for facts, *_ in ENDINGS.values():
        assert advance(P.STARTING, determine_outcome(facts).event).has_ended


def test_a_signal_without_a_name_has_its_number():
    assert (signal_name(9), signal_name(250)) == ("SIGKILL", "signal 250")
