"""Machines that cannot take a run: one clear message each, nothing written, nothing left running."""

import asyncio
import os
import subprocess

import pytest
from tests.runs.attempts import wait_until
from tests.runs.remote.sshd import needs_sshd
from tests.runs.supervisors import echo, run_supervisor, wait_for_end, wait_for_phase

from palaestra.errors import HostUnreachable, LaunchRefused
from palaestra.files.home import Home
from palaestra.runs.phase import Phase
from palaestra.runs.remote.connection import run_command

pytestmark = needs_sshd


def _submit(home, on="box", **hosts):
    """The message of a request that is refused; nothing may be written."""

    async def body():
        async with run_supervisor(home, hosts=hosts) as supervisor:
            with pytest.raises((LaunchRefused, HostUnreachable)) as refused:
                await supervisor.submit(echo(on=on, steps=1, invoked_from=home.base))
            assert not list(home.runs.iterdir())
            return str(refused.value)

    return asyncio.run(body())


def test_an_unreachable_machine_a_wrong_key_and_a_missing_python_are_told_apart(home, sshd):
    sshd._make_key("other")
    refused = _submit(home, box=sshd.host(ssh_options=sshd.options("other")))
    assert "refuses the user or the key (root@127.0.0.1: Permission denied (publickey))" in refused
    assert refused.endswith(f"ssh -p {sshd.port} root@127.0.0.1 must work without a password.")
    missing = _submit(home, box=sshd.host(python="/no/such/python"))
    assert "has no usable Python as '/no/such/python'" in missing
    assert missing.endswith("Name one with --python, or as python of the host's settings.")
    sshd.stop()
    away = _submit(home, box=sshd.host())
    assert f"box: cannot be reached (ssh: connect to host 127.0.0.1 port {sshd.port}: Connection refused)" in away
    sshd.start()


def test_a_changed_host_key_is_one_clear_message_and_never_a_connection(home, sshd):
    sshd.stop()
    sshd.change_host_key()
    sshd.start()
    message = _submit(home, box=sshd.host())
    assert "its host key has changed, so it may be another machine" in message
    assert f"ssh-keygen -R '[127.0.0.1]:{sshd.port}'" in message


def test_an_address_that_is_none_and_a_misspelt_host_are_refused_before_any_connection(home, sshd):
    async def body():
        async with run_supervisor(home, hosts={"gpu-box": sshd.host()}) as supervisor:
            for on, words in (
                ("-oProxyCommand=touch x", "is not the address of a machine"),
                ("user@host:99999", "99999 is not a port"),
                ("ftp://host", "is not the address of a Ray cluster"),
                ("gpu-bxo", "Nearest: gpu-box"),
            ):
                with pytest.raises(Exception, match=words):
                    await supervisor.submit(echo(on=on, steps=1))

    asyncio.run(body())


def test_a_full_disk_there_refuses_the_run_and_leaves_nothing_half_unpacked(home, sshd, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:

        async def body():
            async with run_supervisor(home, hosts={"box": sshd.host(directory=str(small))}) as supervisor:
                record = await supervisor.submit(echo(on="box", steps=1, invoked_from=tmp_path / "sshd"))
                return await wait_for_end(supervisor, record.run_id)

        record = asyncio.run(body())
        assert record.phase is Phase.REFUSED
        assert "the package palaestra cannot be stored there" in record.reason
        assert "No space left on device" in record.reason
        assert list((small / "code").iterdir()) == []
        other = Home(tmp_path / "other" / "var" / "training")
        too_full = _submit(other, box=sshd.host(directory=str(small), min_free_disk_mb=4))
        assert "at least 4 MB are required" in too_full
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_program_that_cannot_be_executed_there_is_refused_with_its_reason(home, sshd, tmp_path):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            spec = echo(on="box", steps=1, python=str(tmp_path / "gone"), invoked_from=tmp_path / "sshd")
            with pytest.raises(LaunchRefused, match=r"gone on box .* cannot be used \(No such file or directory\)"):
                await supervisor.submit(spec)

    asyncio.run(body())


def test_a_queued_run_waits_for_a_machine_that_went_away_and_starts_when_it_is_back(home, sshd, tmp_path, monkeypatch):
    monkeypatch.setattr("palaestra.runs.supervisor.launch_planner._RETRY_MACHINE_S", 0.5)
    monkeypatch.setattr("palaestra.runs.remote.machines._ANSWER_HOLDS_S", 0.0)

    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}, scan_every_s=0.1) as supervisor:
            await supervisor.drain(True)
            record = await supervisor.submit(echo(on="box", steps=1, invoked_from=sshd.directory))
            sshd.stop()
            await supervisor.drain(False)
            waits = "waits for box: cannot be reached"
            await wait_until(lambda: waits in supervisor.get_run(record.run_id).reason, "the reason")
            assert supervisor.get_run(record.run_id).phase is Phase.QUEUED
            sshd.start()
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.attempt) == (Phase.SUCCEEDED, 1)


def test_a_host_has_slots_of_its_own_and_a_group_takes_the_first_free_machine(home, sshd, tmp_path):
    async def body():
        hosts = {"one": sshd.host(max_running=1, groups=("pool",)), "two": sshd.host(max_running=1, groups=("pool",))}
        async with run_supervisor(home, hosts=hosts, max_running=1) as supervisor:
            config = {"steps": 1, "until": str(tmp_path / "go"), "invoked_from": sshd.directory}
            runs = [await supervisor.submit(echo(on=on, **config)) for on in ("one", "pool", "pool")]
            for record in runs[:2]:
                await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            assert [supervisor.get_run(record.run_id).host for record in runs] == ["one", "two", "pool"]
            slots = [f"waits for a slot on {name} (1 of 1 in use)" for name in ("one", "two")]
            assert supervisor.get_run(runs[2].run_id).reason == "; ".join(slots)
            (tmp_path / "go").touch()
            return [await wait_for_end(supervisor, record.run_id) for record in runs]

    assert [record.phase for record in asyncio.run(body())] == [Phase.SUCCEEDED] * 3


def test_a_machine_whose_login_prints_without_end_or_no_document_is_refused(home, sshd, tmp_path):
    for name, script in (("flood", "head -c 50000000 /dev/zero; echo"), ("list", "echo '[1]'"), ("nothing", ":")):
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o700)
        message = _submit(home, box=sshd.host(python=str(python)))
        assert "its answer cannot be read. Its login scripts must print nothing" in message


def test_the_output_of_a_command_is_kept_to_its_last_megabyte():
    command = ["sh", "-c", "head -c 3000000 /dev/zero; echo end"]
    returncode, output, _ = asyncio.run(run_command(command, b"x" * 3_000_000, os.environ, 60))
    assert (returncode, len(output), output[-4:]) == (0, 1 << 20, b"end\n")


def test_options_of_ssh_that_cannot_be_split_are_one_clear_message(home, sshd, monkeypatch):
    monkeypatch.setenv("PALAESTRA_SSH_OPTIONS", "-o 'User")
    message = _submit(home, box=sshd.host())
    assert "box: PALAESTRA_SSH_OPTIONS cannot be read (No closing quotation)" in message


def test_a_project_with_a_link_out_of_it_is_refused_with_its_name(home, sshd, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "data").symlink_to("/etc/hostname")
    subprocess.run(["git", "-C", project, "init", "-q"], check=True)

    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(echo(on="box", steps=1, invoked_from=project))
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.REFUSED
    assert "cannot be stored there ('data' is a link to an absolute path)" in record.reason
    assert record.reason.endswith("exclude others with .gitignore.")
