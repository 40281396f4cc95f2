"""Configurations of runs: they resolve to themselves, and those we ship build."""

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
