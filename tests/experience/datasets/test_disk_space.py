"""Disk space: refused with the numbers before anything is written, and freed from the least recently used."""

import pytest
from tests.experience.datasets.samples import BOX, CHOICES, make_dataset

from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.datasets import list_datasets
from palaestra.experience.datasets.dataset import DatasetSummary
from palaestra.experience.datasets.disk_space import check_disk, estimate_bytes, parse_age, parse_size, select_expired
from palaestra.experience.datasets.episodes import ArrayLayout
from palaestra.experience.datasets.incomplete_downloads import (
    delete_download,
    hold_download,
    is_downloading,
    list_downloads,
)


def row(name, size, used):
    return DatasetSummary(dataset_id=name, path="", state="verified", size_bytes=size, last_used=used)


ROWS = [row("new-v0", 100, 30.0), row("old-v0", 200, 10.0), row("middle-v0", 300, 20.0)]


def names(expired):
    return [row.dataset_id for row in expired]


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(DatasetError, match=r"about 2.0 GB on the disk.*64.0 MB in reserve, but 1.5 GB are free.*prune"):
        check_disk(tmp_path, 2_000_000_000, "a-v0", free=lambda root: 1_500_000_000)
    check_disk(tmp_path, 2_000_000_000, "a-v0", free=lambda root: 2_064_000_000)


def test_a_dataset_beyond_the_limit_is_refused_with_the_sizes_and_a_command_that_makes_room(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    (used,) = (row.size_bytes for row in list_datasets(tmp_path))
    monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "1MB")
    check_disk(tmp_path, 10**6 - used, "a-v0", free=lambda root: 10**12)
    with pytest.raises(
        DatasetError, match=r"needs about 998.0 kB .* take \d.*MAX_SIZE allows \(1.0 MB\).*prune --max-size 2kB"
    ):
        check_disk(tmp_path, 998_000, "a-v0", free=lambda root: 10**12)
    with pytest.raises(DatasetError, match=r"\. Raise PALAESTRA_DATASETS_MAX_SIZE"):
        check_disk(tmp_path, 2 * 10**6, "a-v0", free=lambda root: 10**12)
    monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "much")
    with pytest.raises(ConfigError, match=r"PALAESTRA_DATASETS_MAX_SIZE = 'much': is not a size"):
        check_disk(tmp_path, 1, "a-v0")


def test_what_has_arrived_of_a_download_counts_and_can_be_deleted(tmp_path, monkeypatch):
    with hold_download(tmp_path, "a/b-v0") as place:
        (place / "part").write_bytes(bytes(5000))
        assert is_downloading(tmp_path, "a/b-v0")
        with pytest.raises(DatasetError, match="is being downloaded by another process"):
            delete_download(tmp_path, "a/b-v0")
    (row,) = list_downloads(tmp_path)
    assert (row.dataset_id, row.state, row.size_bytes) == ("a/b-v0", "incomplete", 5000)
    assert "continue it with: palaestra datasets download a/b-v0" in row.problem
    monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "6kB")
    with pytest.raises(DatasetError, match=r"take 5.0 kB"):
        check_disk(tmp_path, 2000, "c-v0", free=lambda root: 10**12)
    delete_download(tmp_path, "a/b-v0")
    assert list(tmp_path.iterdir()) == []


def test_a_download_of_which_nothing_arrived_leaves_nothing(tmp_path):
    with hold_download(tmp_path / "root", "a/b-v0"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_is_above_and_near_the_size_on_disk(tmp_path):
    for episodes in (1, 50):
        root = tmp_path / str(episodes)
        from tests.experience.datasets.samples import count_up

        make_dataset(root, episodes=[count_up(9) for _ in range(episodes)])
        (summary,) = list_datasets(root)
        estimate = estimate_bytes(ArrayLayout(BOX, CHOICES), 9 * episodes, episodes)
        assert summary.size_bytes - 4096 < estimate < 2.5 * summary.size_bytes


def test_the_least_recently_used_go_first_until_the_rest_fits():
    assert names(select_expired(ROWS, max_size=600, now=40.0)) == []
    assert names(select_expired(ROWS, max_size=599, now=40.0)) == ["old-v0"]
    assert names(select_expired(ROWS, max_size=399, now=40.0)) == ["old-v0", "middle-v0"]
    assert names(select_expired(ROWS, max_size=0, now=40.0)) == ["old-v0", "middle-v0", "new-v0"]


def test_an_age_removes_what_was_not_used_for_longer():
    assert names(select_expired(ROWS, older_than=20.0, now=40.0)) == ["old-v0"]
    assert names(select_expired(ROWS, older_than=20.0, max_size=100, now=40.0)) == ["old-v0", "middle-v0"]


def test_a_dataset_in_use_stays():
    assert names(select_expired(ROWS, max_size=0, now=40.0, in_use={"old-v0"})) == ["middle-v0", "new-v0"]
    assert names(select_expired(ROWS, older_than=1.0, now=40.0, in_use={"old-v0"})) == ["middle-v0", "new-v0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("750 mb", 750 * 10**6), ("1.5k", 1500), ("12", 12), ("2TB", 2 * 10**12), ("0", 0)],
)
def test_sizes_are_read_with_their_unit(text, expected):
    assert parse_size(text, "--max-size") == expected


@pytest.mark.parametrize(("text", "expected"), [("30d", 30 * 86_400), ("12h", 43_200), ("2w", 1_209_600), ("5m", 300)])
def test_ages_are_read_with_their_unit(text, expected):
    assert parse_age(text, "--older-than") == expected


@pytest.mark.parametrize("text", ["", "five", "-1GB", "5 GiB", "1e9", "GB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text, "--max-size")


@pytest.mark.parametrize("text", ["", "30", "-1d", "d", "1y"])
def test_other_ages_are_refused(text):
    with pytest.raises(ConfigError, match="is not an age"):
        parse_age(text, "--older-than")
