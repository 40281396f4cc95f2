"""The registry: what is put is found again, by its filters, newest first."""

import json
import sqlite3
from dataclasses import replace

import pytest

from palaestra.errors import ConfigError
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase
from palaestra.runs.record import Alarm, CheckpointRecord, RunRecord
from palaestra.runs.store.database import MIGRATIONS, RegistryCorrupt, open_for_reading
from palaestra.runs.store.registry import Registry, open_registry_read_only


@pytest.fixture
def registry(home):
    registry = Registry.open(home.registry)
    yield registry
    registry.close()


FULL = RunRecord(
    run_id="a-1",
    runner="cleanrl",
    agent_id="cleanrl/dqn",
    env_id="CartPole-v1",
    phase=Phase.RUNNING,
    reason="r",
    code="c",
    attempt=2,
    supervised=False,
    priority=-3,
    created=1.5,
    started=2.5,
    ended=3.5,
    watchdog=ProcessIdentity(1, 2, "b"),
    trainer=ProcessIdentity(3, 4, "b"),
    env_step=10**12,
    total_steps=7,
    episodes=8,
    episode_return=-9.25,
    seed=2**62,
    tags=("x", "ü"),
    alarms=(Alarm("stalled", "no news", 1.0),),
    tracking_url="https://w",
    bytes_on_disk=11,
)
PLAIN = RunRecord(run_id="b-1", runner="echo", agent_id="echo", env_id="", phase=Phase.QUEUED)


def test_every_column_comes_back_as_it_was_put(registry):
    registry.put(FULL)
    registry.put(PLAIN)
    assert registry.get("a-1") == FULL
    assert registry.get("b-1") == PLAIN
    assert registry.get("c-1") is None
    assert len(registry.ids()) == 2


def test_putting_again_replaces(registry):
    registry.put(FULL)
    registry.put(replace(FULL, phase=Phase.FAILED, alarms=()))
    assert registry.runs() == [replace(FULL, phase=Phase.FAILED, alarms=())]


def test_filters_and_order(registry):
    rows = [
        replace(PLAIN, run_id=f"r-{number}", created=float(number), runner=("echo", "sb3")[number % 2])
        for number in range(10)
    ]
    registry.put_many([*rows, replace(PLAIN, run_id="old", archived=True), replace(FULL, created=99.0)])

    def ids(**filters):
        return [run.run_id for run in registry.runs(**filters)]

    assert ids(limit=3) == ["a-1", "r-9", "r-8"]
    assert ids(runner="sb3") == ["r-9", "r-7", "r-5", "r-3", "r-1"]
    assert ids(env_id="CartPole-v1") == ["a-1"]
    assert ids(tag="ü") == ["a-1"]
    assert ids(tag="%") == []
    assert ids(phases=[Phase.RUNNING, Phase.STOPPING]) == ["a-1"]
    assert ids(phases=[]) == []
    assert ids(archived=True) == ["old"]
    assert registry.ids_with_prefix("r-") == ["r-0", "r-1", "r-2", "r-3", "r-4"]
    assert registry.ids_with_prefix("r-9") == ["r-9"]
    assert registry.ids_with_prefix("%") == []


def test_a_deleted_run_takes_its_checkpoints_along(registry):
    checkpoint = CheckpointRecord(
        checkpoint_id="0" * 16,
        run_id="a-1",
        agent_id="cleanrl/dqn",
        env_id="CartPole-v1",
        attempt=1,
        env_step=5,
        path="/x",
        sha256="0" * 64,
        size_bytes=1,
        format="torch_zip",
        created=1.0,
        best=True,
        metric=2.0,
        env_signature={"action_space": [2]},
        metrics_digest={"last": 1.0},
        verified=-1.0,
    )
    registry.put(FULL)
    registry.put_checkpoint(checkpoint)
    registry.put_checkpoint(replace(checkpoint, path="/y", run_id="", created=2.0))
    assert registry.checkpoints(run_id="a-1") == [checkpoint]
    assert [found.path for found in registry.checkpoints(agent_id="cleanrl/dqn", env_id="CartPole-v1")] == ["/y", "/x"]
    registry.delete("a-1")
    assert [found.path for found in registry.checkpoints()] == ["/y"]
    registry.delete_checkpoint("/y")
    assert registry.checkpoints() == []


def test_a_row_that_cannot_be_written_keeps_no_other_one_out(registry, caplog):
    broken = replace(PLAIN, run_id="z", runner=None)
    registry.put_many([PLAIN, broken, replace(PLAIN, run_id="y")])
    assert registry.ids() == {PLAIN.run_id, "y"}
    assert "z: the row cannot be written: NOT NULL" in caplog.text
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        registry.put(broken)


def test_a_row_that_cannot_be_read_hides_no_other_one(registry, caplog):
    registry.put_many([PLAIN, replace(PLAIN, run_id="odd")])
    registry._connection.execute("UPDATE runs SET phase = 'dancing' WHERE run_id = 'odd'")
    assert [run.run_id for run in registry.runs()] == [PLAIN.run_id]
    assert registry.get("odd") is None
    assert "odd: the row cannot be read" in caplog.text


def test_what_does_not_fit_into_a_row_is_cut_to_what_does(registry):
    registry.put(
        replace(PLAIN, env_step=10**30, total_steps=-(10**30), seed=10**30, env_id="a\ud800", tags=("\udcff",))
    )
    found = registry.get(PLAIN.run_id)
    assert (found.env_step, found.total_steps, found.seed) == (2**63 - 1, -(2**63) + 1, 2**63 - 1)
    assert (found.env_id, found.tags) == ("a?", ("?",))


