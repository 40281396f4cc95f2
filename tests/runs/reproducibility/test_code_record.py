"""Which code ran: a commit with its changes, or the files of a directory."""

import os
import tarfile
import threading
import time
from dataclasses import asdict

import pytest

from palaestra.redaction import Redactor
from palaestra.runs.reproducibility.code_record import (
    code_from_json,
    collect_code,
    hash_content,
    read_kept_file,
)

from .repositories import commit, git, make_repository

TOKEN = "ghp_abcdefghijklmnop1234"


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    return path


def collect(root, out, **options):
    options = {"excluded": root / "var" / "training", "redact": Redactor(), "clock": lambda: 7.0, **options}
    return collect_code(root, out, **options)


def test_a_clean_repository_is_its_commit(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    record = collect(root, out)

    head = git(root, "rev-parse", "HEAD")
    assert (record.kind, record.commit, record.branch, record.subject) == ("git", head, "main", "First")
    assert record.version == head[:12]
    assert (
        record.files == {"train.py": hash_content(b"x = 1\n")} == {"train.py": git(root, "rev-parse", "HEAD:train.py")}
    )
    assert record.description == f"{head[:12]} (main)"
    assert list(out.iterdir()) == []
    assert record.collected == 7.0
    assert code_from_json(asdict(record)) == record


def test_changed_new_and_removed_files_are_named_and_kept(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n", old__py="", __gitignore="*.bin\n")
    (root / "train.py").write_text("x = 2\n")
    (root / "old.py").unlink()
    (root / "new.py").write_text("y = 1\n")
    (root / "data.bin").write_bytes(b"ignored")
    state = root / "var" / "training" / "runs"
    state.mkdir(parents=True)
    (state / "ours.json").write_text("{}")
    (root / "sub").mkdir()
    record = collect(root / "sub", out, excluded=root / "var" / "training")

    assert record.changed == {"old.py": "", "train.py": hash_content(b"x = 2\n")}
    assert record.untracked == {"new.py": hash_content(b"y = 1\n")}
    assert set(record.files) == {".gitignore", "train.py", "new.py"}
    assert record.kept == ["train.py", "new.py"]
    assert record.version.startswith(f"{record.commit[:12]}+")
    assert record.description.endswith(" (main), 3 files changed")
    assert "-x = 1\n+x = 2\n" in (out / "changes.diff").read_text()
    assert read_kept_file(out, "new.py") == b"y = 1\n"
    assert read_kept_file(out, "missing.py") is None


def test_the_version_changes_with_the_content_and_only_with_it(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    clean = collect(root, out).version
    (root / "train.py").write_text("x = 2\n")
    changed = collect(root, out).version
    os.utime(root / "train.py", (1, 1))
    assert collect(root, out).version == changed != clean
    (root / "train.py").write_text("x = 3\n")
    assert collect(root, out).version not in (changed, clean)


def test_without_a_repository_the_source_files_are_kept(tmp_path, out):
    root = tmp_path / "project"
    (root / "package" / "__pycache__").mkdir(parents=True)
    (root / "train.py").write_text("x = 1\n")
    (root / "package" / "model.py").write_text("y = 1\n")
    (root / "package" / "__pycache__" / "model.py").write_text("z = 1\n")
    (root / "weights.bin").write_bytes(b"\0" * 100)
    (root / "link.py").symlink_to("/etc/passwd")
    record = collect(root, out)

    assert (record.kind, sorted(record.files)) == ("files", ["package/model.py", "train.py"])
    assert record.version.startswith("files-")
    with tarfile.open(out / "files.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["package/model.py", "train.py"]
    assert collect(root, out, has_script=False).kind == "none"


def test_without_git_the_source_files_are_kept(tmp_path, out, monkeypatch):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect(root, out).kind == "files"


def test_a_repository_without_a_commit_is_recorded(tmp_path, out):
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    (root / "train.py").write_text("x = 1\n")
    record = collect(root, out)

    assert record.version.startswith("no-commit+")
    assert record.kept == ["train.py"]


def test_secrets_are_replaced_and_files_of_secrets_are_not_read(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="", __env__local="A=first\n")
    (root / "train.py").write_text(f"key = '{TOKEN}'\npassword = 'correct-horse'\n")
    (root / ".env.local").write_text("A=hidden-value\n")
    (root / "new.pem").write_text("hidden-value")
    git(root, "config", "remote.origin.url", "https://me:hunter22@example.org/x.git")
    record = collect(root, out, redact=Redactor(["correct-horse"]))

    stored = (out / "changes.diff").read_text() + read_kept_file(out, "train.py").decode() + str(asdict(record))
    for secret in (TOKEN, "correct-horse", "hidden-value", "hunter22"):
        assert secret not in stored
    assert read_kept_file(out, ".env.local") is None
    assert "new.pem: may hold secrets" in record.left_out


def test_a_changed_file_of_secrets_is_not_in_the_diff_and_a_module_about_secrets_is(tmp_path, out):
    root = make_repository(tmp_path / "project", Credentials__json="first\n", my_secret_sampler__py="first\n")
    (root / "Credentials.json").write_text("correct-horse\n")
    (root / "my_secret_sampler.py").write_text("draw = 1\n")
    collect(root, out)
    diff = (out / "changes.diff").read_text()
    assert "correct-horse" not in diff
    assert "+draw = 1" in diff


def test_programs_that_a_repository_configures_are_not_started(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n", __gitattributes="*.py diff=evil\n")
    for key in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command"):
        git(root, "config", key, f"touch {tmp_path}/executed; true")
    (root / "train.py").write_text("x = 2\n")
    record = collect(root, out)

    assert record.changed == {"train.py": hash_content(b"x = 2\n")}
    assert not (tmp_path / "executed").exists()


def test_a_dirty_repository_of_100_megabytes_takes_bounded_time_and_space(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    line = "0123456789abcde\n"
    for number in range(50):
        (root / f"tracked{number}.txt").write_text(line * 32_000)
    commit(root, "Data")
    for number in range(50):
        (root / f"tracked{number}.txt").write_text(line.upper() * 32_000)
        (root / f"new{number}.txt").write_bytes(b"x" * (3 << 19))
    (root / "huge.txt").write_bytes(b"x" * (20 << 20))
    (root / "train.py").write_text("x = 2\n")
    begun = time.perf_counter()
    record = collect(root, out)
    elapsed = time.perf_counter() - begun

    assert len(record.changed) + len(record.untracked) == 102
    assert "train.py" in record.kept
    assert any("is larger than 1 MB" in text for text in record.left_out)
    assert record.problems == ["changes.diff holds the first 5,242,880 bytes of the changes"]
    assert sum(path.stat().st_size for path in out.iterdir()) < 30 << 20
    assert elapsed < 60


def test_a_service_that_is_stopped_does_not_wait_for_the_record(tmp_path, out):
    root = make_repository(tmp_path / "project", train__py="x = 1\n")
    closing = threading.Event()
    closing.set()
    begun = time.perf_counter()
    collect(root, out, closing=closing)
    assert time.perf_counter() - begun < 2
