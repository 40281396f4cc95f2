"""What each package promises is written down, exists, and is small."""

import pkgutil
import subprocess
import sys
from importlib import import_module
from inspect import ismodule

import pytest

import palaestra

PACKAGES = [m.name for m in pkgutil.iter_modules(palaestra.__path__) if m.ispkg]
ROOT = """
    ActorCritic ActorPool GRPO PPO PPOTrainer RejectionSampling Rollout RolloutBuffer TaskRunner TrainedRun
    Trainer Trajectory VLABuffer VLAPolicy VLMPolicy __version__ as_vector_env collate_trajectories combine_rollouts
    evaluate load load_config load_vla_model train
""".split()
NOT_PUBLIC = ("annotations", "Any", "TYPE_CHECKING", "lazy_attributes", "make_callable")
OPERATIONS = ["runs", "studio", "gateway", "sessions", "telemetry", "files"]


@pytest.mark.parametrize("package", [p for p in PACKAGES if hasattr(import_module(f"palaestra.{p}"), "__all__")])
def test_every_public_name_is_declared_and_every_declared_name_exists(package):
    module = import_module(f"palaestra.{package}")
    declared = {name: getattr(module, name) for name in module.__all__}
    visible = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not ismodule(value) and name not in NOT_PUBLIC
    }
    assert visible <= set(declared)
    assert len(declared) <= 10


def test_the_root_exports_the_names_people_arrive_with_and_nothing_else():
    assert sorted(palaestra.__all__) == sorted(ROOT)
    assert set(ROOT) <= set(dir(palaestra))
    names = [name for name in ROOT if name != "__version__"]
    assert [getattr(palaestra, name).__name__.rpartition(".")[2] for name in names] == names
    assert callable(palaestra.train)
    visible = {name for name, value in vars(palaestra).items() if not name.startswith("_") and not ismodule(value)}
    assert visible <= {*ROOT, *NOT_PUBLIC}
    with pytest.raises(AttributeError, match="module 'palaestra' has no attribute 'DQN'"):
        _ = palaestra.DQN


def test_importing_the_root_loads_nothing_heavy():
    code = """
import sys, palaestra
sys.exit(str([name for name in ("torch", "numpy", "pydantic", "yaml", "gymnasium") if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_every_package_says_what_it_is_for():
    assert all(import_module(f"palaestra.{package}").__doc__ for package in PACKAGES)


@pytest.mark.parametrize("package", OPERATIONS)
def test_no_torch_in_the_operations_tower(package):
    """In a fresh interpreter, every module of the package."""
    code = f"""
import pkgutil, sys, importlib
import palaestra.{package} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
heavy = [name for name in ("torch", "tensordict", "transformers") if name in sys.modules]
sys.exit(f"imports {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_trajectories_that_the_run_service_shows_are_read_without_torch():
    code = """
import sys, palaestra.experience, palaestra.experience.trajectory, palaestra.experience.trajectory_archive
sys.exit(str([name for name in ("torch", "tensordict", "transformers") if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_what_a_gateway_reads_its_configuration_with_loads_no_torch():
    code = """
import sys, palaestra.cli.services, palaestra.gateway.serving, palaestra.config.file
sys.exit(str([name for name in ("torch", "numpy", "tensordict") if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_asking_for_help_loads_neither_torch_nor_numpy():
    code = """
import sys, palaestra.cli.app
palaestra.cli.app.build_app(["--help"])
sys.exit(str([name for name in ("torch", "numpy", "numba", "gymnasium") if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr
