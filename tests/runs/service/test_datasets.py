"""Datasets over HTTP: the list with the state of the files, and verification of every byte."""

import os

import pytest
from tests.experience.datasets.samples import make_dataset

from palaestra.errors import UnknownRun
from palaestra.runs.catalogue import DatasetInfo


@pytest.fixture
def dataset(served, request):
    return make_dataset(served.home.datasets, f"http/{request.node.name.replace('_', '-')[:60]}-v0", random_score=1.0)


def find(served, dataset):
    return next(info for info in served.trainer.datasets() if info.dataset_id == dataset.dataset_id)


def test_the_list_says_what_a_dataset_holds_and_that_it_was_verified(served, dataset):
    info = find(served, dataset)
    assert isinstance(info, DatasetInfo)
    assert (info.state, info.total_steps, info.total_episodes, info.env_id) == ("verified", 5, 2, "Count-v0")
    assert (info.random_score, info.expert_score, info.sha256) == (1.0, None, dataset.sha256)
    assert (info.about, info.used_by) == ({"policy": "test"}, ())
    assert info in served.trainer.datasets(env="Count-v0")
    assert served.trainer.datasets(env="CartPole-v1") == []


def test_a_changed_byte_is_unchecked_in_the_list_and_damaged_after_verification(served, dataset):
    main = dataset.path / "data" / "main_data.hdf5"
    data = bytearray(main.read_bytes())
    data[-1] ^= 1
    main.write_bytes(data)
    assert find(served, dataset).state == "unchecked"
    info = served.trainer.verify_dataset(dataset.dataset_id)
    assert (info.state, "main_data.hdf5 was changed" in info.problem) == ("damaged", True)


def test_verification_makes_an_untouched_dataset_verified_again(served, dataset):
    os.utime(dataset.path / "data" / "main_data.hdf5", ns=(1, 1))
    assert find(served, dataset).state == "unchecked"
    assert served.trainer.verify_dataset(dataset.dataset_id).state == "verified"
    assert find(served, dataset).state == "verified"


def test_a_directory_of_minari_is_unverified_and_says_what_to_do(served, dataset):
    (dataset.path / "manifest.json").unlink()
    assert (find(served, dataset).state, "palaestra datasets import" in find(served, dataset).problem) == (
        "unverified",
        True,
    )
    assert served.trainer.verify_dataset(dataset.dataset_id).state == "unverified"


def test_a_running_run_that_names_the_dataset_is_listed_as_its_user(served, dataset):
    trainer = served.trainer
    run_id = trainer.start_run({"steps": 3, "until": str(dataset.path), "then": "hang"}, runner="echo")
    try:
        assert find(served, dataset).used_by == (run_id,)
    finally:
        trainer.stop_run(run_id, grace_s=0)
    assert find(served, dataset).used_by == ()


@pytest.mark.parametrize("name", ["nothing-v0", "../../etc", "a/b/c"])
def test_an_unknown_dataset_is_a_404(served, name):
    with pytest.raises(UnknownRun):
        served.trainer.verify_dataset(name)
