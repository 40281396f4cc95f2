"""Directories of demonstrations: what they hold, what they refuse, and the order they are drawn in."""

import errno
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.experience.demonstrated import write
from tests.learner.trajectories.toy import episode, turn

from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.demonstrations import (
    MANIFEST,
    Demonstrations,
    DemonstrationSampler,
    DemonstrationsConfig,
    DemonstrationWriter,
)
from palaestra.experience.trajectory import NOT_SAMPLED, Source, Trajectory


def demonstration(number, task="toy/add", **more):
    told = turn(number % 10, ((number + 3) % 10, 10), [0.0, 0.0], NOT_SAMPLED, reward=1.0)
    facts = {"task": {"task": task, "seed": number, "params": {}}, "source": Source.DEMONSTRATION}
    return episode(told, name=f"d{number}", **(facts | more))


def test_a_directory_lists_loads_and_counts_what_was_written(tmp_path):
    made = write(tmp_path / "d", [demonstration(1), demonstration(2), demonstration(3, "toy/other")])
    assert len(made) == 3
    assert made.count_tasks() == {"toy/add": 2, "toy/other": 1}
    loaded = made.load(made.entries[0])
    assert loaded.source is Source.DEMONSTRATION
    assert loaded.turns[0].is_demonstration
    assert Demonstrations(tmp_path / "d", tasks=["toy/other"]).count_tasks() == {"toy/other": 1}
    with pytest.raises(ConfigError, match=r"demonstrations.tasks = 'toy/none': no demonstration of it. There are: toy"):
        Demonstrations(tmp_path / "d", tasks=["toy/none"])


def test_a_sampled_episode_is_neither_written_nor_loaded_as_a_demonstration(tmp_path):
    writer = DemonstrationWriter(tmp_path / "d", {"codec": "toy"})
    for one in (episode(), episode(source=Source.DEMONSTRATION), demonstration(1, source=Source.POLICY)):
        with pytest.raises(ExperienceError, match="is not a demonstration"):
            writer.add(one)
    entry = writer.add(demonstration(1))
    demonstration(1, source=Source.POLICY).save(tmp_path / "d" / entry.file)
    made = Demonstrations(tmp_path / "d")
    with pytest.raises(ExperienceError, match="a policy sampled it"):
        made.load(made.entries[0])


def test_the_source_survives_a_file_and_files_without_one_are_of_a_policy():
    one = demonstration(4)
    assert Trajectory.from_bytes(one.to_bytes()).source is Source.DEMONSTRATION
    assert Trajectory.from_bytes(episode().to_bytes()).source is Source.POLICY


def test_a_directory_for_another_model_is_refused_with_the_key_that_differs(tmp_path):
    made = write(tmp_path / "d", [demonstration(1)], {"codec": "qwen3-vl", "history": 4})
    made.check_format({"codec": "qwen3-vl", "history": 4})
    with pytest.raises(ConfigError, match=r"was made for another history \(4; this configuration has 2\)"):
        made.check_format({"codec": "qwen3-vl", "history": 2})
    with pytest.raises(ConfigError, match="another codec"):
        DemonstrationWriter(tmp_path / "d", {"codec": "anthropic", "history": 4})


@pytest.mark.parametrize("broken", ["missing", "text", "schema"])
def test_a_directory_without_a_readable_manifest_is_refused(tmp_path, broken):
    write(tmp_path / "d", [demonstration(1)])
    manifest = tmp_path / "d" / MANIFEST
    if broken == "missing":
        manifest.unlink()
        with pytest.raises(ConfigError, match="exists and holds no demonstrations"):
            DemonstrationWriter(tmp_path / "d", {"codec": "toy"})
    else:
        manifest.write_text("{" if broken == "text" else json.dumps({"schema": 99}))
    with pytest.raises(ConfigError, match=r"demonstrations.path"):
        Demonstrations(tmp_path / "d")


