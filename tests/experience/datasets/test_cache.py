"""Disk space: refused with the numbers before anything is written, and freed from the least recently used."""

import pytest
from tests.experience.datasets.samples import BOX, CHOICES, make_dataset

from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.datasets import list_datasets
from palaestra.experience.datasets.cache import check_disk, estimate_bytes, parse_age, parse_size, select_expired
from palaestra.experience.datasets.dataset import DatasetSummary
from palaestra.experience.datasets.storage import ArrayLayout


def row(name, size, used):
    return DatasetSummary(dataset_id=name, path="", state="verified", size_bytes=size, last_used=used)


ROWS = [row("new-v0", 100, 30.0), row("old-v0", 200, 10.0), row("middle-v0", 300, 20.0)]


def names(expired):
    return [row.dataset_id for row in expired]


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(DatasetError, match=r"about 2.0 GB on the disk.*64.0 MB in reserve, but 1.5 GB are free.*prune"):
        check_disk(tmp_path, 2_000_000_000, "a-v0", free=lambda root: 1_500_000_000)
    check_disk(tmp_path, 2_000_000_000, "a-v0", free=lambda root: 2_064_000_000)


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
