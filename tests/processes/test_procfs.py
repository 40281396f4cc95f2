"""Facts about processes: identity, descent, labels."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from palaestra.processes.procfs import (
    ProcessIdentity,
    boot_id,
    find_by_environment,
    list_descendants,
    list_pids,
    read_stat,
    start_ticks,
)


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def test_an_identity_lives_as_long_as_its_process(child):
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_alive()
    child.kill()
    child.wait()
    assert not identity.is_alive()
    assert ProcessIdentity.of(child.pid) is None


def test_a_zombie_is_not_a_running_process(child):
    identity = ProcessIdentity.of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    assert read_stat(child.pid) is None


def test_the_same_pid_at_another_time_or_boot_is_another_process():
    me = ProcessIdentity.of(os.getpid())
    assert me.is_alive()
    assert not replace(me, started=me.started + 1).is_alive()
    assert not replace(me, boot_id="another").is_alive()


def test_an_identity_survives_being_written_down():
    me = ProcessIdentity.of(os.getpid())
    assert ProcessIdentity.from_json(asdict(me)) == me


@pytest.mark.parametrize("data", [None, {}, {"pid": 1}, "x", {"pid": "a", "started": 1, "boot_id": ""}, [1]])
def test_what_is_no_identity_is_none(data):
    assert ProcessIdentity.from_json(data) is None


def test_a_name_with_parentheses_and_spaces_is_no_trap(tmp_path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to(sys.executable)
    process = subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert read_stat(process.pid)[0] == os.getpid()
    finally:
        process.communicate(b"\n")


def test_below_finds_children_and_their_children():
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); input(); p.kill()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        grandchild = int(process.stdout.readline())
        assert list_descendants(os.getpid()) >= {process.pid, grandchild}
        assert list_descendants(process.pid) == {grandchild}
        assert list_descendants(grandchild) == set()
    finally:
        process.communicate("\n")


def test_a_label_finds_exactly_those_that_carry_it():
    value = os.urandom(8).hex()
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "PALAESTRA_TEST_LABEL": value})
    try:
        assert find_by_environment("PALAESTRA_TEST_LABEL", value) == {process.pid}
        assert find_by_environment("PALAESTRA_TEST_LABEL", value[:-1]) == set()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_this_process_is_among_all_and_has_a_boot():
    assert os.getpid() in set(list_pids())
    assert start_ticks(os.getpid()) > 0
    assert len(boot_id()) == 36