def test_a_file_that_was_removed_or_replaced_is_not_written_to(registry, home):
    registry.put(PLAIN)
    assert registry.is_intact()
    home.registry.unlink()
    assert registry.was_replaced
    with pytest.raises(RegistryCorrupt, match="was removed or replaced"):
        registry.put(PLAIN)
    assert not registry.is_intact()


def test_a_directory_in_the_place_of_the_registry_is_named(home):
    home.registry.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"registry = .*registry.sqlite.*: is a directory\. Move it away"):
        Registry.open(home.registry)


def test_a_reader_sees_what_was_written_while_the_writer_is_open_and_afterwards(home):
    assert open_registry_read_only(home) is None
    writer = Registry.open(home.registry)
    writer.put(FULL)
    reader = open_registry_read_only(home)
    assert reader.runs() == [FULL]
    writer.put(PLAIN)
    assert len(reader.runs()) == 2
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.put(PLAIN)
    writer.close()
    reader.close()
    again = open_registry_read_only(home)
    assert len(again.runs()) == 2
    again.close()


def test_a_reader_sees_the_log_of_a_service_that_was_killed(home, tmp_path):
    writer = Registry.open(home.registry)
    writer.put(FULL)
    # What kill -9 leaves: a database and a log that nobody wrote back.
    left = type(home)(tmp_path / "left")
    left.path.mkdir()
    for tail in ("", "-wal"):
        source = home.registry.with_name(home.registry.name + tail)
        left.registry.with_name(source.name).write_bytes(source.read_bytes())
    writer.close()
    reader = open_registry_read_only(left)
    assert reader.runs() == [FULL]
    reader.close()


def test_a_registry_of_a_later_version_is_refused_with_the_remedy(home):
    Registry.open(home.registry).close()
    connection = sqlite3.connect(home.registry)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    for door in (Registry.open, open_for_reading):
        with pytest.raises(
            ConfigError,
            match=rf"has schema {len(MIGRATIONS) + 1}, and this version of Palaestra knows {len(MIGRATIONS)}\. Update",
        ):
            door(home.registry)


def test_an_unfinished_registry_is_nothing_to_read_yet(home):
    home.path.mkdir(parents=True)
    sqlite3.connect(home.registry).close()
    home.registry.touch()
    assert open_for_reading(home.registry) is None


def test_a_file_that_is_no_database_is_corrupt(home):
    home.path.mkdir(parents=True)
    home.registry.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(RegistryCorrupt):
        Registry.open(home.registry)
    with pytest.raises(RegistryCorrupt):
        open_for_reading(home.registry)


def test_a_query_over_many_runs_is_answered_from_an_index(registry):
    plan = registry._rows("EXPLAIN QUERY PLAN SELECT * FROM runs WHERE archived = 0 ORDER BY created DESC LIMIT 30", [])
    assert "USING INDEX runs_by_time" in str(plan)


def test_a_registry_of_the_first_version_is_brought_up_to_date_by_who_reads_it(home):
    home.path.mkdir(parents=True)
    old = sqlite3.connect(home.registry)
    old.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
    columns = "path checkpoint_id run_id agent_id env_id attempt env_step sha256 size_bytes format created best profile"
    values = ["/x", "0", "a", "echo/x", "X-v0", 1, 10_623, "00", 3, "torch_zip", 5.0, 1, "local"]
    marks = ",".join("?" * (len(values) + 2))
    insert = f"INSERT INTO checkpoints ({columns.replace(' ', ',')},env_signature,metrics_digest) VALUES ({marks})"
    old.execute(insert, [*values, "{}", "{}"])
    old.commit()

    for _ in range(2):
        reader = open_registry_read_only(home)
        (row,) = reader.checkpoints()
        assert (row.path, row.env_step, row.step_source, row.best) == ("/x", 10_623, "", True)
        reader.close()
    # A service of the first version that still runs goes on writing.
    old.execute(insert, ["/y", *values[1:], "{}", "{}"])
    old.commit()
    old.close()
    registry = Registry.open(home.registry)
    registry.put_checkpoint(replace(row, env_step=None, step_source="unknown"))
    assert [(row.path, row.env_step) for row in registry.checkpoints()] == [("/y", 10_623), ("/x", None)]
    registry.close()


def test_rows_of_an_earlier_version_are_read_with_the_current_names_and_not_changed(home):
    identity = {"pid": 1, "started": 2, "boot_id": "b"}
    alarm = {"code": "warden_gone", "text": 'it says "warden_gone"', "since": 3.0}
    registry = Registry.open(home.registry)
    registry.put(replace(FULL, watchdog=None, trainer=None, alarms=()))
    registry.close()
    old = sqlite3.connect(home.registry)
    process = json.dumps({"warden": identity, "trainer": None})
    old.execute("UPDATE runs SET process = ?, alarms = ?", [process, json.dumps([alarm])])
    old.commit()

    reader = open_registry_read_only(home)
    (row,) = reader.runs()
    reader.close()
    # Its service may still be running, and would refuse another schema.
    assert old.execute("SELECT process FROM runs").fetchone() == (process,)
    old.close()
    assert (row.watchdog, row.trainer) == (ProcessIdentity(**identity), None)
    assert row.alarms == (Alarm("watchdog_gone", 'it says "warden_gone"', 3.0),)
