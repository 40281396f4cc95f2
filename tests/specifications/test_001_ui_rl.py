"""Specification 001, "UI-RL": its snippets as it writes them, with our import lines, hosts and the built-in model."""

import json
from pathlib import Path

import pytest

from palaestra.document import read_document
from palaestra.errors import ConfigError
from palaestra.train.ui_config import ui_config_from

pytestmark = pytest.mark.timeout(120)

CONFIG = """
experiment_name: "my_experiment"

model:
  name: "Qwen/Qwen2.5-VL-3B-Instruct"
  use_lora: true
  lora_target_option: "attention+mlp"  # Recommended
  lora_rank: 32

trainer:
  batch_size: 4
  learning_rate: null  # Auto-detect
  num_training_steps: 100

actor:
  max_steps_per_episode: 50
  task_prompt: "Complete the data entry task"
  session_type: "simple_data_entry"  # Maps to pod manifest function

actor_pool:
  target_concurrent_actors: 2

environment:
  cluster_host: "your-proxy-server-ip"  # Kubernetes proxy server
  namespace: "default"
  session_timeout: 300
"""
CONFIGS = Path(__file__).parents[2] / "configs" / "ui"


def _here(config, host):
    """The same file with a model and a host that are here, and episodes that end soon."""
    there = {"Qwen/Qwen2.5-VL-3B-Instruct": "tiny", "your-proxy-server-ip": host, "max_steps_per_episode: 50": "max_steps_per_episode: 2"}
    for old, new in there.items():
        config = config.replace(old, new)
    return config


def test_configure_your_training(tmp_path):
    path = tmp_path / "my_experiment.yaml"
    path.write_text(CONFIG)
    read = ui_config_from(read_document(path))
    assert (read.experiment_name, read.model.lora_target_option, read.model.lora_rank) == ("my_experiment", "attention+mlp", 32)
    assert (read.actor.session_type, read.actor_pool.target_concurrent_actors) == ("simple_data_entry", 2)
    assert (read.environment.cluster_host, read.environment.namespace) == ("your-proxy-server-ip", "default")
    assert (read.environment.session_timeout, read.trainer.learning_rate) == (300, None)


def test_basic_training_loop(cluster_host, tmp_path, monkeypatch):
    from palaestra.specifications import (
        Config,
        RejectionSampling,
        Trainer,
        VLMWrapper,
        simple_data_entry_pod_manifest,
    )
    from palaestra.specifications import ActorPool as ActorPoolManager
    import queue

    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/qwen25_vl_lora.yaml").write_text(_here(CONFIG, cluster_host))

    # Load config
    config = Config.from_yaml("config/qwen25_vl_lora.yaml")

    # Create model with LoRA
    model = VLMWrapper(
        model_name=config.model.name,
        use_lora=config.model.use_lora,
        lora_target_option=config.model.lora_target_option,
        lora_rank=config.model.lora_rank
    )

    # Create trainer
    trajectory_queue = queue.Queue()
    algorithm = RejectionSampling(reward_threshold=0.0)
    trainer = Trainer(
        model=model,
        algorithm=algorithm,
        trajectory_queue=trajectory_queue,
        batch_size=config.trainer.batch_size
    )

    # Create actor pool
    actor_pool = ActorPoolManager(
        target_concurrent_actors=config.actor_pool.target_concurrent_actors,
        cluster_host=config.environment.cluster_host,
        pod_manifest_fn=simple_data_entry_pod_manifest,
        model=model,
        trajectory_queue=trajectory_queue,
        task_prompt=config.actor.task_prompt,
        namespace=config.environment.namespace,
        max_steps_per_episode=config.actor.max_steps_per_episode
    )

    # Start training
    actor_pool.start()
    trainer.train(num_steps=2, save_every=1)
    actor_pool.stop()
    print(sorted(p.name for p in Path("var/training/runs").rglob("update_*")))
