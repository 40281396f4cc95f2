"""What one machine copies from another: every byte once, whole files before the lines that announce them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt
from palaestra.runs.remote.attempt_tree import AttemptTree, is_mirrored
from palaestra.runs.remote.connection import connect
from palaestra.runs.remote.frames import LinkBroken, decode_log_line, encode_frame
from palaestra.runs.remote.hosts import Host, HostAddress, HostConfig, HostTable, parse_address
from palaestra.runs.remote.machines import MachineFacts, Machines, Shipment
from palaestra.runs.remote.mirror import Mirror, MirrorConflict
from palaestra.runs.remote.ray_jobs import Job
from palaestra.runs.remote.remote_process import RemotePlace, RemoteProcess
from palaestra.runs.remote.snapshot import CodeSnapshot
from palaestra.runs.remote.translation import _translator
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.alarms import AlarmLimits, AlarmMonitor
from palaestra.runs.state.progress import AttemptProgress


def _tree(root, mirror):
    state = mirror.state()
    return AttemptTree(root, state["offsets"], state["versions"])


def _copy(there, here, *, final=False):
    mirror = Mirror(here)
    names = []

    def send(header, body):
        names.append(header["file"])
        mirror.write(header, body)

    _tree(there, mirror).send_changes(send, final=final)
    return names


@pytest.fixture
def places(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    return there, here


@given(parts=st.lists(st.tuples(st.binary(max_size=50), st.integers(0, 60)), max_size=8))
def test_a_link_that_breaks_anywhere_continues_at_the_byte_that_is_here(tmp_path_factory, parts):
    there, here = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    for written, arrives in parts:
        with open(there / "metrics.jsonl", "ab") as file:
            file.write(written)
        mirror = Mirror(here)

        def send_until_the_link_breaks(header, body, mirror=mirror, arrives=arrives):
            mirror.write(header, body[:arrives])
            raise ConnectionError

        with pytest.raises(ConnectionError) if _is_behind(there, here) else _nothing():
            _tree(there, mirror).send_changes(send_until_the_link_breaks)
    _copy(there, here)
    expected = b"".join(written for written, _ in parts)
    assert ((here / "metrics.jsonl").read_bytes() if expected else b"") == expected


def _is_behind(there, here):
    arrived = (here / "metrics.jsonl").stat().st_size if (here / "metrics.jsonl").exists() else 0
    return (there / "metrics.jsonl").stat().st_size > arrived


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_checkpoint_arrives_before_the_journal_and_the_exit_after_everything(places):
    there, here = places
    (there / "checkpoints" / "update_1").mkdir(parents=True)
    for name in ("exit.json", "metrics.jsonl", "checkpoints/update_1/manifest.json", "checkpoints/update_1/a.bin"):
        (there / name).write_text(name)
    names = _copy(there, here, final=True)
    assert names == ["checkpoints/update_1/a.bin", "checkpoints/update_1/manifest.json", "metrics.jsonl", "exit.json"]
    assert _copy(there, here, final=True) == []


def test_a_file_that_was_replaced_by_a_shorter_one_is_copied_from_its_beginning(places):
    there, here = places
    (there / "stdout.log").write_text("a long line")
    _copy(there, here)
    (there / "stdout.log").write_text("short")
    _copy(there, here)
    assert (here / "stdout.log").read_text() == "short"


@pytest.mark.parametrize(
    "name", ["../spec.json", "/etc/passwd", "plan.json", "series/x", "a/../../b", ".hidden", "remote.json"]
)
def test_the_other_machine_cannot_write_outside_its_attempt_or_over_our_own_files(places, name):
    with pytest.raises(MirrorConflict):
        Mirror(places[1]).write({"kind": "growth", "file": name, "offset": 0}, b"x")


def test_the_other_machine_cannot_write_through_a_link(places):
    there, here = places
    (here / "work").symlink_to(there)
    with pytest.raises(MirrorConflict):
        Mirror(here).write({"kind": "growth", "file": "work/x", "offset": 0}, b"x")
    assert not is_mirrored("tmp/x")


def test_a_log_that_is_sent_again_from_its_beginning_adds_only_what_is_new():
    request = {"run_id": "r", "attempt": 1, "offsets": {"stdout.log": 5}, "versions": {"work/a": [2, 7]}}
    job = Job(None, "", request)
    growth = {"kind": "growth", "file": "stdout.log"}
    whole = {"kind": "whole", "file": "work/a", "total": 2, "mtime_ns": 7, "offset": 0, "last": True}
    assert list(job._leave_out({**growth, "offset": 0}, b"abcde")) == []
    assert list(job._leave_out({**growth, "offset": 3}, b"defg")) == [({**growth, "offset": 5}, b"fg")]
    assert list(job._leave_out(whole, b"xy")) == []
    assert list(job._leave_out({**whole, "mtime_ns": 8}, b"xz")) == [({**whole, "mtime_ns": 8}, b"xz")]
    assert list(job._leave_out(whole, b"xy")) == [(whole, b"xy")]
    ahead = {**growth, "offset": 9}
    assert list(job._leave_out(ahead, b"j")) == [(ahead, b"j")]  # a gap is for the mirror to refuse
    assert decode_log_line("a line of Ray itself") is None
    assert decode_log_line('@palaestra-link {"kind": "growth", "data": "aGk="}') == ({"kind": "growth"}, b"hi")


def test_a_replaced_file_has_its_last_version_after_its_log_was_sent_again():
    first = {"kind": "whole", "file": "a", "total": 2, "mtime_ns": 1, "offset": 0, "last": True}
    second = {**first, "mtime_ns": 2}
    job = Job(None, "", {"run_id": "r", "attempt": 1, "offsets": {}, "versions": {"a": [2, 2]}})
    arrived = [message for header in (first, second) for message in job._leave_out(header, b"xy")]
    assert arrived == [(first, b"xy"), (second, b"xy")]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"kind": "growth"},
        {"kind": "growth", "file": "stdout.log", "offset": "x"},
        {"kind": "whole", "file": "a", "offset": 0, "last": True, "mtime_ns": 1 << 200},
        {"kind": "growth", "file": "a\ud800", "offset": 0},
    ],
)
def test_a_message_that_cannot_be_read_breaks_the_link_and_does_not_end_it(tmp_path, header):
    async def body():
        host, stream = Host("box", HostConfig(address="box"), parse_address("box")), asyncio.StreamReader()
        process = RemoteProcess(Attempt(tmp_path), host, connect(host), RemotePlace("box", "/d", "/c"))
        stream.feed_data(encode_frame(header, b"x"))
        with pytest.raises(LinkBroken, match="box sent a message that cannot be read"):
            await process._read_frames(stream)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("anna@box", HostAddress("ssh", "anna@box")),
        ("anna@box:2222", HostAddress("ssh", "anna@box", 2222)),
        ("anna@[::1]:22", HostAddress("ssh", "anna@::1", 22)),
        ("box", HostAddress("ssh", "box")),
        ("ray://head", HostAddress("ray", "http://head:8265")),
        ("ray://head:10001", HostAddress("ray", "http://head:8265")),
        ("ray://head:9000", HostAddress("ray", "http://head:9000")),
        ("https://head/ray/", HostAddress("ray", "https://head/ray")),
    ],
)
def test_an_address_is_a_host_of_ssh_or_the_job_server_of_a_cluster(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", " ", "-oProxyCommand=x", "-x@box", "a@-b", "box; reboot", "box\nHost x", "a@b@c"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="is not the address of a machine"):
        parse_address(text)


@pytest.mark.parametrize("directory", ["", "~", "/", "~/", "~anna/x", "relative", "-x", "../x"])
def test_the_directory_of_a_host_is_absolute_or_below_the_home(directory):
    with pytest.raises(ValueError, match="neither an absolute path nor one that begins with"):
        HostConfig(address="box", directory=directory)


def test_a_name_means_a_host_a_group_any_machine_or_an_address():
    table = HostTable(
        {"a": HostConfig(address="x@a", groups=("gpus",)), "b": HostConfig(address="x@b", groups=("gpus",))}
    )
    assert table.candidates(None) == ("",)
    assert table.candidates("gpus") == ("a", "b")
    assert table.candidates("any") == ("", "a", "b")
    assert table.candidates("x@b") == ("b",)
    assert (table.get("x@b").name, table.get("x@b").config.groups) == ("x@b", ("gpus",))
    assert table.candidates("y@elsewhere") == ("y@elsewhere",)
    assert table.get("y@elsewhere", "/opt/python").config.python == "/opt/python"
    assert table.get("a", "/opt/python").config.python == "python3"
    with pytest.raises(ConfigError, match="Nearest: gpus"):
        table.candidates("gpsu")


def test_paths_of_a_command_are_translated_once_and_the_longest_first():
    translate = _translator({"/p": "/there/project", "/p/var/runs/r": "/there/runs/r", "/usr/bin/python": "python3"})
    words = ["/usr/bin/python", "/p/train.py", "--into=/p/var/runs/r/attempt_1", "/p2/x", "PATH=/p:/p/lib", "x/p/y"]
    assert [translate(word) for word in words] == [
        "python3",
        "/there/project/train.py",
        "--into=/there/runs/r/attempt_1",
        "/p2/x",
        "PATH=/there/project:/there/project/lib",
        "x/p/y",
    ]


def test_an_old_python_a_missing_package_a_full_disk_and_a_wrong_clock_are_found():
    machines = Machines({"box": HostConfig(address="x@box", min_free_disk_mb=100)})
    trainer = {"version": [3, 9, 2], "packages": {"torch": None, "numpy": "2.0"}}
    facts = MachineFacts(
        {
            "cpus": 4,
            "gpus": [],
            "version": [3, 9, 2],
            "executable": "/usr/bin/python3",
            "trainer": trainer,
            "free_bytes": 1 << 20,
            "writable": True,
            "directory": "/d",
        },
        skew_s=-90.0,
    )
    shipment = Shipment(CodeSnapshot(__import__("pathlib").Path("/"), (), "nothing"), None, None)
    found = {one.check: (one.level, one.text) for one in machines.findings("box", facts, RunSpec(), shipment)}
    assert found["dependency:torch"] == ("refused", "/usr/bin/python3 on box (x@box) has no torch")
    assert found["disk"] == ("refused", "1 MB are free on box (x@box), and at least 100 MB are required")
    assert found["clock"][0] == "warning"
    assert "-90 s" in found["clock"][1]
    machines_python = [
        one.text for one in machines.findings("box", facts, RunSpec(), shipment) if one.level == "refused"
    ]
    assert machines_python[0] == "/usr/bin/python3 on box (x@box) is Python 3.9.2, and 3.11 is needed"


def test_a_run_that_cannot_be_seen_is_unreachable_and_not_stalled():
    monitor = AlarmMonitor(AlarmLimits(stall_after_s=10.0), now=0.0)
    progress = AttemptProgress(attempt=1)
    monitor.update(progress, 0, 50.0, unreachable="box is unreachable", is_visible=False)
    assert [alarm.code for alarm in monitor.alarms(50.0, 0.0)] == ["unreachable"]
    monitor.update(progress, 0, 55.0)
    assert monitor.alarms(55.0, 0.0) == ()
    monitor.update(progress, 0, 61.0)
    assert [alarm.code for alarm in monitor.alarms(61.0, 0.0)] == ["stalled"]


def test_the_place_of_an_attempt_is_read_as_it_was_written(tmp_path):
    attempt = Attempt(tmp_path)
    place = RemotePlace("box", "/d", "/d/code/x", ("0", "1"), 60.0, started=True, python="/opt/python")
    place.write(attempt)
    assert RemotePlace.read(attempt) == place
    assert RemotePlace.read(Attempt(tmp_path / "elsewhere")) is None
