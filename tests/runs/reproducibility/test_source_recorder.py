"""The code and the environment of every run are recorded beside it."""

import asyncio
import json
import sys
import threading

from tests.runs.attempts import wait_until
from tests.runs.supervisors import echo, run_and_close_supervisor, run_supervisor, wait_for_end

from palaestra.redaction import Redactor
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.reproducibility import source_recorder
from palaestra.runs.reproducibility.environment_record import collect_environment, find_python
from palaestra.runs.reproducibility.source_recorder import SourceRecorder, read_source
from palaestra.runs.store.rebuild import read_run

from .repositories import git, make_repository


def test_every_run_has_its_code_and_environment_and_the_row_their_versions(home, tmp_path):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")

    async def body():
        async with run_supervisor(home) as supervisor:
            record = await supervisor.submit(echo(steps=3, invoked_from=root))
            await wait_for_end(supervisor, record.run_id)
            await wait_until(lambda: supervisor.get_run(record.run_id).code_version, "its version")
            return supervisor.get_run(record.run_id)

    record = asyncio.run(body())
    source = read_source(home.run(record.run_id).attempt(1))
    assert source.code.commit == git(root, "rev-parse", "HEAD")
    assert record.code_version == source.code.commit[:12]
    assert source.environment.python == ".".join(map(str, sys.version_info[:3]))
    assert record.environment_digest == source.environment.digest != ""
    packages = (home.run(record.run_id).attempt(1).source / "packages.txt").read_text().splitlines()
    assert len(packages) == source.environment.package_count + 1
    assert any(line.startswith("pytest==") for line in packages)
    rebuilt = read_run(home.run(record.run_id))
    assert (rebuilt.code_version, rebuilt.environment_digest) == (record.code_version, record.environment_digest)


def test_a_record_that_a_killed_service_did_not_write_is_written_by_the_next(home, tmp_path, monkeypatch):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    go = tmp_path / "go"

    async def first():
        with monkeypatch.context() as patch:
            patch.setattr(SourceRecorder, "add", lambda *_: None)
            async with run_and_close_supervisor(home) as supervisor:
                return (await supervisor.submit(echo(steps=1, until=str(go), invoked_from=root))).run_id

    async def second(run_id):
        async with run_supervisor(home) as supervisor:
            await wait_until(lambda: supervisor.get_run(run_id).code_version, "its version")
            go.touch()
            return await wait_for_end(supervisor, run_id)

    run_id = asyncio.run(first())
    assert not home.run(run_id).attempt(1).source.exists()
    assert asyncio.run(second(run_id)).code_version


def test_an_edit_before_the_versions_are_known_is_kept(home, tmp_path, monkeypatch):
    go = threading.Event()
    collect = source_recorder.collect_code
    monkeypatch.setattr(source_recorder, "collect_code", lambda *a, **k: go.wait(30) and collect(*a, **k))
    root = make_repository(tmp_path / "project", train__py="x = 1\n")

    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3, invoked_from=root))).run_id
            await wait_for_end(supervisor, run_id)
            await wait_until(lambda: supervisor.idle, "the end of the run")
            await supervisor.edit(run_id, {"name": "baseline", "tags": ("a",)})
            go.set()
            await wait_until(lambda: supervisor.get_run(run_id).code_version, "its version")
            return supervisor.get_run(run_id)

    record = asyncio.run(body())
    assert (record.name, record.tags, record.phase) == ("baseline", ("a",), "succeeded")


def test_versions_that_arrive_after_a_run_was_deleted_do_not_bring_it_back(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3))).run_id
            await wait_for_end(supervisor, run_id)
            await supervisor.delete(run_id)
            await supervisor._write_versions(run_id, {"code_version": "late"})
            return supervisor._registry.get(run_id)

    assert asyncio.run(body()) is None


def test_a_run_is_archived_with_the_record_that_was_being_written(home, tmp_path, monkeypatch):
    writing, go = threading.Event(), threading.Event()
    collect = source_recorder.collect_code

    def collect_slowly(*arguments, **options):
        writing.set()
        go.wait(30)
        return collect(*arguments, **options)

    monkeypatch.setattr(source_recorder, "collect_code", collect_slowly)
    root = make_repository(tmp_path / "project", train__py="x = 1\n")

    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3, invoked_from=root))).run_id
            await wait_for_end(supervisor, run_id)
            await wait_until(writing.is_set, "the recorder")
            archiving = asyncio.create_task(supervisor.archive(run_id))
            _, waiting = await asyncio.wait({archiving}, timeout=0.5)
            assert waiting == {archiving}
            go.set()
            await archiving
            return await supervisor.restore(run_id)

    record = asyncio.run(body())
    assert read_source(home.run(record.run_id).attempt(1)).code.commit == git(root, "rev-parse", "HEAD")


def test_a_recorder_that_fails_does_not_disturb_the_run(home, tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr("palaestra.runs.reproducibility.source_recorder.collect_code", fail)

    async def body():
        async with run_supervisor(home) as supervisor:
            record = await supervisor.submit(echo(steps=3))
            record = await wait_for_end(supervisor, record.run_id)
            await wait_until(lambda: "its code could not be recorded" in caplog.text, "the warning")
            return record

    record = asyncio.run(body())
    assert (record.phase, record.code_version) == ("succeeded", "")
    assert isinstance(RunReader(home).run(record.run_id), RunRecord)


def test_the_interpreter_of_a_script_is_the_one_beside_it(tmp_path):
    tool = tmp_path / "bin" / "torchrun"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    (tool.parent / "python").symlink_to(sys.executable)

    assert find_python("/usr/bin/python3.11") == "/usr/bin/python3.11"
    assert find_python(str(tool)) == str(tool.parent / "python")
    assert find_python("/bin/sh") is None


def test_a_program_without_an_interpreter_has_a_machine_and_no_packages(tmp_path):
    record = collect_environment({"argv": ["/bin/sh"]}, tmp_path, ("0",), redact=Redactor())
    assert (record.python, record.digest, record.gpus) == ("", "", ["GPU 0"])
    assert record.cores >= 1
    assert not (tmp_path / "packages.txt").exists()
    broken = collect_environment({"argv": ["/no/such/python"]}, tmp_path, (), redact=Redactor())
    assert broken.problems == ["the packages of /no/such/python could not be listed"]
    assert json.loads(json.dumps(vars(broken)))
