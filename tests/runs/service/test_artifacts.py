"""The bytes of a run over HTTP: which files are listed, ranges, redaction, and nothing outside the run."""

import hashlib
import io
import json
import os
import tarfile

import pytest
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import CheckpointError, ConfigError, UnknownRun
from palaestra.files.atomic import write_json
from palaestra.runs.artifacts import CheckpointStream
from palaestra.runs.state.attempt_files import AttemptPlan

SECRET = "sk-abcdefghijklmnop"


@pytest.fixture
def run(served):
    return served.home.run(served.done())


def _write(path, data=b"0123456789"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_files_are_listed_with_what_they_are_and_the_rest_is_not(served, run):
    attempt = run.attempt(1)
    AttemptPlan(checkpoints=("runs/**/*.model",)).write(attempt)
    run.config.write_text("steps: 3\n")
    for name in (
        "checkpoints/update_1/policy.safetensors",
        "videos/a.webm",
        "trajectories/00000001_e.safetensors",
        "evaluations/update_1-x/trajectories/00000001_e.safetensors",
        "tensorboard/events.out.tfevents.1",
        "work/runs/x/events.out.tfevents.2",
        "work/runs/x/own.model",
        "work/runs/x/dataset.bin",
        "work/.netrc",
        "tmp/scratch",
        ".metrics.jsonl.lock",
        "series/0.pts",
        "system.jsonl",
    ):
        _write(attempt.path / name)
    listed = {one.name: one for one in served.trainer.artifacts(run.run_id)}
    kinds = {name: one.kind for name, one in listed.items()}
    assert kinds == {
        "attempt_1/checkpoints/update_1/policy.safetensors": "checkpoint",
        "attempt_1/command.json": "command",
        "attempt_1/evaluations/update_1-x/trajectories/00000001_e.safetensors": "evaluation",
        "attempt_1/metrics.jsonl": "journal",
        "attempt_1/stdout.log": "log",
        "attempt_1/system.jsonl": "system",
        "attempt_1/tensorboard/events.out.tfevents.1": "tensorboard",
        "attempt_1/trajectories/00000001_e.safetensors": "trajectory",
        "attempt_1/videos/a.webm": "video",
        "attempt_1/work/runs/x/events.out.tfevents.2": "tensorboard",
        "attempt_1/work/runs/x/own.model": "checkpoint",
        "command.json": "command",
        "config.yaml": "config",
        "events.jsonl": "events",
        "resolved.json": "resolved",
        "spec.json": "spec",
    }
    clip = listed["attempt_1/videos/a.webm"]
    assert (clip.size_bytes, clip.media_type, clip.attempt, clip.redacted) == (10, "video/webm", 1, False)
    assert (listed["config.yaml"].attempt, listed["config.yaml"].media_type) == (0, "application/yaml")
    assert [one.name for one in served.trainer.artifacts(run.run_id, kind="video")] == ["attempt_1/videos/a.webm"]
    assert len(served.trainer.artifacts(run.run_id, limit=3)) == 3


def test_bytes_and_ranges_of_a_file_are_sent(served, run):
    _write(run.attempt(1).checkpoints / "update_1" / "policy.safetensors")
    name = "attempt_1/checkpoints/update_1/policy.safetensors"
    assert served.trainer.artifact_bytes(run.run_id, name) == b"0123456789"
    place = f"/runs/{run.run_id}/artifacts/{name}"
    for header, body, told in (
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-999", b"89", "bytes 8-9/10"),
    ):
        part = served.ask("GET", place, headers={"Range": header})
        assert (part.status, part.body, part.headers["Content-Range"]) == (206, body, told)
    assert served.ask("GET", place, headers={"Range": "bytes=10-"}).status == 416
    for bad in ("bytes=4-2", "bytes=-", "lines=1-2", "bytes=0-1,3-4"):
        answer = served.ask("GET", place, headers={"Range": bad})
        assert (answer.status, answer.json["error"]["place"]) == (422, "Range"), bad


def test_an_empty_file_is_sent(served, run):
    _write(run.attempt(1).videos / "empty.webm", b"")
    assert served.trainer.artifact_bytes(run.run_id, "attempt_1/videos/empty.webm") == b""


def test_secrets_in_texts_are_replaced_in_every_form(served, run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-very-private-value")
    run.attempt(1).stdout.write_text(f"login {SECRET}\nwith a-very-private-value\nlast line without an end")
    run.config.write_text(f'# mine\nhub:\n  api_key: "abc"\n  url: {SECRET}\nlist:\n  - token: x\nmax_tokens: 5\n')
    write_json(run.resolved, {"hub": {"api_key": "abc", "pad_token": "<pad>"}, "note": SECRET})
    read = served.trainer.artifact_bytes
    log = read(run.run_id, "attempt_1/stdout.log").decode()
    assert log == "login ***\nwith ***\nlast line without an end"
    config = read(run.run_id, "config.yaml").decode()
    assert config == '# mine\nhub:\n  api_key: "***"\n  url: ***\nlist:\n  - token: "***"\nmax_tokens: 5\n'
    resolved = json.loads(read(run.run_id, "resolved.json"))
    assert resolved == {"hub": {"api_key": "***", "pad_token": "<pad>"}, "note": "***"}
    whole = served.ask("GET", f"/runs/{run.run_id}/artifacts/attempt_1/stdout.log", headers={"Range": "bytes=0-3"})
    assert (whole.status, whole.body.decode(), whole.headers["Accept-Ranges"]) == (200, log, "none")


def test_a_secret_at_the_end_of_a_part_of_a_long_log_is_replaced(served, run):
    filler = "x" * 63 + "\n"
    # The secret spans the first megabyte and the second.
    text = filler * (2**14 - 1) + f"{'y' * 60} {SECRET} tail\n" + filler
    run.attempt(1).stdout.write_text(text)
    sent = served.trainer.artifact_bytes(run.run_id, "attempt_1/stdout.log").decode()
    assert sent == text.replace(SECRET, "***")


@pytest.mark.parametrize(
    "name",
    [
        "attempt_1/process.json",
        "attempt_1/plan.json",
        "attempt_1/launch.json",
        "attempt_1/work/secrets.txt",
        "attempt_1/checkpoints/.hidden",
        "attempt_1/checkpoints/linked.safetensors",
        "attempt_1/checkpoints/pipe",
        "attempt_1/checkpoints/twin.safetensors",
        "attempt_1/linked/a.webm",
        "attempt_2/videos/a.webm",
        "attempt_x/videos/a.webm",
        "../../service/token",
        "attempt_1/checkpoints/../../../../service/token",
        "attempt_1//stdout.log",
        "/etc/passwd",
        "attempt_1/checkpoints",
        "attempt_1/videos/a\0.webm",
        "nothing",
    ],
)
def test_nothing_else_is_sent_under_any_name(served, run, name, tmp_path):
    checkpoints = run.attempt(1).checkpoints
    _write(checkpoints / ".hidden")
    _write(run.attempt(1).work / "secrets.txt")
    (checkpoints / "linked.safetensors").symlink_to(served.home.token)
    os.mkfifo(checkpoints / "pipe")
    os.link(served.home.token, checkpoints / "twin.safetensors")
    _write(tmp_path / "a.webm")
    with pytest.raises(UnknownRun, match="no such file"):
        served.trainer.artifact_bytes(run.run_id, name)
    (checkpoints / "twin.safetensors").unlink()


def test_a_directory_that_links_out_of_the_run_is_not_followed(served, run, tmp_path):
    _write(tmp_path / "a.webm")
    run.attempt(1).videos.symlink_to(tmp_path)
    assert served.trainer.artifacts(run.run_id, kind="video") == []
    with pytest.raises(UnknownRun):
        served.trainer.artifact_bytes(run.run_id, "attempt_1/videos/a.webm")


def test_bad_requests_for_files_are_refused(served, run):
    assert served.ask("GET", f"/runs/{run.run_id}/artifacts?kind=token").json["error"]["place"] == "kind"
    assert served.ask("GET", f"/runs/{run.run_id}/artifacts?limit=0").json["error"]["place"] == "limit"
    assert served.ask("GET", f"/runs/{run.run_id}/artifacts/{'x' * 1100}").status == 422
    assert served.ask("GET", "/runs/nobody/artifacts").status == 404
    served.trainer.archive_run(run.run_id)
    with pytest.raises(ConfigError, match="is archived"):
        served.trainer.artifacts(run.run_id)


def test_the_bytes_of_a_checkpoint_that_is_a_file_have_its_hash(served, run):
    data = b"PK\x03\x04 not really"
    _write(run.attempt(1).checkpoints / "step_5.pt", data)
    record = next(row for row in served.trainer.checkpoints(run=run.run_id) if row.path.endswith("step_5.pt"))
    answer = served.ask("GET", f"/checkpoints/{record.checkpoint_id}/bytes")
    sha256 = hashlib.sha256(data).hexdigest()
    assert (answer.body, answer.headers["X-Content-SHA256"], answer.headers["X-Checkpoint-SHA256"]) == (
        data,
        sha256,
        sha256,
    )
    assert served.trainer.checkpoint_bytes(record.checkpoint_id) == data


def test_a_directory_is_sent_as_a_tar_that_depends_on_its_contents_only(served, tmp_path):
    own_checkpoint(tmp_path / "checkpoint")
    record = served.trainer.import_checkpoint(tmp_path / "checkpoint")
    data = served.trainer.checkpoint_bytes(record.checkpoint_id)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        contents = {member.name.partition("/")[2]: tar.extractfile(member).read() for member in tar}
    saved = {p.name: p.read_bytes() for p in (tmp_path / "checkpoint").iterdir()}
    assert {name: contents[name] for name in saved} == saved
    answer = served.ask("GET", f"/checkpoints/{record.checkpoint_id}/bytes")
    assert answer.body == data
    assert answer.headers["X-Content-SHA256"] == hashlib.sha256(data).hexdigest()
    assert answer.headers["X-Checkpoint-SHA256"] == record.sha256
    assert answer.headers["Content-Type"] == "application/x-tar"


def test_two_equal_directories_are_the_same_stream_whatever_their_times_and_links(tmp_path):
    streams = []
    for place, when in (("a", 1.0), ("b", 5000.0)):
        directory = tmp_path / place / "same"
        for name in ("z.bin", f"deep/{'long' * 40}.bin", "tmp/x", ".hidden"):
            _write(directory / name, name.encode())
            os.utime(directory / name, (when, when))
        (directory / "link").symlink_to("/etc/passwd")
        streams.append(CheckpointStream(directory))
    first, second = (b"".join(stream.read()) for stream in streams)
    assert first == second
    assert len(first) == streams[0].size
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert sorted(member.name for member in tar) == [
            "same/.hidden",
            f"same/deep/{'long' * 40}.bin",
            "same/tmp/x",
            "same/z.bin",
        ]


def test_a_checkpoint_that_was_changed_is_not_handed_out(served, run):
    _write(run.attempt(1).checkpoints / "step_5.pt", b"as it was saved")
    served.trainer.verify_checkpoint(
        next(row for row in served.trainer.checkpoints(run=run.run_id) if row.path.endswith("step_5.pt")).checkpoint_id
    )
    (record,) = [row for row in served.trainer.checkpoints(run=run.run_id) if row.path.endswith("step_5.pt")]
    _write(run.attempt(1).checkpoints / "step_5.pt", b"as it is by now")
    with pytest.raises(CheckpointError, match="changed or damaged"):
        served.trainer.checkpoint_bytes(record.checkpoint_id)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        served.trainer.checkpoint_bytes("0000")