def test_a_truncated_file_is_named_and_left_out_and_an_altered_one_is_refused_with_a_remedy(tmp_path):
    made = write(tmp_path / "d", [demonstration(1), demonstration(2)])
    first, second = (tmp_path / "d" / entry.file for entry in made.entries)
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(second.read_bytes().replace(b"toy/add", b"toy/sub"))
    damaged = Demonstrations(tmp_path / "d")
    assert len(damaged) == 1
    ((file, reason),) = damaged.damaged.items()
    assert (file, reason.startswith("cannot be read as a trajectory")) == (first, True)
    with pytest.raises(ExperienceError, match=r"its digest differs\. Restore the file, or delete it"):
        damaged.load(damaged.entries[0])


def test_facts_of_a_manifest_that_are_no_object_are_ignored(tmp_path):
    made = write(tmp_path / "d", [])
    (tmp_path / "d" / MANIFEST).write_text(json.dumps({**made.manifest, "about": [1]}))
    assert Demonstrations(tmp_path / "d").about == {}


@pytest.mark.parametrize("name", ["file/d", "x" * 300])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output = .* cannot be written \(.*\)\. Name another directory"):
        DemonstrationWriter(tmp_path / name, {"codec": "toy"})


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    writer = DemonstrationWriter(tmp_path / "d", {"codec": "toy"})
    writer.add(demonstration(1))

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trajectory, "save", fail)
    with pytest.raises(
        ExperienceError, match=r"cannot be written \(No space left on device\)\. What was written before"
    ):
        writer.add(demonstration(2))
    assert len(Demonstrations(tmp_path / "d")) == 1


def test_a_relative_path_still_names_the_directory_after_the_working_directory_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DemonstrationsConfig(path="d").path == tmp_path / "d"


@pytest.mark.parametrize("share", [-0.1, 0.91, 1.0, float("nan")])
def test_a_share_that_is_negative_or_leaves_next_to_no_episodes_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        DemonstrationsConfig(share=share)


def test_an_empty_directory_cannot_be_drawn_from(tmp_path):
    with pytest.raises(ConfigError, match="holds no demonstration"):
        DemonstrationSampler(write(tmp_path / "d", []), seed=0)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    return write(tmp_path_factory.mktemp("seven") / "d", [demonstration(number) for number in range(7)])


def names(trajectories):
    return [one.episode_id for one in trajectories]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10), counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), stop=st.integers(0, 5))
def test_every_epoch_has_each_once_and_a_restored_sampler_draws_the_same(seven, seed, counts, stop):
    sampler, order, state, rest = DemonstrationSampler(seven, seed=seed), [], None, []
    for place, count in enumerate(counts):
        if place == stop:
            state = json.loads(json.dumps(sampler.state()))
        drawn = names(sampler.draw(count))
        order += drawn
        rest += drawn if state is not None else []
    assert sampler.epochs == pytest.approx(len(order) / 7)
    for start in range(0, len(order), 7):
        epoch = order[start : start + 7]
        assert len(set(epoch)) == len(epoch)
    if state is not None:
        again = DemonstrationSampler(seven, seed=seed + 1)
        again.load_state(state)
        again._seed = seed
        assert names(again.draw(len(rest))) == rest


def test_a_checkpoint_that_continues_with_a_missing_demonstration_is_refused(seven):
    state = {"epoch": 0, "remaining": ["00000099_gone.safetensors"]}
    with pytest.raises(CheckpointError, match="00000099_gone"):
        DemonstrationSampler(seven, seed=0).load_state(state)


@pytest.mark.parametrize(
    ("share", "batch", "count"), [(0.25, 12, 4), (0.25, 32, 11), (0.5, 8, 8), (0.01, 4, 1), (0.0, 32, 0)]
)
def test_the_share_counts_demonstrations_beside_the_episodes_of_a_batch(tmp_path, share, batch, count):
    assert DemonstrationsConfig(path=tmp_path, share=share).count_per_update(batch) == count
    assert DemonstrationsConfig(share=share).count_per_update(batch) == 0
