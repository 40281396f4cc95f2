"""Rollouts joined without mixing streams, and rollouts on disk."""

import json
import struct

import numpy as np
import pytest
import torch

from palaestra.errors import CheckpointError, ExperienceError
from palaestra.experience import ArraySpec, Rollout, RolloutBuffer, combine_rollouts

FLOAT, INT, BYTE = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)


def _rollout(steps=4, envs=2, *, stream=0, start=0, seed=0, nested=False, masked=False, paused=False):
    rng = np.random.default_rng([seed, stream, start])
    parts = {"camera": ArraySpec((2, 2, 1), BYTE), "body/joints": ArraySpec((3,), FLOAT)}
    observation = parts if nested else ArraySpec((3,), FLOAT)
    buffer = RolloutBuffer(steps, envs, observation, ArraySpec((), INT), mask_size=4 if masked else 0)
    columns = buffer.observation.values() if nested else [buffer.observation]
    for column in (*columns, buffer.action, buffer.log_prob, buffer.value, buffer.reward, buffer.next_value):
        column[:] = rng.normal(size=column.shape) * 10 + 50
    buffer.terminated[:] = rng.random(buffer.terminated.shape) < 0.2
    if paused:
        buffer.valid[0, 0] = False
    buffer.position, buffer.first_stream, buffer.first_env_step = steps, stream, start
    return buffer.get()


def test_rollouts_that_follow_on_each_other_become_one_long_one():
    first, second, third = (_rollout(start=start) for start in (0, 4, 8))
    joined = combine_rollouts([first, second, third])
    assert joined.batch_size == (12, 2)
    assert torch.equal(joined["reward"], torch.cat([r["reward"] for r in (first, second, third)]))
    assert joined["env_step"][:, 0].tolist() == list(range(12))


def test_rollouts_given_in_the_wrong_order_are_put_in_time_order():
    first, second = _rollout(start=0), _rollout(start=4)
    assert (combine_rollouts([second, first]) == combine_rollouts([first, second])).all()


def test_rollouts_of_unequal_length_may_follow_on_each_other():
    joined = combine_rollouts([_rollout(3, start=0), _rollout(5, start=3)])
    assert joined.batch_size == (8, 2)


def test_different_environments_go_side_by_side():
    one, other = _rollout(stream=0), _rollout(stream=1_000_000)
    joined = combine_rollouts([one, other])
    assert joined.batch_size == (4, 4)
    assert torch.equal(joined["reward"], torch.cat([one["reward"], other["reward"]], 1))
    assert joined["stream"][0].tolist() == [0, 1, 1_000_000, 1_000_001]


def test_a_gap_in_time_is_not_bridged():
    first, later = _rollout(start=0), _rollout(start=5)  # step 4 is missing
    assert combine_rollouts([first, later]).batch_size == (4, 4)


def test_the_same_rollout_twice_stands_side_by_side():
    assert combine_rollouts([_rollout(), _rollout()]).batch_size == (4, 4)


def test_different_environments_of_unequal_length_are_refused_with_the_remedy():
    with pytest.raises(ExperienceError, match=r"lengths \[3, 4\].*pass the list to learn"):
        combine_rollouts([_rollout(4), _rollout(3, stream=1_000_000)])


def test_an_empty_list_is_refused():
    with pytest.raises(ExperienceError, match="empty list"):
        combine_rollouts([])


def test_one_rollout_alone_is_itself():
    rollout = _rollout()
    assert (combine_rollouts([rollout]) == rollout).all()


def test_a_rollout_with_masks_does_not_mix_with_one_without():
    with pytest.raises(ExperienceError, match="only some of the rollouts have action_mask"):
        combine_rollouts([_rollout(masked=True), _rollout(stream=1_000_000)])


def test_a_rollout_with_pauses_mixes_with_one_that_never_paused():
    joined = combine_rollouts([_rollout(paused=True), _rollout(stream=1_000_000)])
    assert joined["valid"].sum() == 15  # 16 steps, one of them a pause


def test_combining_copies_and_leaves_its_input_alone():
    first, second = _rollout(start=0), _rollout(start=4)
    before = first.clone()
    combine_rollouts([first, second])["reward"].zero_()
    assert (first == before).all()


def test_the_total_reward_is_summed_in_double_precision():
    rollout = _rollout(1000, 3)
    assert rollout.total_reward() == pytest.approx(rollout["reward"].double().sum().item(), rel=1e-15)


@pytest.mark.parametrize("kind", [{}, {"nested": True}, {"masked": True}, {"paused": True}], ids=str)
def test_a_rollout_comes_back_from_disk_bit_for_bit(kind, tmp_path):
    rollout = _rollout(**kind)
    back = Rollout.load(rollout.save(tmp_path / "deep" / "rollout.safetensors"))
    assert isinstance(back, Rollout)
    assert back.batch_size == rollout.batch_size
    assert set(back.keys(True, True)) == set(rollout.keys(True, True))
    for key in rollout.keys(True, True):
        assert back[key].dtype == rollout[key].dtype
        assert torch.equal(back[key], rollout[key]), key


def test_a_saved_rollout_is_safetensors_with_a_schema_and_no_pickle(tmp_path):
    raw = _rollout().save(tmp_path / "rollout.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    facts = json.loads(raw[8 : 8 + length])["__metadata__"]
    assert facts["kind"] == "rollout"
    assert facts["schema"] == "1"
    assert b"\x80\x02" not in raw[: 8 + length]


def test_nothing_but_the_rollout_is_left_in_the_directory(tmp_path):
    _rollout().save(tmp_path / "rollout.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["rollout.safetensors"]


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path):
    path = _rollout().save(tmp_path / "rollout.safetensors")
    raw = path.read_bytes()
    for size in (0, 4, 8, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match="cannot be read"):
            Rollout.load(path)


def test_no_single_altered_byte_changes_what_is_loaded(tmp_path):
    path = _rollout(2, 1).save(tmp_path / "rollout.safetensors")
    raw = path.read_bytes()
    original = Rollout.load(path)
    accepted = 0
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x01]) + raw[at + 1 :])
        try:
            loaded = Rollout.load(path)
        except CheckpointError:
            continue
        accepted += 1
        assert loaded.batch_size == original.batch_size
        assert (loaded == original).all()
    assert accepted <= 10  # the schema digit that still says "not newer", and padding of the header


@pytest.mark.parametrize("content", [b"\x80\x04N.", b"PK\x03\x04", b"not a rollout at all"])
def test_what_is_not_safetensors_is_refused(content, tmp_path):
    path = tmp_path / "rollout.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Rollout.load(path)


def test_a_rollout_of_a_newer_schema_is_refused(tmp_path):
    path = _rollout().save(tmp_path / "rollout.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"schema":"1"', b'"schema":"2"', 1))
    with pytest.raises(CheckpointError, match="schema 1 or older"):
        Rollout.load(path)
