"""A checkpoint whose digests are right and whose state is not ours is refused, never a traceback."""

import pytest

from palaestra.errors import CheckpointError
from palaestra.files.checkpoint import LEARNER, POLICY, SOURCE, STATE, open_checkpoint, write_checkpoint
from palaestra.train.run import wrap_checkpoint_errors

PROGRESS = b'"progress": {"updates": 1, "steps": 8}'


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"garbage", "cannot be used"),
        (b"[]", "it is a list"),
        (b"{}", "it has no section learner"),
        (b'{"learner": {}, "source": {}, "about": {}, "progress": {}}', "updates is None, which is not a count"),
        (b'{"learner": {}, "source": {}, "about": {}, "progress": {"updates": 1, "steps": "x"}}', "steps is 'x'"),
        (b'{"learner": {}, "source": [], "about": {}, ' + PROGRESS + b"}", "it has no section source"),
    ],
)
def test_a_state_without_its_sections_is_refused(tmp_path, state, reason):
    path = tmp_path / "update_00000001"
    write_checkpoint(path, {POLICY["vector"]: b"", LEARNER: b"", SOURCE: b"", STATE: state}, kind="vector")
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(path)


def test_a_schema_that_never_was_is_refused(tmp_path):
    path = tmp_path / "update_00000001"
    state = b'{"learner": {}, "source": {}, "about": {}, ' + PROGRESS + b"}"
    write_checkpoint(path, {POLICY["vector"]: b"", LEARNER: b"", SOURCE: b"", STATE: state}, kind="vector")
    assert open_checkpoint(path).schema == 2
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 0'))
    with pytest.raises(CheckpointError, match="schema 0 does not exist"):
        open_checkpoint(path)


def test_what_a_part_cannot_load_names_the_checkpoint(tmp_path):
    reason = r"a part of it cannot be used \(KeyError: 'adam.first'\)"
    with pytest.raises(CheckpointError, match=reason), wrap_checkpoint_errors(tmp_path):
        raise KeyError("adam.first")
