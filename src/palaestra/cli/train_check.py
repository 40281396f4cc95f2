"""What a configuration would train, found out without training: for the run service's look before a launch.

Builds one environment and the policy for it, so that everything `train` would refuse is refused here; writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from palaestra.config.file import is_ui_config
from palaestra.errors import ConfigError
from palaestra.telemetry.config import check_telemetry

__all__ = ["check_config"]


def check_config(data: Mapping[str, Any], *, seed: int | None = None) -> dict[str, Any]:
    """The resolved configuration with the names that a run is listed by; `ConfigError` for what cannot be trained."""
    return _check_screens(data, seed) if is_ui_config(data) else _check_environment(data, seed)


def _check_environment(data: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    from palaestra.runs.process.probe import signature
    from palaestra.train.config import config_from
    from palaestra.train.trainer import build_trainer

    config = config_from(data, seed=seed)
    check_telemetry(config.telemetry)
    # One copy tells what there is to know; hundreds in worker processes would only take longer.
    here = {"num_envs": 1} | ({"vectorization": "in_process"} if config.env.vectorization == "workers" else {})
    single = config.model_copy(update={"env": config.env.model_copy(update=here)})
    trainer = build_trainer(single)
    try:
        trainer.training.check_memory(config.rollout_length, config.trainer.buffer_size, num_envs=config.env.num_envs)
        spaces = signature(trainer.env, config.env.id)
    finally:
        trainer.env.close()
    return {
        "resolved": config.resolved(),
        "env_id": config.env.id,
        "algorithm": config.algorithm["name"],
        "total_steps": config.total_timesteps,
        "env_signature": spaces | _registered(config.env.id, config.env.max_episode_steps),
    }


def _registered(env_id: str, limit: int | None) -> dict[str, Any]:
    import gymnasium

    spec = gymnasium.registry.get(env_id)
    if spec is None:
        return {"max_episode_steps": limit}
    return {"entry_point": str(spec.entry_point or ""), "max_episode_steps": limit or spec.max_episode_steps}


def _check_screens(data: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    if find_spec("transformers") is None:
        raise ConfigError("model", data["model"], "transformers is not installed", "pip install 'palaestra[vlm,ui]'")
    from palaestra.policy.device import choose_device
    from palaestra.train.screen_config import screen_config_from

    config = screen_config_from(data, seed=seed)
    check_telemetry(config.telemetry)
    choose_device(config.model.device, place="model.device")
    return {
        "resolved": config.resolved(),
        "env_id": config.tasks[0].task,
        "algorithm": config.algorithm["name"],
        "total_steps": None,
        "env_signature": {"env_id": config.tasks[0].task, "tasks": [choice.task for choice in config.tasks]},
    }
