"""Configurations of runs: they resolve to themselves, and those we ship build."""

import pytest
from tests.experience.datasets.samples import make_dataset

from palaestra.errors import DatasetError
from palaestra.experience.datasets import find_dataset
from palaestra.files.home import Home
from palaestra.train.config import config_from
from palaestra.train.trainer import build_trainer


def test_a_resolved_configuration_resolves_to_itself():
    config = config_from({"env": {"id": "CartPole-v1"}, "trainer": {"iterations": 3, "rollout_length": 128}})
    assert config_from(config.to_json()) == config
    assert config.total_timesteps == 3 * 128 * 8


def test_every_configuration_we_ship_is_valid_and_builds(request):
    from palaestra.train.config import load_config

    folder = request.config.rootpath / "configs" / "ppo"
    files = sorted(folder.glob("*.yaml"))
    assert len(files) >= 1
    for path in files:
        trainer = build_trainer(load_config(path))
        trainer.env.close()


def test_the_environment_of_a_dataset_is_read_without_hashing_or_using_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    root = Home.default().datasets
    dataset = make_dataset(root, env_id="CartPole-v1", about={"env_kwargs": {"sutton_barto_reward": True}})
    (dataset.path / "data" / "main_data.hdf5").unlink()
    before = (dataset.path / "manifest.json").stat().st_mtime_ns
    config = config_from({"dataset": {"id": "count/up-v0"}, "algorithm": {"name": "bc"}})
    assert (config.env.id, config.env.kwargs) == ("CartPole-v1", {"sutton_barto_reward": True})
    assert (dataset.path / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(DatasetError, match=r"main_data.hdf5 is missing"):
        find_dataset("count/up-v0", root)
