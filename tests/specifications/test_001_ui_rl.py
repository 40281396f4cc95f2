"""Specification 001, "UI-RL": its snippets as it writes them, with our import lines, hosts and the built-in model."""

import json
from pathlib import Path

import pytest

from palaestra.config.file import read_config_file
from palaestra.errors import ConfigError
from palaestra.train.screen_config import screen_config_from

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
    there = {
        "Qwen/Qwen2.5-VL-3B-Instruct": "tiny",
        "your-proxy-server-ip": host,
        "max_steps_per_episode: 50": "max_steps_per_episode: 2",
    }
    for old, new in there.items():
        config = config.replace(old, new)
    return config


def test_configure_your_training(tmp_path):
    path = tmp_path / "my_experiment.yaml"
    path.write_text(CONFIG)
    read = screen_config_from(read_config_file(path))
    assert (read.experiment_name, read.model.lora_target_option, read.model.lora_rank) == (
        "my_experiment",
        "attention+mlp",
        32,
    )
    assert (read.actor.session_type, read.actor_pool.target_concurrent_actors) == ("simple_data_entry", 2)
    assert (read.environment.cluster_host, read.environment.namespace) == ("your-proxy-server-ip", "default")
    assert (read.environment.session_timeout, read.trainer.learning_rate) == (300, None)


def test_basic_training_loop(cluster_host, tmp_path, monkeypatch):
    import queue

    from palaestra.specifications import ActorPool as ActorPoolManager
    from palaestra.specifications import (
        Config,
        RejectionSampling,
        Trainer,
        VLMWrapper,
        simple_data_entry_pod_manifest,
    )

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
        lora_rank=config.model.lora_rank,
    )

    # Create trainer
    trajectory_queue = queue.Queue()
    algorithm = RejectionSampling(reward_threshold=0.0)
    trainer = Trainer(
        model=model, algorithm=algorithm, trajectory_queue=trajectory_queue, batch_size=config.trainer.batch_size
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
        max_steps_per_episode=config.actor.max_steps_per_episode,
    )

    # Start training
    actor_pool.start()
    trainer.train(num_steps=2, save_every=1)
    actor_pool.stop()

    (run,) = Path("var/training/runs").iterdir()
    assert sorted(path.name for path in run.rglob("update_*")) == [f"update_0000000{n}" for n in range(3)]
    assert json.loads((run / "resolved.json").read_text())["actor_pool"]["target_concurrent_actors"] == 2
    assert model.checkpoint.name == "update_00000002"
    with pytest.raises(ConfigError, match=r"no started ActorPool plays with this model. Call start\(\)"):
        trainer.train(num_steps=1)


def test_run_single_episode(cluster_host, capsys):
    from palaestra.specifications import TaskRunner, VLMWrapper, simple_data_entry_pod_manifest

    vlm = VLMWrapper(model_name="tiny", history=0)  # its context holds few pictures

    runner = TaskRunner(
        cluster_host=cluster_host,
        pod_manifest_fn=simple_data_entry_pod_manifest,
        model=vlm,
        task_prompt="Complete the data entry form",
        namespace="default",
    )

    trajectory = runner.run_episode()
    print(f"Steps: {len(trajectory)}, Reward: {trajectory.total_reward()}")
    assert capsys.readouterr().out.startswith("Steps: ")
    assert trajectory.learnable
    assert runner.run_episode().session_id != trajectory.session_id  # a session of its own for each


def test_pod_manifests_as_functions_are_refused_with_the_way_to_give_one():
    from palaestra.specifications import TaskRunner, VLMWrapper

    with pytest.raises(ConfigError, match=r"the gateway owns the manifests.*gateway.kubernetes.manifests"):
        TaskRunner(cluster_host="h", pod_manifest_fn=lambda pod_name, session_id: {}, model=VLMWrapper())


def test_run_training(cluster_host, command):
    path = Path("config/qwen25_vl_lora.yaml")
    path.parent.mkdir()
    path.write_text(_here(CONFIG, "34.123.45.67"))
    # 100 and 500 updates would take long; the commands differ in the number alone.
    report = command("train", "--config", path, "--cluster-host", cluster_host, "--num-steps", 1, "-q")
    assert report["run_id"].startswith("my_experiment-")
    assert report["final"]["episodes"] == 4
    resolved = json.loads((Path(report["run_dir"]) / "resolved.json").read_text())
    assert resolved["environment"]["cluster_host"] == cluster_host
    assert resolved["trainer"]["num_training_steps"] == 1


def test_options_that_mean_nothing_or_too_much_are_refused(command, tmp_path):
    path = tmp_path / "cartpole.yaml"
    path.write_text("env: {id: CartPole-v1}\n")
    assert "--cluster-host = 'h': is only for UI agents" in command("train", path, "--cluster-host", "h")
    assert "--config" in command("train", path, "--config", path)


@pytest.mark.parametrize(
    "name",
    [
        "qwen25_vl_lora",
        "qwen25_vl_full_finetune",
        "multi_machine",
        "experiments/lora_ablation_attention_only",
        "experiments/lora_ablation_mlp_only",
    ],
)
def test_the_configurations_it_lists_ship(name):
    config = screen_config_from(read_config_file(CONFIGS / f"{name}.yaml"))
    assert config.model.name == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert config.model.use_lora is (name != "qwen25_vl_full_finetune")
    assert config.model.lora_target_option == ("attention+mlp" if "only" not in name else name.split("_")[2])


def test_keys_of_its_configuration_classes_are_read_where_ours_are():
    read = screen_config_from(
        {
            "model": {
                "name": "tiny",
                "torch_dtype": "float32",
                "freeze_vision_encoder": False,
                "temperature": 0.7,
                "lora_target_option": "custom",
                "lora_custom_modules": ["q_proj"],
            },
            "trainer": {"algorithm": "rejection_sampling", "reward_threshold": 0.5, "save_every": 7},
            "environment": {"max_retries": 5},
        }
    )
    assert (read.model.dtype, read.model.freeze_vision, read.model.lora_target_modules) == (
        "float32",
        False,
        ("q_proj",),
    )
    assert (read.actor.temperature, read.actor.retries, read.trainer.checkpoint_every) == (0.7, 5, 7)
    assert read.algorithm["reward_threshold"] == 0.5
    with pytest.raises(ConfigError, match=r"trainer.save_every = 7: trainer.checkpoint_every says 5. Give one"):
        screen_config_from({"model": {"name": "tiny"}, "trainer": {"save_every": 7, "checkpoint_every": 5}})
